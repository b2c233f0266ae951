"""The link between workers that share an arena: partial sums are published there, and each folds what it owns."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.plan.fold import Fold
from phalanx.plan.lifecycle import Phase
from phalanx.plan.placement import Placement, additions, most_held
from phalanx.seams import Part, Steppable
from phalanx.seams.sharing import Vector
from phalanx.shared.arena import Plan
from phalanx.shared.control import COMPUTE, COUNT, FOLD, LEAVE, OPINION, PAUSE, ROW, TOTAL, UPDATE, Barrier, Trouble
from phalanx.shared.state import Shard

PATTERNS = 64  # of which gradients are there; a mixture of experts may have more, and is then looked up anew


@dataclass(slots=True)
class Held:
    """A vector that this worker holds: which of those it can hold, and its entries."""

    number: int
    vector: Vector


class ArenaLink:
    """Implements ``seams.Link``.

    Parameters
    ----------
    framework : Steppable
    shard : Shard
    plan : Plan
    placement : Placement
    arena : mmap.mmap
    barrier : Barrier
    """

    def __init__(
        self,
        framework: Steppable,
        shard: Shard,
        plan: Plan,
        placement: Placement,
        arena: mmap.mmap,
        barrier: Barrier,
    ) -> None:
        self._worker = barrier.worker
        self.hosted = placement.blocks[self._worker]
        self._framework = framework
        self._shard = shard
        self._slots = shard.slots
        self._publishers = plan.publishers
        self._control = barrier.control
        self._barrier = barrier
        self._done = 0
        self._replicas = placement.replicas
        self._nodes = plan.nodes
        self._flags = plan.flags(arena)
        self._width = len(self._flags) // len(plan.nodes)
        self._most = most_held(placement.replicas, self.hosted)
        self._order = functools.cache(functools.partial(additions, placement.replicas, plan.nodes))
        self._published = functools.lru_cache(PATTERNS)(self._views)

    def enter(self, step: int) -> None:
        """The step that is next."""

    def begin(self, *, even: bool) -> None:
        """Forget what an earlier step left; from here on replicas are computed, on ``even`` shares or not."""
        self._count(0)
        self._barrier.at(Phase.COMPUTING)
        self._fold: Fold[Held] = Fold(self._replicas, self._add)
        self._aim()

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        """See ``seams.Link.push``."""
        self._fold.push(replica, None if gradient is None else Held(self._free, gradient))
        if samples:
            self._shard.leave(replica, buffers)
        self._count(self._done + 1)
        self._aim()
        if self._control.words[PAUSE] == LEAVE:
            raise Trouble

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        """See ``seams.Link.all_gather``."""
        rows = self._control.rows
        place = self.hosted.start * ROW
        for part in parts:
            for value in part:
                rows[place] = value
                place += 1
        self._mine = self._publish()
        self._barrier.at(Phase.COMPUTED)
        self._barrier.meet(COMPUTE, FOLD)
        self._barrier.at(Phase.FOLDING)
        found = rows.tolist()
        self._parts = [Part._make(found[place : place + ROW]) for place in range(0, len(found), ROW)]
        return self._parts

    def mean(self, weight: float) -> Vector:
        """See ``seams.Link.mean``."""
        return self._slots.fold(self._vectors(), self._order, weight)

    def norm(self, gradient: Vector) -> float:
        """See ``seams.Link.norm``."""
        self._slots.publish_norms(gradient)
        self._barrier.at(Phase.FOLDED)
        self._barrier.meet(FOLD, UPDATE)
        return self._slots.total_norm(self._there)

    def all_true(self, opinion: bool) -> bool:
        """See ``seams.Link.all_true``."""
        words = self._control.words
        words[self._control.place(self._worker, OPINION)] = opinion
        self._barrier.meet(UPDATE, UPDATE)
        return all(words[self._control.place(worker, OPINION)] for worker in range(self._control.workers))

    def commit(self, step: int, gradient: Vector | None) -> None:
        """See ``seams.Link.commit``."""
        self._barrier.at(Phase.UPDATING)
        if gradient is not None:
            buffers = None
            if self._worker == 0:
                ran = [replica for replica, part in enumerate(self._parts) if part.samples]
                buffers = [(int(self._parts[replica].samples), self._shard.left(replica)) for replica in ran]
            self._framework.update(step, gradient, buffers)
            self._shard.settle()
        self._barrier.at(Phase.UPDATED)
        self._barrier.meet(UPDATE, COMPUTE)

    def _vectors(self) -> list[Vector | None]:
        """All partial sums, of all workers."""
        peers, self._there = self._published(bytes(self._flags))
        mine = iter(self._mine)
        return [
            next(mine) if worker == self._worker else peer
            for (worker, _), peer in zip(self._publishers, peers, strict=True)
        ]

    def _count(self, done: int) -> None:
        """Say how many replicas of this step are done."""
        words = self._control.words
        self._barrier.begin_part()
        words[self._control.place(self._worker, COUNT)] = self._done = done
        if done:
            words[self._control.place(self._worker, TOTAL)] += 1

    def _publish(self) -> list[Vector | None]:
        """Say where this worker's partial sums lie; returns them."""
        mine: list[Vector | None] = []
        partials = iter(self._fold.partials())
        for position, (worker, _) in enumerate(self._publishers):
            if worker == self._worker:
                held = next(partials).value
                start = position * self._width
                self._flags[start] = 0 if held is None else held.number + 1
                if held is not None:
                    self._slots.publish(held.number, held.vector)
                    self._flags[start + 1 : start + self._width] = bytes(entry is not None for entry in held.vector)
                mine.append(None if held is None else held.vector)
        return mine

    def _views(self, flags: bytes) -> tuple[list[Vector | None], list[int] | None]:
        """What peers published, as ``flags`` say; and which parameters have a gradient anywhere (None: all)."""
        views: list[Vector | None] = []
        masks: list[bytes] = []
        for position, (worker, _) in enumerate(self._publishers):
            number, *mask = flags[position * self._width : (position + 1) * self._width]
            views.append(None)
            if number:
                masks.append(bytes(mask))
                if worker != self._worker:
                    entries = zip(self._slots.peer(worker, number - 1), mask, strict=True)
                    views[-1] = [entry if there else None for entry, there in entries]
        return views, union(masks)

    def _add(self, left: Held, right: Held) -> Held:
        return Held(left.number, self._slots.add(left.vector, right.vector, left.number))

    def _aim(self) -> None:
        """The next replica's gradient goes where no vector is that is still needed."""
        taken = {partial.value.number for partial in self._fold.partials() if partial.value is not None}
        self._free = next((number for number in range(self._most) if number not in taken), -1)
        if self._free >= 0:
            self._slots.set_destination(self._free)


def union(masks: Sequence[bytes]) -> list[int] | None:
    """Which parameters have a gradient in any of the partial sums; None for all."""
    if any(0 not in mask for mask in masks):
        return None
    return [index for index in range(len(masks[0]) if masks else 0) if any(mask[index] for mask in masks)]
