"""Algorithms as data: their counts are those of theory, every contribution arrives once, and words lose nothing."""

import itertools
import re
from collections import Counter
from fractions import Fraction

import pytest

from phalanx import UsageError
from phalanx.collectives import Transfer, schedule, spell_rounds
from phalanx.collectives.schedules import SCHEDULES, rounds_of
from phalanx.plan.fold import fold_values
from phalanx.plan.shares import share_bounds

COUNTS = range(1, 17)
ALL_REDUCE = ("ordered", "ring", "naive")


def elements_sent(transfers, participants, size):
    """How many of ``size`` elements each participant sends."""
    chunks = 1 + max((one.chunk for one in transfers), default=0)
    lengths = [end - start for start, end in share_bounds(size, chunks)]
    sent = [0] * participants
    for one in transfers:
        sent[one.source] += lengths[one.chunk]
    return sent


def carried_out(transfers, participants, add, own):
    """``held[participant][chunk]`` after all transfers, one after the other."""
    chunks = 1 + max((one.chunk for one in transfers), default=0)
    held = [[own(participant) for _ in range(chunks)] for participant in range(participants)]
    for one in transfers:
        arriving, mine = held[one.source][one.chunk], held[one.target][one.chunk]
        held[one.target][one.chunk] = add(mine, arriving) if one.reduces else arriving
    return held


def ceil_log2(number):
    return next(power for power in itertools.count() if 2**power >= number)


@pytest.mark.parametrize("participants", COUNTS)
def test_the_ring_takes_the_rounds_and_bytes_of_theory(participants):
    """2(n-1) rounds, and each participant sends exactly 2(n-1)/n of data that n divides."""
    transfers = schedule("ring", participants)
    assert len(rounds_of(transfers)) == 2 * (participants - 1)
    size = 3 * participants
    share = Fraction(2 * (participants - 1), participants)
    assert elements_sent(transfers, participants, size) == [share * size] * participants


@pytest.mark.parametrize("participants", COUNTS)
def test_the_ring_rounds_what_does_not_come_out_even(participants):
    """For any size, each participant sends 2(n-1) chunks, and a chunk is the size over n, rounded down or up."""
    transfers = schedule("ring", participants)
    for size in range(3 * participants):
        sent = elements_sent(transfers, participants, size)
        rounds = 2 * (participants - 1)
        assert min(sent) >= rounds * (size // participants)
        assert max(sent) <= rounds * -(-size // participants)
        assert sum(sent) == 2 * (participants - 1) * size


@pytest.mark.parametrize("participants", COUNTS)
def test_the_tree_takes_the_rounds_and_bytes_of_theory(participants):
    """2 ceil(log2 n) rounds, n-1 sums and n-1 copies; nobody sends the data more than ceil(log2 n) times."""
    transfers = schedule("ordered", participants)
    levels = ceil_log2(participants)
    assert len(rounds_of(transfers)) == 2 * levels
    assert Counter(one.reduces for one in transfers) == Counter({True: participants - 1, False: participants - 1})
    assert max(elements_sent(transfers, participants, 5)) <= max(1, levels) * 5


@pytest.mark.parametrize("participants", COUNTS)
def test_the_naive_way_takes_what_is_documented(participants):
    """2(n-1) rounds; participant 0 sends all the data n-1 times, and the others once."""
    transfers = schedule("naive", participants)
    assert len(rounds_of(transfers)) == 2 * (participants - 1)
    assert elements_sent(transfers, participants, 7) == [7 * (participants - 1)] + [7] * (participants - 1)


def test_counts_tell_the_algorithms_apart():
    """Negative twin: with eight participants no two algorithms send alike."""
    assert len({tuple(elements_sent(schedule(name, 8), 8, 24)) for name in ALL_REDUCE}) == 3


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("participants", COUNTS)
def test_a_round_can_happen_at_once(name, participants):
    """In a round each participant sends one chunk and receives one at most, and never the one that it sends."""
    for group in rounds_of(schedule(name, participants)):
        assert max(Counter(one.source for one in group).values()) == 1
        assert max(Counter(one.target for one in group).values()) == 1
        assert {(one.source, one.chunk) for one in group}.isdisjoint((one.target, one.chunk) for one in group)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("participants", COUNTS)
def test_rounds_count_from_zero_in_each_phase(name, participants):
    """Phases follow one another, and the rounds of each are numbered 0, 1, .. without a gap."""
    rounds = [(group[0].phase, group[0].round) for group in rounds_of(schedule(name, participants))]
    for phase, group in itertools.groupby(rounds, key=lambda pair: pair[0]):
        assert [number for _, number in group] == list(range(sum(found == phase for found, _ in rounds)))


@pytest.mark.parametrize("name", ALL_REDUCE)
@pytest.mark.parametrize("participants", COUNTS)
def test_every_contribution_arrives_once(name, participants):
    """After the last round everybody holds each contribution to each chunk exactly once."""
    held = carried_out(schedule(name, participants), participants, lambda a, b: a + b, lambda one: Counter([one]))
    assert all(chunk == Counter(range(participants)) for own in held for chunk in own)


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_a_transfer_less_is_noticed(name):
    """Negative twin: without any one of the transfers, somebody lacks something."""
    transfers = schedule(name, 5)
    for left_out in range(len(transfers)):
        rest = transfers[:left_out] + transfers[left_out + 1 :]
        held = carried_out(rest, 5, lambda a, b: a + b, lambda one: Counter([one]))
        assert any(chunk != Counter(range(5)) for own in held for chunk in own)


@pytest.mark.parametrize("name", ALL_REDUCE)
@pytest.mark.parametrize("participants", COUNTS)
def test_order_within_a_round_changes_nothing(name, participants):
    """Carried out backwards within each round, a schedule makes the very same additions."""
    transfers = schedule(name, participants)
    backwards = [one for group in rounds_of(transfers) for one in reversed(group)]
    spelled = [carried_out(order, participants, lambda a, b: f"({a}+{b})", str) for order in (transfers, backwards)]
    assert spelled[0] == spelled[1]


@pytest.mark.parametrize("participants", COUNTS)
def test_the_tree_is_the_fold(participants):
    """The additions of "ordered" are those of fold_values, in the same order."""
    made = []

    def add(left, right):
        made.append((left, right))
        return left

    fold_values(range(participants), add)
    assert [(one.target, one.source) for one in schedule("ordered", participants) if one.reduces] == made


@pytest.mark.parametrize("participants", COUNTS)
def test_the_ring_has_two_halves(participants):
    """reduce_scatter and then all_gather is the ring; in between, participant i owns all of chunk i."""
    halves = schedule("reduce_scatter", participants), schedule("all_gather", participants)
    assert [*halves[0], *halves[1]] == schedule("ring", participants)
    held = carried_out(halves[0], participants, lambda a, b: a + b, lambda one: Counter([one]))
    chunks = len(held[0])
    assert all(held[chunk][chunk] == Counter(range(participants)) for chunk in range(chunks))


@pytest.mark.parametrize("participants", COUNTS)
def test_broadcast_reaches_everybody_from_participant_0(participants):
    """After ceil(log2 n) rounds of n-1 transfers, all hold what participant 0 held."""
    transfers = schedule("broadcast", participants)
    assert carried_out(transfers, participants, None, int) == [[0]] * participants
    assert (len(transfers), len(rounds_of(transfers))) == (participants - 1, ceil_log2(participants))


def test_a_small_ring_by_hand():
    """Three participants: the whole ring, written out."""
    assert schedule("ring", participants=3) == [
        Transfer("scatter-reduce", 0, 0, 1, 2),
        Transfer("scatter-reduce", 0, 1, 2, 0),
        Transfer("scatter-reduce", 0, 2, 0, 1),
        Transfer("scatter-reduce", 1, 0, 1, 1),
        Transfer("scatter-reduce", 1, 1, 2, 2),
        Transfer("scatter-reduce", 1, 2, 0, 0),
        Transfer("all-gather", 0, 0, 1, 0),
        Transfer("all-gather", 0, 1, 2, 1),
        Transfer("all-gather", 0, 2, 0, 2),
        Transfer("all-gather", 1, 0, 1, 2),
        Transfer("all-gather", 1, 1, 2, 0),
        Transfer("all-gather", 1, 2, 0, 1),
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("star", 4), "algorithm is 'star'"),
        (("ring", 0), "participants is 0"),
        (("ring", True), "participants is True"),
        (("ring", 2.0), "participants is 2.0"),
    ],
)
def test_a_wrong_schedule_is_refused(arguments, named):
    """An unknown name and an impossible number of participants are named, at the call and not at the first transfer."""
    with pytest.raises(UsageError, match=re.escape(named)):
        schedule(*arguments)


