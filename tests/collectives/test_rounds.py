"""Pictures of schedules: as many panels as rounds and one for the end, and numbers that count contributions."""

import re

import pytest
from matplotlib.text import Annotation

from phalanx import UsageError
from phalanx.cli.rounds import MOST_PARTICIPANTS, plot_rounds
from phalanx.collectives import Transfer, schedule
from phalanx.collectives.schedules import SCHEDULES, rounds_of

ALL_REDUCE = ("ordered", "ring", "naive")


def panels(figure):
    """What each visible panel shows: its title, and its numbers by (participant, chunk)."""
    shown = [ax for ax in figure.axes if ax.get_visible()]
    return [(ax.get_title(), {text.get_position(): text.get_text() for text in cells(ax)}) for ax in shown]


def cells(ax):
    return [text for text in ax.texts if not isinstance(text, Annotation)]


def arrows(figure):
    return sum(len(ax.texts) - len(cells(ax)) for ax in figure.axes if ax.get_visible())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("participants", [1, 3])
def test_a_panel_per_round_and_one_after(name, participants):
    """Every round has its panel, and the last panel shows the end."""
    transfers = schedule(name, participants)
    titles = [title for title, _ in panels(plot_rounds(transfers, participants, name))]
    assert titles == [f"round {group[0].round + 1}" for group in rounds_of(transfers)] + ["after"]


@pytest.mark.parametrize("name", ALL_REDUCE)
@pytest.mark.parametrize("participants", [1, 4])
def test_numbers_begin_at_one_and_end_complete(name, participants):
    """At first each chunk holds its owner's contribution alone, after the last round everybody's."""
    shown = panels(plot_rounds(schedule(name, participants), participants, name))
    assert set(shown[0][1].values()) == {"1"}
    assert set(shown[-1][1].values()) == {str(participants)}
    assert len(shown[0][1]) == participants * (participants if name == "ring" else 1)


def test_the_ring_of_three_by_hand():
    """Halfway, participant i holds all of chunk i, and what it passed on before stands where it was."""
    shown = panels(plot_rounds(schedule("ring", 3), 3, "ring"))
    halfway = shown[2][1]
    assert [[halfway[participant, chunk] for participant in range(3)] for chunk in range(3)] == [
        ["3", "1", "2"],
        ["2", "3", "1"],
        ["1", "2", "3"],
    ]


def test_a_transfer_less_is_seen():
    """Negative twin: without its last transfer, the ring's last panel is not complete."""
    shown = panels(plot_rounds(schedule("ring", 3)[:-1], 3, "ring"))
    assert set(shown[-1][1].values()) == {"2", "3"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "expected"), [("ordered", 6), ("naive", 6), ("ring", 24 + 6)])
def test_every_transfer_is_an_arrow(name, expected):
    """Each transfer is drawn once; the ring's from the last participant to the first leaves and enters, as two."""
    assert arrows(plot_rounds(schedule(name, 4), 4, name)) == expected


def test_what_is_only_copied_begins_empty():
    """In all_gather a participant begins with its own chunk, complete, and nothing else."""
    first = panels(plot_rounds(schedule("all_gather", 3), 3, "all_gather"))[0][1]
    assert {place: text for place, text in first.items() if text} == {(one, one): "3" for one in range(3)}


@pytest.mark.long
def test_long_phases_are_broken_into_rows(tmp_path):
    """Nine rounds need a second row of panels, and the picture can be saved."""
    figure = plot_rounds(schedule("naive", 10), 10, "naive")
    assert len(panels(figure)) == 19
    assert figure.axes[0].get_subplotspec().get_gridspec().ncols == 8
    figure.savefig(tmp_path / "rounds.png")
    assert (tmp_path / "rounds.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("transfers", "participants", "named"),
    [
        (schedule("ring", 17), 17, f"participants is 17; it must be an integer from 1 to {MOST_PARTICIPANTS}"),
        ([], 0, "participants is 0"),
        ([Transfer("reduce", 0, 3, 0, 0)], 3, "participants is 3; it must be an integer of at least 4"),
    ],
)
def test_pictures_that_cannot_be_are_refused(transfers, participants, named):
    """Too many participants for a picture, none, or fewer than take part."""
    with pytest.raises(UsageError, match=re.escape(named)):
        plot_rounds(transfers, participants, "no picture")
