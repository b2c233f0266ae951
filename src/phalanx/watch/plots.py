"""Pictures of a run. Needs matplotlib, which is imported here only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from phalanx.result import Result

LOSS_COLOR = "#1f5a96"
METRIC_COLOR = "#c1452b"


def plot_history(result: Result, ax: Axes | None = None, metric_name: str = "metric") -> Axes:
    """Draw the loss of every step with its mean per epoch and, on a second axis, the evaluations."""
    ax = _new_axes() if ax is None else ax
    per_epoch = result.steps_per_epoch
    unit = per_epoch or 1
    losses = np.asarray(result.loss_history, dtype=np.float64)
    at = np.arange(1, len(losses) + 1) / unit
    many = per_epoch is not None and len(losses) > per_epoch
    ax.plot(at, losses, color=LOSS_COLOR, alpha=0.3 if many else 1.0, linewidth=1, label="loss, every step")
    if many and per_epoch is not None:
        ends = range(per_epoch, len(losses) + 1, per_epoch)
        means = [losses[end - per_epoch : end].mean() for end in ends]
        ax.plot(
            [end / unit for end in ends], means, color=LOSS_COLOR, marker="o", markersize=3, label="loss, epoch mean"
        )
    positive = losses[np.isfinite(losses)]
    if len(positive) and positive.min() > 0 and positive.max() / positive.min() > 50:
        ax.set_yscale("log")
    ax.set_xlabel("epoch" if per_epoch else "step")
    ax.set_ylabel("training loss", color=LOSS_COLOR)
    ax.tick_params(axis="y", labelcolor=LOSS_COLOR)
    ax.grid(alpha=0.2)
    ax.set_title(f"{result.replicas} replicas, {result.steps} steps, digest {result.digest[:12]}", fontsize=10)
    if result.metric_history:
        _plot_metric(result, ax, unit, metric_name)
    ax.legend(loc="center right", frameon=False, fontsize=8)
    return ax


def _plot_metric(result: Result, ax: Axes, unit: int, name: str) -> None:
    at = [evaluated.steps / unit for evaluated in result.metric_history]
    values = [evaluated.value for evaluated in result.metric_history]
    twin = ax.twinx()
    twin.plot(at, values, color=METRIC_COLOR, marker="s", markersize=3)
    twin.set_ylabel(name, color=METRIC_COLOR)
    twin.tick_params(axis="y", labelcolor=METRIC_COLOR)
    ax.plot([], [], color=METRIC_COLOR, marker="s", markersize=3, label=name)
    if math.isfinite(values[-1]):
        last = (at[-1], values[-1])
        style = {"ha": "right", "color": METRIC_COLOR, "fontsize": 9}
        twin.annotate(f"{values[-1]:.4g}", last, textcoords="offset points", xytext=(-4, -12), **style)


def _new_axes() -> Axes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plot needs matplotlib; install it: pip install 'phalanx[plot]'") from error
    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots()
