"""Pictures of runs and of measurements. Needs matplotlib, which is imported here only."""

from __future__ import annotations

import functools
import io
import itertools
import math
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
ABOVE = 20  # points between axes and their title, where the legend is
COLORS = 10  # of matplotlib
LEGEND = 110  # characters that fit beside each other above a page's charts
LONG = 30  # points from which on a curve is smoothed, and has no markers
RATE = "samples a second"
LOGARITHMIC = ("loss", "grad_norm")  # where values lie far apart
SMOOTHED = (*LOGARITHMIC, RATE)


def plot_history(
    loss_history: Sequence[float],
    metric_history: Sequence[Evaluated],
    per_epoch: int | None,
    title: str,
    ax: Axes | None = None,
) -> Axes:
    """Draw the loss of every step with its mean per epoch and, in charts below it, metrics of like size together."""
    groups, unit, losses = _groups(metric_history), per_epoch or 1, np.asarray(loss_history, dtype=np.float64)
    charts = _stacked(ax or new_axes(height=4 + 1.6 * len(groups)), len(groups))
    ends = range(unit, len(losses) + 1, unit) if unit > 1 else ()
    style = {"marker": "." * (len(losses) == 1), "alpha": 0.3 if ends else 1.0}
    charts[0].plot(np.arange(1, len(losses) + 1) / unit, losses, color=LOSS_COLOR, label="loss, every step", **style)
    if ends:
        means = [losses[end - unit : end].mean() for end in ends]
        charts[0].plot([end / unit for end in ends], means, ".-", color=LOSS_COLOR, label="loss, epoch mean")
    _scale(charts[0], losses)
    colors = (f"C{number}" for number in itertools.count(1))
    for chart, names in zip(charts[1:], groups, strict=True):
        for name in names:
            points = [(item.steps / unit, item.value) for item in metric_history if item.name == name]
            style = {"color": next(colors), "marker": "s", "markersize": 3}
            chart.plot(*zip(*points, strict=True), label=f"{name}, {points[-1][1]:.4g}", **style)
    across = "epoch" if per_epoch else "step"
    for chart in charts:
        last = chart is charts[-1]
        _finished(chart, across if last else "", "training loss" if chart is charts[0] else "")
        chart.tick_params(axis="x", bottom=last, labelbottom=last)
    charts[0].set_title(title, fontsize=9, wrap=True, pad=ABOVE)
    return charts[0]


