"""The algorithms as data: who sends which chunk to whom, in which round. Pure; knows no tensor.

Within a round everything happens at once: a participant sends at most one chunk and receives at most one, and none
that it receives is one that it sends. So the transfers of a round may be carried out in any order.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from phalanx.definition import checks

REDUCING = frozenset({"scatter-reduce", "reduce"})


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk that goes from one participant to another.

    Attributes
    ----------
    phase : str
        "scatter-reduce" and "reduce" add what arrives to what is there; "all-gather" and "broadcast" replace it.
    round : int
        From 0 within the phase. All transfers of a round happen at once.
    source, target : int
        Participants, from 0.
    chunk : int
        From 0. The ring cuts the data into as many chunks as there are participants, as ``numpy.array_split`` does;
        elsewhere chunk 0 is all of it.
    """

    phase: str
    round: int
    source: int
    target: int
    chunk: int

    @property
    def reduces(self) -> bool:
        """Whether the target adds what arrives to its own; else it replaces its own."""
        return self.phase in REDUCING


def schedule(algorithm: str, participants: int) -> list[Transfer]:
    """Every transfer of an algorithm, in the order of rounds: the very list that the collectives carry out.

    Parameters
    ----------
    algorithm : str
        All-reduce in three ways:

        - "ring": 2(n-1) rounds; each participant sends 2(n-1)/n of the data, and none can do with less. Chunk c is
          added up in the order c+1, c+2, .., c (modulo n), so its owner c comes last. (Patarasuk and Yuan, 2009)
        - "ordered": up a binary tree and down again, 2 ceil(log2 n) rounds; nobody sends more than ceil(log2 n) times
          the data. The additions are those of :func:`phalanx.plan.fold.fold_values`.
        - "naive": all send to participant 0, one after the other in the order 1, 2, ..; it sends back to one after
          the other. 2(n-1) rounds; participant 0 sends n-1 times the data. The oracle for the other two.

        Its parts: "reduce_scatter" and "all_gather" are the halves of the ring, after the first of which participant
        i owns chunk i; "broadcast" goes down the tree from participant 0.
    participants : int
        n, at least 1; one alone sends nothing.

    Raises
    ------
    phalanx.UsageError
        The name is unknown, or the number is not a positive integer.
    """
    checks.choice("algorithm", algorithm, tuple(SCHEDULES))
    return list(SCHEDULES[algorithm](checks.integer("participants", participants, least=1)))


def rounds_of(transfers: Iterable[Transfer]) -> list[list[Transfer]]:
    """The transfers round by round."""
    return [list(group) for _, group in itertools.groupby(transfers, key=lambda one: (one.phase, one.round))]


def spell_rounds(transfers: Iterable[Transfer]) -> Iterator[str]:
    """The schedule for people: a line per round, then how much is sent."""
    transfers = list(transfers)
    if not transfers:
        yield "1 participant: nothing to send"
        return
    rounds, chunks = rounds_of(transfers), 1 + max(one.chunk for one in transfers)
    in_phase = Counter(group[0].phase for group in rounds)
    for group in rounds:
        phase, number = group[0].phase, group[0].round
        sends = [f"{one.source} -> {one.target}" + (f" chunk {one.chunk}" if chunks > 1 else "") for one in group]
        yield f"{phase}, round {number + 1} of {in_phase[phase]}: {', '.join(sends)}"
    most = Fraction(max(Counter(one.source for one in transfers).values()), chunks)
    yield f"{len(rounds)} rounds; nobody sends more than {most} times the data."


def _around(phase: str, ahead: int, participants: int) -> Iterator[Transfer]:
    """A ring, in which everybody begins with the chunk that is so far ahead of its own number."""
    for number, source in itertools.product(range(participants - 1), range(participants)):
        yield Transfer(phase, number, source, (source + 1) % participants, (source - number + ahead) % participants)


def _pairs(participants: int) -> list[list[tuple[int, int]]]:
    """The fold's tree: for each round, its pairs of a left and a right participant."""
    strides = [1 << level for level in range((participants - 1).bit_length())]
    return [[(left, left + stride) for left in range(0, participants - stride, 2 * stride)] for stride in strides]


def _up(participants: int) -> Iterator[Transfer]:
    for number, pairs in enumerate(_pairs(participants)):
        yield from (Transfer("reduce", number, right, left, 0) for left, right in pairs)


def _down(participants: int) -> Iterator[Transfer]:
    for number, pairs in enumerate(reversed(_pairs(participants))):
        yield from (Transfer("broadcast", number, left, right, 0) for left, right in pairs)


def _naive(participants: int) -> Iterator[Transfer]:
    for other in range(1, participants):
        yield Transfer("reduce", other - 1, other, 0, 0)
    for other in range(1, participants):
        yield Transfer("broadcast", other - 1, 0, other, 0)


_scatter_reduce = functools.partial(_around, "scatter-reduce", -1)
_all_gather = functools.partial(_around, "all-gather", 0)
ALGORITHMS: dict[str, Callable[[int], Iterable[Transfer]]] = {
    "ordered": lambda n: itertools.chain(_up(n), _down(n)),
    "ring": lambda n: itertools.chain(_scatter_reduce(n), _all_gather(n)),
    "naive": _naive,
}
SCHEDULES: dict[str, Callable[[int], Iterable[Transfer]]] = ALGORITHMS | {
    "reduce_scatter": _scatter_reduce,
    "all_gather": _all_gather,
    "broadcast": _down,
}
