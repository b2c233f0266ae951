"""Which steps are audited, what of them, and by whom; and who was wrong, given what each came to. Pure arithmetic."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from phalanx.plan.keys import AUDIT_STREAM, MASK64, key, splitmix64

DRAWS = 8  # numbers that are drawn for a step, at most


class What(IntEnum):
    """What is computed again in an audited step."""

    GRADIENT = 0  # of a replica, with its loss and buffers
    FOLD = 1  # of a slice of all replicas' gradients
    UPDATE = 2  # of a parameter, with its optimizer state


class Piece(NamedTuple):
    """A parameter, and the first element of a slice of it."""

    parameter: int
    start: int


@dataclass(frozen=True)
class Audit:
    """A share of steps in which parts of the work are done twice, by two workers if there are two.

    Attributes
    ----------
    share : float
        Of the steps, from 0 to 1.
    seed : int
        The recipe's; who audits what follows from it and the step.
    stop : bool
        Whether a wrong value ends the run, instead of being made right.
    """

    share: float
    seed: int
    stop: bool = False

    def due(self, step: int) -> bool:
        """Whether a step is audited."""
        return self._drawn(step, 0) < self.share * (MASK64 + 1)

    def replica(self, step: int, ran: Sequence[int]) -> int:
        """Which of the replicas that have samples is computed again."""
        return ran[self._drawn(step, 1) % len(ran)]

    def piece(self, step: int, sizes: Sequence[int], width: int) -> Piece:
        """Which slice of which parameter is folded, and which parameter is updated, once more.

        All slices of ``width`` elements are as likely; ``sizes``: elements of each parameter.
        """
        slices = list(itertools.accumulate(-(-size // width) for size in sizes))
        drawn = self._drawn(step, 3) % max(1, slices[-1])
        parameter = bisect.bisect_right(slices, drawn)
        before = slices[parameter - 1] if parameter else 0
        return Piece(parameter, (drawn - before) * width)

    def auditor(self, step: int, host: int, workers: int) -> int:
        """Which other worker does that; the same one where there is no other."""
        return (host + 1 + self._drawn(step, 2) % max(1, workers - 1)) % workers

    def _drawn(self, step: int, what: int) -> int:
        return splitmix64(key(self.seed, AUDIT_STREAM, DRAWS * step + what))


def audited(share: float, seed: int, *, stop: bool) -> Audit | None:
    """The audits of a run; None where there are none."""
    return Audit(share, seed, stop) if share else None


def wrong(first: Mapping[int, int], again: Mapping[int, int], outsider: int | None = None) -> list[int] | None:
    """Who was wrong: the workers whose ``first`` value is not the one that most votes are for.

    Parameters
    ----------
    first : mapping of worker to value
        What host and auditor came to.
    again : mapping of worker to value
        What all came to when they were asked again.
    outsider : int, optional
        What another process came to.

    Returns
    -------
    list of int or None
        None: as many votes are for another value, so nobody can tell.
    """
    votes = Counter([*first.values(), *again.values(), *([] if outsider is None else [outsider])])
    ranked = votes.most_common(2)
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        return None
    return sorted(worker for worker, value in first.items() if value != ranked[0][0])
