"""A picture of a collective algorithm, from its first round to its last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.collectives.schedules import Transfer, rounds_of
from phalanx.run.plots import new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_PARTICIPANTS = 16
ADDED_COLOR, COPIED_COLOR = "#c1452b", "#3a6ea5"
LABEL = 0.2  # of an arrow's way: where it carries the number of its chunk


def plot_rounds(transfers: Sequence[Transfer], participants: int, title: str) -> Axes:
    """Draw a schedule: participants from left to right, rounds from top to bottom, and an arrow for each transfer.

    Arrows are red where what arrives is added, and blue where it replaces what is there. Where the data is cut, each
    carries the number of its chunk.
    """
    rounds = rounds_of(transfers)
    cut = any(one.chunk for one in transfers)
    ax = new_axes(3 + 0.6 * participants, 2 + 0.6 * len(rounds))
    for row, group in enumerate(rounds):
        for one in group:
            color = ADDED_COLOR if one.reduces else COPIED_COLOR
            arrow = {"arrowstyle": "-|>", "color": color}
            ax.annotate("", xy=(one.target, row + 1), xytext=(one.source, row), arrowprops=arrow)
            if cut:
                place = one.source + LABEL * (one.target - one.source), row + LABEL
                ax.text(*place, str(one.chunk), color=color, backgroundcolor="white", fontsize=7, ha="center")
    ax.set(xlim=(-0.5, participants - 0.5), ylim=(len(rounds) + 0.2, -0.2), xticks=range(participants))
    ax.set_yticks(range(len(rounds)), [f"{group[0].phase}, round {group[0].round + 1}" for group in rounds])
    ax.grid(axis="x")
    ax.set_xlabel("participant")
    ax.set_title(f"{title}\nred: added, blue: copied{'; numbers: chunks' if cut else ''}", fontsize=10)
    return ax
