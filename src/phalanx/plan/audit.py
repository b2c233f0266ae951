"""Which steps are audited, and what is computed again then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.keys import AUDIT_STREAM, MASK64, key, splitmix64

DRAWS = 2  # numbers that are drawn for a step of an audit


@dataclass(frozen=True)
class Audit:
    """A share of steps in which one replica is computed twice, the same ones for any number of workers.

    Attributes
    ----------
    share : float
        Of the steps, from 0 to 1.
    seed : int
        The recipe's.
    """

    share: float
    seed: int

    def due(self, step: int) -> bool:
        """Whether a step is audited."""
        return self._drawn(step, 0) < self.share * (MASK64 + 1)

    def replica(self, step: int, ran: Sequence[int]) -> int:
        """Which of the replicas that have samples is computed again."""
        return ran[self._drawn(step, 1) % len(ran)]

    def _drawn(self, step: int, what: int) -> int:
        return splitmix64(key(self.seed, AUDIT_STREAM, DRAWS * step + what))


def joined(replica: int, block: Sequence[int], ran: Sequence[int]) -> list[int]:
    """A replica, after the one before if a worker that hosts ``block`` may add up the two as it computes them."""
    pair = replica % 2 and replica - 1 in block and replica - 1 in ran
    return [replica - 1, replica] if pair else [replica]
