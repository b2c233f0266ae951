"""The link of a worker that has no others: it hosts every replica and owns everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.plan.fold import Fold
from phalanx.seams import Part, Steppable, Vector
from phalanx.surroundings import interrupts


class LocalLink:
    """Implements ``seams.Link`` for one worker.

    Parameters
    ----------
    framework : Steppable
    hosted : sequence of int
        All replicas, in order.
    """

    def __init__(self, framework: Steppable, hosted: Sequence[int]) -> None:
        self.hosted = hosted
        self._framework = framework
        self.begin()

    def begin(self) -> None:
        """Forget what an earlier step left."""
        self._fold: Fold[Vector] = Fold(len(self.hosted), self._framework.arithmetic.add)
        self._buffers: list[tuple[int, list[Any]]] = []

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        """See ``seams.Link.push``."""
        self._fold.push(replica, gradient)
        if samples:
            self._buffers.append((samples, buffers))
        interrupts.check()

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        """See ``seams.Link.all_gather``."""
        return list(parts)

    def mean(self, weight: float) -> Vector:
        """See ``seams.Link.mean``."""
        total = self._fold.total()
        assert total is not None
        return total if weight == 1 else self._framework.arithmetic.divide(total, weight)

    def norm(self, gradient: Vector) -> float:
        """See ``seams.Link.norm``."""
        return self._framework.norm(gradient)

    def all_true(self, opinion: bool) -> bool:
        """See ``seams.Link.all_true``."""
        return opinion

    def commit(self, step: int, gradient: Vector | None) -> None:
        """See ``seams.Link.commit``."""
        if gradient is not None:
            self._framework.update(step, gradient, self._buffers)
