"""Draws the rooms of the package from its imports: ``python tests/house/rooms.py`` writes docs/rooms.md and .svg.

Reads the package as text and imports none of it, so the drawing shows what the code says, not what somebody meant.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import reading

PAGE, PICTURE = reading.ROOT / "docs" / "rooms.md", reading.ROOT / "docs" / "rooms.svg"
FRONT = "__init__"
EVERYBODYS = "errors"  # every room may import it, so arrows to it would say nothing
WIDTH, HEIGHT = 1.9, 0.46  # of a box, in inches
ACROSS, DOWN = 2.3, 0.95  # from box to box
GAP = 0.5  # that an arrow needs to pass between two boxes

HEAD = """# The rooms of the package

Made by `python tests/house/rooms.py` from the imports in the code, which `make check` compares; not written by hand.
An arrow leads from a room to one that it imports. The picture leaves out what follows from two arrows or more; the
table has everything, imports inside functions and for types too. Every room may also import `errors`.

![Rooms as boxes; arrows lead down, to what is imported](rooms.svg)

| room | what it is | imports |
|---|---|---|
"""

Graph = Mapping[str, set[str]]
Arrow = tuple[str, str]
Stop = str | tuple[str, str, int]  # on the way of an arrow: a room, or a gap between rooms in the row of a level


def rooms() -> dict[str, set[str]]:
    """Each entry at the top of the package, and what other entries its modules import."""
    graph: dict[str, set[str]] = {}
    for name in reading.modules():
        targets = {room_of(item.module) for item in reading.module_imports(name) if _is_ours(item.module)}
        graph.setdefault(room_of(name), set()).update(targets - {room_of(name), EVERYBODYS})
    return graph


def room_of(module: str) -> str:
    """The entry at the top of the package that a module is, or lies in; the package itself is its ``__init__``."""
    return module.removeprefix(reading.PACKAGE).removeprefix(".").split(".")[0] or FRONT


def levels(graph: Graph) -> dict[str, int]:
    """How far each room stands above the ground: one more than the highest of those that it imports."""
    known: dict[str, int] = {}

    def level(room: str) -> int:
        if room not in known:
            known[room] = 1 + max((level(target) for target in graph[room]), default=-1)
        return known[room]

    return {room: level(room) for room in graph}


def reduced(graph: Graph) -> dict[str, set[str]]:
    """The arrows that do not follow from others: the fewest from which one can get wherever one could before."""

    def beyond(room: str) -> set[str]:
        return graph[room].union(*(beyond(target) for target in graph[room]))

    return {room: targets - set().union(*(beyond(target) for target in targets)) for room, targets in graph.items()}


def page(graph: Graph) -> str:
    """The document: every room, highest first, with the first sentence of its docstring and what it imports."""
    heights = levels(graph)
    order = sorted((room for room in graph if room != EVERYBODYS), key=lambda room: (-heights[room], room))
    lines = [f"| `{room}` | {_promise(room)} | {', '.join(sorted(graph[room])) or 'none'} |" for room in order]
    return HEAD + "\n".join(lines) + "\n"


def signature(graph: Graph) -> str:
    """A hash of all that a picture shows, which is written into it."""
    return hashlib.sha256(repr(sorted((room, sorted(targets)) for room, targets in graph.items())).encode()).hexdigest()


def ways(graph: Graph) -> dict[Arrow, list[Stop]]:
    """Where each arrow of the picture leads: the room, a gap in each row between, the room that is imported."""
    heights = levels(graph)
    return {
        (room, target): [room, *((room, target, y) for y in range(heights[room] - 1, heights[target], -1)), target]
        for room, targets in reduced(graph).items()
        for target in sorted(targets)
    }


def places(graph: Graph) -> dict[Stop, tuple[float, float]]:
    """The middle of each box and gap, in inches: a row for each level, each as near as can be to what it leads to."""
    heights, spots = levels(graph), dict[Stop, tuple[float, float]]()
    below: dict[Stop, list[Stop]] = {room: [] for room in graph}
    for way in ways(graph).values():
        for stop, following in itertools.pairwise(way):
            below.setdefault(stop, []).append(following)

    def wish(stop: Stop) -> float:
        return sum(spots[following][0] for following in below[stop]) / max(1, len(below[stop]))

    for height in range(max(heights.values()) + 1):
        row = [stop for stop in below if (heights[stop] if isinstance(stop, str) else stop[2]) == height]
        row.sort(key=lambda stop: (wish(stop), str(stop)))
        sizes = [ACROSS if isinstance(stop, str) else GAP for stop in row]
        edge = sum(map(wish, row)) / len(row) - sum(sizes) / 2
        for stop, size, before in zip(row, sizes, itertools.accumulate([0.0, *sizes]), strict=False):
            spots[stop] = edge + before + size / 2, height * DOWN
    return spots


def draw(graph: Graph, path: Path) -> None:
    """Write the picture, the same bytes for the same rooms and version of matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
    from matplotlib.path import Path as Line

    drawn = {room: targets for room, targets in graph.items() if room != EVERYBODYS}
    spots = places(drawn)
    columns, rows = zip(*spots.values(), strict=True)
    left, right = min(columns) - WIDTH * 0.6, max(columns) + WIDTH * 0.6
    figure = Figure(figsize=(right - left, max(rows) + 0.8), dpi=80)
    ax = figure.add_axes((0, 0, 1, 1), xlim=(left, right), ylim=(-0.4, max(rows) + 0.4))
    ax.axis("off")
    for way in ways(drawn).values():
        line = Line(_points([spots[stop] for stop in way]))
        ax.add_patch(FancyArrowPatch(path=line, arrowstyle="-|>", mutation_scale=10, color="#5a6b7b", zorder=2))
    for room in drawn:
        x, y = spots[room]
        corner, style = (x - WIDTH / 2, y - HEIGHT / 2), "round,pad=0,rounding_size=0.1"
        ax.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, style, facecolor="#eaf1f8", edgecolor="#1f5a96", zorder=3))
        ax.text(x, y, room, ha="center", va="center", fontsize=12, zorder=4)
    described = {"metadata": {"Date": None, "Description": signature(graph)}} if path.suffix == ".svg" else {}
    with mpl.rc_context({"svg.hashsalt": "rooms", "svg.fonttype": "none"}):
        figure.savefig(path, **described)


