"""Pictures of schedules: an arrow for each transfer, from its source in its round to its target in the next."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Annotation

from phalanx.collectives import schedule
from phalanx.collectives.schedules import SCHEDULES, rounds_of
from phalanx.run.plots import DEATH_COLOR, plot_rounds

ALL_REDUCE = ("ordered", "ring", "naive")


def drawn(ax):
    """The arrows: where each begins and ends, and whether it is drawn as an addition."""
    arrows = [text for text in ax.texts if isinstance(text, Annotation)]
    return [(arrow.xyann, arrow.xy, to_hex(arrow.arrow_patch.get_edgecolor()) == DEATH_COLOR) for arrow in arrows]


def due(transfers):
    """The arrows that a picture of these transfers has to have."""
    return [
        ((one.source, row), (one.target, row + 1), one.reduces)
        for row, group in enumerate(rounds_of(transfers))
        for one in group
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("participants", [1, 3, 8])
def test_every_transfer_is_an_arrow(name, participants):
    """Each transfer is drawn once, down to the next round, red where it adds."""
    transfers = schedule(name, participants)
    assert drawn(plot_rounds(rounds_of(transfers), participants, name)) == due(transfers)


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_a_transfer_less_is_seen(name):
    """Negative twin: a picture without the last transfer is not that of the schedule."""
    transfers = schedule(name, 3)
    assert drawn(plot_rounds(rounds_of(transfers[:-1]), 3, name)) != due(transfers)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_round_has_its_name(name):
    """Rounds are counted within their phase, as in the words."""
    transfers = schedule(name, 4)
    labels = [label.get_text() for label in plot_rounds(rounds_of(transfers), 4, name).get_yticklabels()]
    assert labels == [f"{group[0].phase}, round {group[0].round + 1}" for group in rounds_of(transfers)]


def test_chunks_are_numbered_where_there_are_several():
    """In a ring each arrow carries its chunk; in a tree, where chunk 0 is all, none does."""
    ring, tree = (plot_rounds(rounds_of(schedule(name, 4)), 4, name) for name in ("ring", "ordered"))
    numbers = [[text.get_text() for text in ax.texts if not isinstance(text, Annotation)] for ax in (ring, tree)]
    assert numbers == [[str(one.chunk) for one in schedule("ring", 4)], []]


@pytest.mark.long
def test_a_large_picture_is_saved(tmp_path):
    """Ten participants in a ring fit, with all their chunks."""
    plot_rounds(rounds_of(schedule("ring", 10)), 10, "ring").figure.savefig(tmp_path / "rounds.png")
    assert (tmp_path / "rounds.png").stat().st_size > 10_000
