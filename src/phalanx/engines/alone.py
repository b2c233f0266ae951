"""Links within one process: over one device, and over several. Both host every replica."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from phalanx.definition.data import Share
from phalanx.plan.fold import Fold, added, remaining
from phalanx.seams import Framework, Lanes
from phalanx.seams.records import Part, Vector, losses_of, with_losses
from phalanx.surroundings import interrupts


class LocalLink:
    """Implements ``seams.Link`` for a worker without peers: it hosts every replica and owns everything.

    Parameters
    ----------
    framework : Framework
    hosted : sequence of int
        All replicas, in order.
    """

    def __init__(self, framework: Framework, hosted: Sequence[int]) -> None:
        self.hosted = hosted
        self._framework = framework
        self.begin(0, ())

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        self._fold: Fold[Vector] = Fold(len(self.hosted), self._framework.arithmetic.add)
        self._buffers: dict[int, tuple[int, list[Any]]] = {}

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        self._fold.push(replica, gradient)
        if samples:
            self._buffers[replica] = samples, buffers
        interrupts.check()

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        return list(parts)

    def mean(self, weight: float) -> Vector:
        total = self._total() or []
        return total if weight == 1 else self._framework.arithmetic.divide(total, weight)

    def _total(self) -> Vector | None:
        return self._fold.total()

    def norm(self, gradient: Vector, parts: list[Part]) -> tuple[float, list[Part]]:
        norm, *losses = self._framework.norm(gradient, losses_of(parts), list(self._buffers.values()))()
        return norm, with_losses(parts, losses)

    def all_true(self, opinion: bool) -> bool:
        return opinion

    def commit(self, step: int, gradient: Vector | None) -> None:
        if gradient is not None:
            self._framework.update(step, gradient, list(self._buffers.values()))


class LaneLink(LocalLink):
    """Implements ``seams.Link`` for several devices of one process.

    Each device folds its block of replicas as they come. What remains of a parameter's gradients is moved to the device
    that owns the parameter, and folded there in the tree's order. Nothing here waits for a device.

    Parameters
    ----------
    framework : Framework
    lanes : Lanes
        Its devices.
    """

    def __init__(self, framework: Framework, lanes: Lanes) -> None:
        placement = lanes.placement
        self._framework = framework
        self._lanes = lanes
        in_turn = itertools.zip_longest(*placement.blocks)  # so that each device gets work before any gets more
        self.hosted: Sequence[int] = [replica for row in in_turn for replica in row if replica is not None]
        nodes = [node for block in placement.blocks for node in remaining(placement.replicas, block)]
        self._order = functools.cache(functools.partial(added, placement.replicas, nodes))
        self.begin(0, ())

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        super().begin(step, shares)
        self._folds: dict[int, Fold[Vector]] = {}
        for block in self._lanes.placement.blocks:
            self._folds |= dict.fromkeys(block, Fold(len(self.hosted), self._framework.arithmetic.add))

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        self._fold = self._folds[replica]
        super().push(replica, samples, gradient, buffers)

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        by_replica = dict(zip(self.hosted, parts, strict=True))
        self._buffers = {replica: self._buffers[replica] for replica in sorted(self._buffers)}
        return [by_replica[replica] for replica in sorted(by_replica)]

    def _total(self) -> Vector | None:
        folds = [self._folds[block[0]] for block in self._lanes.placement.blocks]
        vectors = [partial.value for fold in folds for partial in fold.partials()]
        there = {number: self._lanes.moved(vector) for number, vector in enumerate(vectors) if vector is not None}
        for into, source in self._order(tuple(there)):
            there[into] = self._framework.arithmetic.add(there[into], there[source])
        return there[min(there)] if there else None