def main() -> None:
    """Write the document and the picture."""
    graph = rooms()
    PAGE.write_text(page(graph), encoding="utf-8")
    draw(graph, PICTURE)


def _promise(room: str) -> str:
    """The first sentence of a room's docstring."""
    name = reading.PACKAGE if room == FRONT else f"{reading.PACKAGE}.{room}"
    docstring = ast.get_docstring(reading.parsed(reading.modules()[name])) or ""
    return re.split(r"(?<=\.)\s", " ".join(docstring.split()), maxsplit=1)[0].replace("``", "`").replace("|", "/")


def _points(spots: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The line of an arrow: out of the lower edge of a box, straight through gaps, to the upper edge of another box."""
    (x, y), *gaps, (to_x, to_y) = spots
    first, last = spots[1][0], spots[-2][0]
    through = [(gap_x, gap_y + up) for gap_x, gap_y in gaps for up in (HEIGHT / 2, -HEIGHT / 2)]
    return [(x + _aside(first - x), y - HEIGHT / 2), *through, (to_x + _aside(last - to_x), to_y + HEIGHT / 2)]


def _aside(distance: float) -> float:
    """How far from the middle of a box an arrow begins or ends, so that several do not meet in one point."""
    return max(-1.0, min(1.0, distance / (2 * ACROSS))) * WIDTH * 0.4


def _is_ours(module: str) -> bool:
    return reading.is_within(module, reading.PACKAGE)


if __name__ == "__main__":
    main()
