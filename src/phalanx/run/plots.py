"""Pictures of runs and of measurements. Needs matplotlib, which is imported here only."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.errors import UsageError
from phalanx.seams.records import Evaluated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS_COLOR = "#1f5a96"
DEATH_COLOR = "#c1452b"
POINTS = 600


def plot_history(
    loss_history: Sequence[float],
    metric_history: Sequence[Evaluated],
    per_epoch: int | None,
    title: str,
    ax: Axes | None = None,
) -> Axes:
    """Draw the loss of every step with its mean per epoch and, on a second axis, the evaluations."""
    ax, unit, losses = ax or new_axes(), per_epoch or 1, np.asarray(loss_history, dtype=np.float64)
    ends = range(unit, len(losses) + 1, unit) if unit > 1 else ()
    style = {"marker": "." * (len(losses) == 1), "alpha": 0.3 if ends else 1.0}
    ax.plot(np.arange(1, len(losses) + 1) / unit, losses, color=LOSS_COLOR, label="loss, every step", **style)
    if ends:
        means = [losses[end - unit : end].mean() for end in ends]
        ax.plot([end / unit for end in ends], means, ".-", color=LOSS_COLOR, label="loss, epoch mean")
    positive = losses[np.isfinite(losses)]
    if len(positive) and positive.min() > 0 and positive.max() / positive.min() > 50:
        ax.set_yscale("log")
    if metric_history:
        _plot_metrics(metric_history, ax, unit)
    return _finished(ax, "epoch" if per_epoch else "step", "training loss", title)


def plot_runs(
    names: Sequence[str],
    curves: Sequence[Mapping[str, Sequence[tuple[float, float]]]],
    marks: Sequence[Sequence[int]],
) -> Figure:
    """One run, or several in colours of their own: a chart for each curve over the steps, with marks below it."""
    keys = [key for key in dict.fromkeys(key for one in curves for key in one) if any(one.get(key) for one in curves)]
    figure: Any = new_axes().figure
    figure.clear()
    figure.set_size_inches(8, 0.6 + 1.9 * len(keys))
    charts = figure.subplots(max(1, len(keys)), 1, squeeze=False, sharex=True)[:, 0]
    charts[-1].set_xlabel("step")
    for ax, key in zip(charts, keys, strict=False):
        for name, color, curve, marked in zip(names, (LOSS_COLOR, DEATH_COLOR), curves, marks, strict=False):
            points = _thinned(curve.get(key, ()))
            ax.plot(*zip(*points, strict=True), color=color, linewidth=1.3, label=name, marker="." * (len(points) < 30))
            ax.plot(marked, [0] * len(marked), "|", color=color, markersize=12, transform=ax.get_xaxis_transform())
        ax.set_title(key, fontsize=10, loc="left")
        ax.grid(alpha=0.2)
        ax.spines[["top", "right"]].set_visible(False)
    if keys and len(names) > 1:
        figure.axes[0].legend(loc="best", fontsize=8)
    return figure


def svg(figure: Figure) -> str:
    """A picture as an element of a page; its words are text, which can be found and copied."""
    import matplotlib as mpl

    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg")
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def plot_choices(rows: Sequence[tuple[str, int, float]], title: str) -> Axes:
    """Samples per second over R, of (name of the line, R, samples per second); the numbers of R are evenly apart."""
    ax = new_axes()
    counts = sorted({replicas for _, replicas, _ in rows})
    for name in dict.fromkeys(name for name, _, _ in rows):
        points = [(counts.index(replicas), rate) for line, replicas, rate in rows if line == name]
        ax.plot(*zip(*points, strict=True), "o-", label=name)
    ax.set_xticks(range(len(counts)), [str(count) for count in counts])
    ax.set_ylim(bottom=0)
    return _finished(ax, "replicas (R, part of the answer)", "samples/s", title)


def plot_rates(lrs: Sequence[float], losses: Sequence[float], suggestion: float, ax: Axes | None = None) -> Axes:
    """Draw smoothed losses over learning rates, and the one that is suggested."""
    ax = ax or new_axes()
    ax.semilogx(lrs, losses, color=LOSS_COLOR)
    ax.axvline(suggestion, color=DEATH_COLOR, linestyle="--", label=f"falls fastest at {suggestion:.1e}")
    return _finished(ax, "learning rate", "training loss, smoothed", "")


def _finished(ax: Axes, across: str, up: str, title: str) -> Axes:
    ax.set(xlabel=across, ylabel=up)
    ax.set_title(title, fontsize=9, wrap=True)
    ax.grid(alpha=0.2)
    where: dict[str, Any] = {}
    if ax.figure.get_layout_engine():  # else what lies outside of the axes might be cut off
        where = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 4, "frameon": False}
    ax.legend(fontsize=8, **where)
    return ax


def _plot_metrics(metric_history: Sequence[Evaluated], ax: Axes, unit: int) -> None:
    twin = ax.twinx()
    names = list(dict.fromkeys(evaluated.name for evaluated in metric_history))
    for number, name in enumerate(names):
        points = [(evaluated.steps / unit, evaluated.value) for evaluated in metric_history if evaluated.name == name]
        style = {"color": f"C{number + 1}", "marker": "s", "markersize": 3}
        twin.plot(*zip(*points, strict=True), **style)
        ax.plot([], [], label=f"{name}, {points[-1][1]:.4g}", **style)
    twin.set_ylabel(", ".join(names))


def _thinned(curve: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most POINTS points, each the mean of the steps that it stands for."""
    size = max(1, -(-len(curve) // POINTS))
    groups = (curve[start : start + size] for start in range(0, len(curve), size))
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def new_axes() -> Axes:
    """Axes of a figure of their own, without the global state of pyplot.

    Raises
    ------
    UsageError
        matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plot needs matplotlib; install it: pip install 'phalanx[plot]'") from error
    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots()