def plot_runs(
    names: Sequence[str],
    curves: Sequence[Mapping[str, Sequence[tuple[float, float]]]],
    marks: Sequence[Sequence[int]],
) -> Figure:
    """One run, or several in colours of their own: a chart for each curve over the steps, with marks below it.

    A long curve of losses, norms or speed is drawn pale, with a smoothed one over it.
    """
    keys = [key for key in dict.fromkeys(key for one in curves for key in one) if any(one.get(key) for one in curves)]
    figure: Any = new_axes().figure
    figure.clear()
    beside = max(1, min(4, LEGEND // (6 + max(map(len, names)))))
    figure.set_size_inches(8, 0.6 + 1.9 * len(keys) + 0.2 * (len(names) // beside))
    charts = figure.subplots(max(1, len(keys)), 1, squeeze=False, sharex=True)[:, 0]
    charts[-1].set_xlabel("step")
    for ax, key in zip(charts, keys, strict=False):
        for number, (name, curve, marked) in enumerate(zip(names, curves, marks, strict=True)):
            style = {"color": f"C{number % COLORS}", "linestyle": ("-", "--", ":")[number // COLORS % 3]}
            points = _thinned(curve.get(key, ()))
            if len(points) >= LONG and key in SMOOTHED:
                ax.plot(*zip(*points, strict=True), color=style["color"], linewidth=1, alpha=0.25)
                points = _smooth(points)
            markers = {"marker": "." * (len(points) < LONG)}
            ax.plot(*zip(*points, strict=True), linewidth=1.3, label=name[-LEGEND + 10 :], **markers, **style)
            across = ax.get_xaxis_transform()
            ax.plot(marked, [0] * len(marked), "|", markersize=12, transform=across, color=style["color"])
        _scale(ax, np.array([value for one in curves for _, value in one.get(key, ()) if key in LOGARITHMIC]))
        ax.set_title(key, fontsize=10, loc="left")
        ax.locator_params(axis="x", integer=True, nbins=8)
        ax.grid(alpha=0.2)
        ax.spines[["top", "right"]].set_visible(False)
    if keys and len(names) > 1:
        _legend(charts[0], pad=1.12, beside=beside)
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
    return _finished(ax, "learning rate", "training loss, smoothed")


def _finished(ax: Axes, across: str, up: str, title: str = "") -> Axes:
    ax.set(xlabel=across, ylabel=up)
    ax.set_title(title, fontsize=9, wrap=True, pad=ABOVE)
    ax.grid(alpha=0.2)
    _legend(ax)
    return ax


def _legend(ax: Axes, pad: float = 1.0, beside: int = 4) -> None:
    """Say above the axes what the lines are, so that no text lies on one; ``beside``: in how many columns."""
    ax.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, pad), ncols=beside, frameon=False, borderaxespad=0.1)


def _scale(ax: Axes, values: np.ndarray) -> None:
    """A logarithmic scale for positive values that lie far apart; else no offset is taken out of the numbers."""
    positive = values[np.isfinite(values)]
    if len(positive) and positive.min() > 0 and positive.max() / positive.min() > 50:
        ax.set_yscale("log")
    else:
        ax.ticklabel_format(axis="y", useOffset=False)


def _groups(metric_history: Sequence[Evaluated]) -> list[list[str]]:
    """Names of metrics whose values are of like size: none above 1, or the largest ones at most a factor of 2 apart."""
    groups: list[tuple[float, list[str]]] = []
    for name in dict.fromkeys(item.name for item in metric_history):
        values = [abs(item.value) for item in metric_history if item.name == name and math.isfinite(item.value)]
        size = max(1.0, *values) if values else 1.0
        for other, names in groups:
            if size == other or (1.0 not in (size, other) and 0.5 <= size / other <= 2):
                names.append(name)
                break
        else:
            groups.append((size, [name]))
    return [names for _, names in groups]


def _stacked(ax: Axes, more: int) -> list[Axes]:
    """The axes, with ``more`` below in the same room, which get smaller for that.

    Raises
    ------
    UsageError
        The axes are in no grid, so that nobody knows how much room there is.
    """
    room = ax.get_subplotspec()
    if not more:
        return [ax]
    if room is None:
        raise UsageError("ax has no grid in which metrics can be drawn below the loss; take one of figure.subplots()")
    apart = None if ax.figure.get_layout_engine() else 0.4
    grid = room.subgridspec(1 + more, 1, hspace=apart, height_ratios=[2] + [1] * more)
    ax.set_subplotspec(grid[0])
    return [ax, *(ax.figure.add_subplot(grid[row], sharex=ax) for row in range(1, 1 + more))]


def _smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Exponential means, in which each point counts a tenth."""
    means: list[tuple[float, float]] = []
    mean = 0.0
    for number, (step, value) in enumerate(points, 1):
        mean = 0.9 * mean + 0.1 * value
        means.append((step, mean / (1 - 0.9**number)))
    return means


def _thinned(curve: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most POINTS points, each the mean of the steps that it stands for."""
    size = max(1, -(-len(curve) // POINTS))
    groups = (curve[start : start + size] for start in range(0, len(curve), size))
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def new_axes(height: float = 4) -> Axes:
    """Axes of a figure of their own, without the global state of pyplot; a notebook shows them as a picture.

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
    figure: Any = Figure(figsize=(7, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    ax._repr_png_ = figure._repr_png_ = functools.partial(_png, figure)  # what notebooks ask an object for
    return ax


def _png(figure: Figure) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()