# In words


def test_words_for_a_ring_of_four():
    """The ring of four in words, as a terminal shows it."""
    assert list(spell_rounds(schedule("ring", 4)))[:4] == [
        "scatter-reduce, round 1 of 3: 0 -> 1 chunk 3, 1 -> 2 chunk 0, 2 -> 3 chunk 1, 3 -> 0 chunk 2",
        "scatter-reduce, round 2 of 3: 0 -> 1 chunk 2, 1 -> 2 chunk 3, 2 -> 3 chunk 0, 3 -> 0 chunk 1",
        "scatter-reduce, round 3 of 3: 0 -> 1 chunk 1, 1 -> 2 chunk 2, 2 -> 3 chunk 3, 3 -> 0 chunk 0",
        "all-gather, round 1 of 3: 0 -> 1 chunk 0, 1 -> 2 chunk 1, 2 -> 3 chunk 2, 3 -> 0 chunk 3",
    ]


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("ring", "6 rounds; nobody sends more than 3/2 times the data."),
        ("ordered", "4 rounds; nobody sends more than 2 times the data."),
        ("naive", "6 rounds; nobody sends more than 3 times the data."),
    ],
)
def test_words_end_with_counts(name, ending):
    """The last line counts rounds, and what whoever sends most sends."""
    assert list(spell_rounds(schedule(name, 4)))[-1] == ending


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("participants", [1, 2, 3, 7, 16])
def test_words_lose_no_transfer(name, participants):
    """Read back from the text, the transfers are those of the schedule."""
    transfers = schedule(name, participants)
    lines = list(spell_rounds(transfers))
    read = re.findall(r"(\d+) -> (\d+)(?: chunk (\d+))?", "\n".join(lines))
    assert [(int(source), int(target), int(chunk or 0)) for source, target, chunk in read] == [
        (one.source, one.target, one.chunk) for one in transfers
    ]
    assert ("nothing to send" in lines[-1]) == (participants == 1)
