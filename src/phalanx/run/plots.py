"""Pictures of runs and of measurements. Needs matplotlib, which is imported here only."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.definition.plain import distinct_names
from phalanx.errors import UsageError
from phalanx.seams.records import Evaluated
from phalanx.surroundings.presence import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS_COLOR = "#1f5a96"
DEATH_COLOR = "#c1452b"
POINTS = 600
ABOVE = 20  # points between axes and their title, where the legend is
COLORS = 10  # of matplotlib
LEGEND = 110  # characters that fit beside each other above a page's charts
NEAR = 10  # points on either side that a smoothed one is the mean of
LONG = 30  # points from which on a curve is smoothed, and has no markers
RATE = "samples a second"
LOGARITHMIC = ("loss", "grad_norm")  # where values lie far apart
SMOOTHED = (*LOGARITHMIC, RATE)


def plot_history(
    loss_history: Sequence[float], metric_history: Sequence[Evaluated], title: str, ax: Axes | None = None
) -> Axes:
    """Draw the loss of every step and, in charts below it, each metric; where axes are given, the loss alone."""
    metrics: dict[str, list[tuple[float, float]]] = {}
    for item in metric_history if ax is None else ():
        metrics.setdefault(item.name, []).append((item.steps, item.value))
    curves = {"loss": [*enumerate(loss_history, 1)]} | distinct_names(metrics, ("loss",))
    charts = [ax] if ax is not None else new_axes(len(curves))
    for chart, key in zip(charts, curves, strict=True):
        _chart(chart, key, [""], [[point for point in curves[key] if math.isfinite(point[1])]], [()])
    charts[-1].set_xlabel("step")
    charts[0].set_title(title, fontsize=9, wrap=True)
    return charts[0]


def plot_runs(
    names: Sequence[str],
    curves: Sequence[Mapping[str, Sequence[tuple[float, float]]]],
    marks: Sequence[Sequence[int]],
) -> Figure:
    """One run, or several in colours of their own: a chart for each curve over the steps, with marks below it."""
    keys = [key for key in dict.fromkeys(key for one in curves for key in one) if any(one.get(key) for one in curves)]
    beside = max(1, min(4, LEGEND // (6 + max(map(len, names)))))
    charts = new_axes(max(1, len(keys)), more=0.2 * (len(names) // beside))
    charts[-1].set_xlabel("step")
    for ax, key in zip(charts, keys, strict=False):
        _chart(ax, key, names, [one.get(key, ()) for one in curves], marks)
    if keys and len(names) > 1:
        _legend(charts[0], pad=1.12, beside=beside)
    figure: Any = charts[0].figure
    return figure


def _chart(
    ax: Any,
    key: str,
    names: Sequence[str],
    curves: Sequence[Sequence[tuple[float, float]]],
    marks: Sequence[Sequence[int]],
) -> None:
    """The curve of each run. A long one of losses, norms or speed is drawn pale, with a smoothed one over it."""
    for number, (name, curve, marked) in enumerate(zip(names, curves, marks, strict=True)):
        style = {"color": f"C{number % COLORS}", "linestyle": ("-", "--", ":")[number // COLORS % 3]}
        points = _thinned(curve)
        if len(points) >= LONG and key in SMOOTHED:
            ax.plot(*zip(*points, strict=True), color=style["color"], linewidth=1, alpha=0.25)
            points = _smooth(points)
        markers = {"marker": "." * (len(points) < LONG)}
        ax.plot(*zip(*points, strict=True), linewidth=1.3, label=_plain(name[-LEGEND + 10 :]), **markers, **style)
        across = ax.get_xaxis_transform()
        ax.plot(marked, [0] * len(marked), "|", markersize=12, transform=across, color=style["color"])
    _scale(ax, np.array([value for curve in curves for _, value in curve if key in LOGARITHMIC]))
    ax.set_title(_plain(key), fontsize=10, loc="left")
    ax.locator_params(axis="x", integer=True, nbins=8)
    ax.grid(alpha=0.2)
    ax.spines[["top", "right"]].set_visible(False)


def _plain(name: str) -> str:
    """A name as it is, with no formula in it."""
    return printable(name).replace("$", r"\$")


def svg(figure: Figure) -> str:
    """A picture as an element of a page; its words are text, which can be found and copied."""
    import matplotlib as mpl

    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg")
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def plot_choices(rows: Sequence[tuple[str, int, float]], title: str) -> Axes:
    """Samples per second over R, of (name of the line, R, samples per second); the numbers of R are evenly apart."""
    (ax,) = new_axes()
    counts = sorted({replicas for _, replicas, _ in rows})
    for name in dict.fromkeys(name for name, _, _ in rows):
        points = [(counts.index(replicas), rate) for line, replicas, rate in rows if line == name]
        ax.plot(*zip(*points, strict=True), "o-", label=name)
    ax.set_xticks(range(len(counts)), [str(count) for count in counts])
    ax.set_ylim(bottom=0)
    return _finished(ax, "replicas (R, part of the answer)", "samples/s", title)


def plot_rates(lrs: Sequence[float], losses: Sequence[float], suggestion: float, ax: Axes | None = None) -> Axes:
    """Draw smoothed losses over learning rates, and the one that is suggested."""
    ax = ax or new_axes()[0]
    ax.semilogx(lrs, losses, color=LOSS_COLOR)
    falling = losses[: losses.index(min(losses)) + 1]
    room = 0.2 * (max(falling) - min(falling)) or 1.0
    ax.set_ylim(min(falling) - room, max(falling) + room)  # what diverges after that leaves the picture
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
    if len(positive) and positive.min() > 0 and positive.max() > 50 * positive.min():
        ax.set_yscale("log")
    else:
        ax.ticklabel_format(axis="y", useOffset=False)


def _smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over as many points after each as before it, so that the curve does not lag behind; fewer at both ends.

    The first is as it was measured, since losses fall most there; the last has those before it alone.
    """
    reaches = (min(NEAR, at) for at in range(len(points)))
    return [(points[at][0], _mean(points[at - reach : at + reach + 1])) for at, reach in enumerate(reaches)]


def _thinned(curve: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most POINTS points, each the mean of the steps that it stands for, in the middle of them."""
    size = max(1, -(-len(curve) // POINTS))
    groups = (curve[start : start + size] for start in range(0, len(curve), size))
    return [(group[len(group) // 2][0], _mean(group)) for group in groups]


def _mean(points: Sequence[tuple[float, float]]) -> float:
    return sum(value for _, value in points) / len(points)


def new_axes(count: int = 1, more: float = 0.0) -> Sequence[Axes]:
    """Charts below each other in a figure of their own, without pyplot's global state; a notebook shows a picture.

    ``more``: inches that the figure is higher for a legend.

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
    figure: Any = Figure(figsize=(8, max(4, 0.6 + 1.9 * count + more)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    charts = figure.subplots(count, 1, squeeze=False, sharex=True)[:, 0]
    for shown in (figure, *charts):
        shown._repr_png_ = functools.partial(_png, figure)  # what notebooks ask an object for
    return charts


def _png(figure: Figure) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()
