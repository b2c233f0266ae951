"""A picture of a collective algorithm, round by round. Needs matplotlib, which is imported here only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from phalanx.collectives.schedules import Transfer, rounds_of
from phalanx.definition import checks
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PARTICIPANTS = 16
MOST_NUMBERED = 10
PANELS_IN_ROW = 8
FEWEST_COLOR, MOST_COLOR = (0.91, 0.94, 0.97), (0.36, 0.56, 0.76)
COMPLETE_COLOR = (0.60, 0.82, 0.66)
ARROW_COLOR = "#c1452b"
GAP = 0.3  # cells between a cell's middle and an arrow's end
BEND = 0.45  # of an arc's length: twice its height

Held = list[list[frozenset[int]]]  # by participant and chunk: whose contributions are in it


def plot_rounds(transfers: Iterable[Transfer], participants: int, title: str) -> Figure:
    """Draw a schedule: a panel per round with what everybody holds before it and what travels in it; a last one after.

    Columns are participants, rows are chunks; shades, and up to 10 participants numbers too, say how many contributions
    are in a chunk. Each phase begins a row of panels.

    Parameters
    ----------
    transfers : iterable of Transfer
        As ``phalanx.collectives.schedule`` gives them.
    participants : int
        From 1 to 16, and at least those who appear in the transfers.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
        Save it with ``figure.savefig(path)``.

    Raises
    ------
    phalanx.UsageError
        There are too many participants for a picture, or matplotlib is missing.
    """
    transfers = list(transfers)
    hint = "phalanx.collectives.spell_rounds puts any number into words"
    participants = checks.integer("participants", participants, least=1, most=MOST_PARTICIPANTS, hint=hint)
    highest = max((max(one.source, one.target) for one in transfers), default=0)
    checks.integer("participants", participants, least=highest + 1, hint=f"participant {highest} is in the transfers")
    chunks = 1 + max((one.chunk for one in transfers), default=0)
    rows = _rows(rounds_of(transfers))
    distance = max((abs(one.source - one.target) for one in transfers), default=0)
    roof = 0.0 if chunks > 1 else BEND / 2 * distance  # room for arcs
    axes, figure = _panels(rows, participants, chunks + roof)
    held = _at_first(transfers, participants, chunks)
    for row, panels in zip(axes, rows, strict=True):
        for ax, group in zip(row, panels, strict=False):
            _draw_held(ax, held, roof)
            _draw_arrows(ax, group, participants, chunks)
            ax.set_title(f"round {group[0].round + 1}" if group else "after", fontsize=9)
            held = _after(held, group)
        for ax in row[len(panels) :]:
            ax.set_visible(False)
        _label(row[0], panels[0], chunks)
    rows_say = "rows: chunks, " if chunks > 1 else ""
    count_says = "number" if participants <= MOST_NUMBERED else "shade"
    legend = f"columns: participants, {rows_say}{count_says}: contributions added up, green: complete"
    figure.suptitle(f"{title}\n{legend}", fontsize=10, x=0.01, ha="left")
    return figure


def _rows(rounds: list[list[Transfer]]) -> list[list[list[Transfer]]]:
    """Rounds in rows of panels, a new row for each phase; an empty one at the end stands for what is left."""
    rows: list[list[list[Transfer]]] = []
    for group in rounds:
        if not rows or group[0].phase != rows[-1][0][0].phase or len(rows[-1]) == PANELS_IN_ROW:
            rows.append([])
        rows[-1].append(group)
    if not rows:
        return [[[]]]
    rows[-1].append([])
    return rows


def _at_first(transfers: list[Transfer], participants: int, chunks: int) -> Held:
    """Everybody holds its own; where nothing is added, what is sent first is complete and the rest is empty."""
    if not transfers or any(one.reduces for one in transfers):
        return [[frozenset({participant})] * chunks for participant in range(participants)]
    everybody, nobody = frozenset(range(participants)), frozenset[int]()
    origins = {one.chunk: one.source for one in reversed(transfers)}
    return [
        [everybody if origins[chunk] == participant else nobody for chunk in range(chunks)]
        for participant in range(participants)
    ]


def _panels(rows: list[list[list[Transfer]]], participants: int, height: float) -> tuple[list[list[Axes]], Figure]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a picture needs matplotlib; install it: pip install 'phalanx[plot]'") from error
    columns = max(map(len, rows))
    cell = max(0.16, min(0.45, 2.2 / participants))  # inches
    size = (1 + columns * ((participants + 1) * cell + 0.1), 0.7 + len(rows) * (height * cell + 0.55))
    figure = Figure(figsize=(max(6.5, size[0]), size[1]), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    return [list(row) for row in grid], figure


def _draw_held(ax: Axes, held: Held, roof: float) -> None:
    participants, chunks = len(held), len(held[0])
    size = min(9.0, 60 / participants)
    colors = [[_color(len(own[chunk]), participants) for own in held] for chunk in range(chunks)]
    edges = [[edge - 0.5 for edge in range(count + 1)] for count in (participants, chunks)]
    ax.pcolormesh(*edges, colors, edgecolors="white", linewidth=1)
    for participant, own in enumerate(held if participants <= MOST_NUMBERED else []):
        for chunk, contributions in enumerate(own):
            count = str(len(contributions) or "")
            ax.text(participant, chunk, count, ha="center", va="center", fontsize=size)
    ax.set_xlim(-1.05, participants + 0.05)
    ax.set_ylim(chunks - 0.5, -0.5 - roof)
    ax.set_aspect("equal")
    ax.set_xticks(range(participants))
    ax.set_yticks([])
    ax.tick_params(length=0, labelsize=min(7.0, size), pad=1)
    ax.spines[:].set_visible(False)


def _label(ax: Axes, group: list[Transfer], chunks: int) -> None:
    """Name the phase and the chunks beside the first panel of a row."""
    lines = [f"{group[0].phase}: {'add' if group[0].reduces else 'copy'}"] if group else []
    if chunks > 1:
        ax.set_yticks(range(chunks))
        lines.append("chunk")
    ax.set_ylabel("\n".join(lines), fontsize=9)


def _draw_arrows(ax: Axes, group: list[Transfer], participants: int, chunks: int) -> None:
    for one in group:
        step = one.target - one.source
        if chunks == 1:
            _arrow(ax, (one.source, -0.5), (one.target, -0.5), bend=BEND if step < 0 else -BEND)
        elif abs(step) == 1:
            _arrow(ax, (one.source + GAP * step, one.chunk), (one.target - GAP * step, one.chunk))
        else:  # from the last participant round to the first: out at one edge, in at the other
            side = 1 if step < 0 else -1
            _arrow(ax, (one.source + GAP * side, one.chunk), (one.source + 0.95 * side, one.chunk))
            _arrow(ax, (one.target - 0.95 * side, one.chunk), (one.target - GAP * side, one.chunk))


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    style = {
        "arrowstyle": "-|>",
        "color": ARROW_COLOR,
        "linewidth": 1.2,
        "mutation_scale": 7,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    ax.annotate("", xy=end, xytext=start, arrowprops=style | {"connectionstyle": f"arc3,rad={bend}"})


def _color(count: int, participants: int) -> tuple[float, ...]:
    """The colour of a chunk that holds so many contributions."""
    if count == participants:
        return COMPLETE_COLOR
    part = max(0, count - 1) / max(1, participants - 2)
    return tuple(low + part * (high - low) for low, high in zip(FEWEST_COLOR, MOST_COLOR, strict=True))


def _after(held: Held, group: list[Transfer]) -> Held:
    """Who holds what after a round; all of it happens at once."""
    after = [list(own) for own in held]
    for one in group:
        arriving = held[one.source][one.chunk]
        after[one.target][one.chunk] = arriving | held[one.target][one.chunk] if one.reduces else arriving
    return after
