"""The parts of a link within one process: over one device, and over several. Both host every replica."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from phalanx.definition.data import Share
from phalanx.engines.link import Link
from phalanx.plan.fold import Fold, Partial
from phalanx.seams import Framework, Lanes
from phalanx.seams.records import Part, Vector, losses_of, with_losses
from phalanx.surroundings import interrupts


def alone(framework: Framework, replicas: int) -> Link:
    """The link of a worker without peers: it hosts every replica and owns everything."""
    if framework.lanes is None:
        hosted: Sequence[int] = range(replicas)
        return Link(hosted, Alone(hosted), Folded(framework, replicas))
    in_turn = itertools.zip_longest(*framework.lanes.placement.blocks)  # so that each gets work before any gets more
    hosted = [replica for row in in_turn for replica in row if replica is not None]
    return Link(hosted, Alone(hosted), FoldedOnLanes(framework, replicas, framework.lanes))


class Alone:
    """Implements ``engines.link.Board`` where nobody else must know anything."""

    def __init__(self, hosted: Sequence[int]) -> None:
        self._order = sorted(range(len(hosted)), key=hosted.__getitem__)

    def begin(self) -> None: ...

    def pushed(self) -> None:
        interrupts.check()

    def share(self, said: Sequence[bytes]) -> list[bytes]:
        return [said[at] for at in self._order]

    def gather(self, parts: Sequence[Part]) -> list[Part]:
        return [parts[at] for at in self._order]

    def all_true(self, opinion: bool) -> bool:
        return opinion


class Folded:
    """Implements ``engines.link.Sums``: replicas are folded as they come.

    Parameters
    ----------
    framework : Framework
    replicas : int
        R.
    """

    def __init__(self, framework: Framework, replicas: int) -> None:
        self._framework, self._replicas = framework, replicas
        self.begin(0, ())

    def begin(self, step: int, shares: Sequence[Share], *, early: bool = False) -> None:
        self._fold: Fold[Vector] = Fold(self._replicas, self._framework.arithmetic.add)
        self._buffers: dict[int, tuple[int, list[Any]]] = {}

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        self._fold.push(replica, gradient)
        if samples:
            self._buffers[replica] = samples, buffers

    def close(self, parts: Sequence[Part]) -> Sequence[Part]:
        return parts

    def mean(self, weight: float, parts: Sequence[Part]) -> Vector:
        total = self._total() or []
        return total if weight == 1 else self._framework.arithmetic.divide(total, weight)

    def norm(self, gradient: Vector, parts: list[Part]) -> tuple[float, list[Part]]:
        norm, *losses = self._framework.norm(gradient, losses_of(parts), self._left())()
        return norm, with_losses(parts, losses)

    def commit(self, step: int, gradient: Vector | None, parts: Sequence[Part]) -> None:
        if gradient is not None:
            self._framework.update(step, gradient, self._left())

    def leave(self) -> None: ...

    def _left(self) -> list[tuple[int, list[Any]]]:
        """The samples of each replica that has any, and what it left in buffers."""
        return list(self._buffers.values())

    def _total(self) -> Vector | None:
        return self._fold.total()


class FoldedOnLanes(Folded):
    """The same on several devices of one process.

    Each device folds its block of replicas as they come. What remains of a parameter's gradients is moved to the device
    that owns the parameter, and folded there in the tree's order. Nothing here waits for a device.

    Parameters
    ----------
    framework : Framework
    replicas : int
        R.
    lanes : Lanes
        Its devices.
    """

    def __init__(self, framework: Framework, replicas: int, lanes: Lanes) -> None:
        self._lanes = lanes
        super().__init__(framework, replicas)

    def begin(self, step: int, shares: Sequence[Share], *, early: bool = False) -> None:
        super().begin(step, shares)
        self._folds: dict[int, Fold[Vector]] = {}
        for block in self._lanes.placement.blocks:
            self._folds |= dict.fromkeys(block, Fold(self._replicas, self._framework.arithmetic.add))

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        self._fold = self._folds[replica]
        super().push(replica, samples, gradient, buffers)

    def _left(self) -> list[tuple[int, list[Any]]]:
        return [self._buffers[replica] for replica in sorted(self._buffers)]

    def _total(self) -> Vector | None:
        whole: Fold[Vector] = Fold(self._replicas, self._framework.arithmetic.add)
        for block in self._lanes.placement.blocks:
            partials = self._folds[block[0]].partials()
            values = [None if one.value is None else self._lanes.moved(one.value) for one in partials]
            whole.merge(Partial(one.level, one.index, value) for one, value in zip(partials, values, strict=True))
        return whole.total()
