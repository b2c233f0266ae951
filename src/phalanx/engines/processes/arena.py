"""The link between workers that share an arena: they publish partial sums there, and each folds what it owns.

Only this module knows that gradients lie in the arena: where they lie (``Buckets``), and which are present
(``Publications``). The framework makes, adds and measures arrays.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.definition.data import Share
from phalanx.errors import Trouble
from phalanx.plan.fold import Fold, Placement, added, most_held
from phalanx.plan.lifecycle import Stage
from phalanx.seams import Arrays, Framework, Order, SharedState
from phalanx.seams.records import Part, Vector
from phalanx.shared.counters import LEAVE, Barrier
from phalanx.shared.layout import OWNED, ArenaPlan, Layout
from phalanx.shared.state import Shard

PATTERNS = 64  # cached sets of present gradients; a mixture of experts may have more, which are then found anew


@dataclass(slots=True)
class HeldVector:
    """A vector that this worker holds: its number among those that it can hold, and its entries."""

    number: int
    vector: Vector


class Buckets:
    """The buckets of all workers, seen from one of them.

    Parameters
    ----------
    arrays : Arrays
    state : SharedState
    layout : Layout
    arena : mmap.mmap
    worker : int

    Attributes
    ----------
    state : SharedState
    destinations : callable
        ``destinations(number)``: where this worker publishes what others own of the ``number``-th vector that it
        holds; None for what it owns itself. Made once.
    """

    def __init__(self, arrays: Arrays, state: SharedState, layout: Layout, arena: mmap.mmap, worker: int) -> None:
        self.state = state
        self.add_into = arrays.add_into
        self.contents = layout.contents
        self.destinations = functools.cache(functools.partial(self._vector, worker, mine=False))
        self._arrays = arrays
        self._arena = arena
        self._layout = layout
        self._worker = worker
        self._owned = layout.owned(worker)

    def peer(self, worker: int, number: int) -> Vector:
        """What another worker published, as far as this one owns it."""
        return self._vector(worker, number, mine=True)

    def publish(self, number: int, vector: Vector) -> None:
        """Put what others own of the ``number``-th vector where they look for it."""
        if not self.state.direct:
            for home, entry in zip(self.destinations(number), vector, strict=True):
                if home is not None:
                    home[...] = entry

    def fold(self, vectors: Sequence[Vector | None], order: Order, divisor: float) -> Vector:
        """Add what this worker owns of the vectors, in the order ``order(present positions)``, and divide the sum."""
        total: Vector = [None] * len(self._layout.owners)
        for index in self._owned:
            entries = [None if vector is None else vector[index] for vector in vectors]
            there = tuple(position for position, entry in enumerate(entries) if entry is not None)
            if there:
                total[index] = self._arrays.add_up(entries, order(there), there[0], divisor)
        return total

    def blanks(self) -> list[Any]:
        """An array shaped as each parameter's gradient, in memory of its own that is never touched."""
        specs = self._layout.contents.gradients
        return [self._arrays.view(mmap.mmap(-1, max(1, spec.nbytes)), 0, spec) for spec in specs]

    def _vector(self, worker: int, number: int, *, mine: bool) -> Vector:
        """A vector of ``worker``; ``mine``: what this worker owns of it, else what others own."""
        layout = self._layout
        places = zip(layout.sets[worker][number], layout.contents.gradients, layout.owners, strict=True)
        return [
            self._arrays.view(self._arena, offset, spec)
            if offset != OWNED and (owner == self._worker) is mine
            else None
            for offset, spec, owner in places
        ]


class Publications:
    """Flags that say which partial sums are published: a row for each sum, written by the worker that has it.

    Parameters
    ----------
    flags : memoryview
        For each sum, which of its worker's vectors it is (counted from 1; 0: there is none), and one flag per entry.
    publishers : sequence of int
        Which worker has each of them.
    worker : int
        This one.

    Attributes
    ----------
    own : list of int
        The positions of its sums.
    """

    def __init__(self, flags: memoryview, publishers: Sequence[int], worker: int) -> None:
        self.publishers = publishers
        self.own = [position for position, publisher in enumerate(publishers) if publisher == worker]
        self._flags = flags
        self._width = len(flags) // len(publishers)
        self.entries = self._width - 1

    def publish(self, position: int, number: int | None, there: bytes) -> None:
        """The sum at ``position`` is its worker's ``number``-th vector, with the entries that are ``there``."""
        start = position * self._width
        self._flags[start] = 0 if number is None else number + 1
        if number is not None:
            self._flags[start + 1 : start + self._width] = there

    def read(self) -> bytes:
        """The flags as they are."""
        return bytes(self._flags)

    def rows(self, flags: bytes) -> list[tuple[int, bytes]]:
        """Of flags that were read: the number of each sum's vector, from 1 (0: none), and which entries are there."""
        starts = range(0, len(flags), self._width)
        return [(flags[start], flags[start + 1 : start + self._width]) for start in starts]


class ArenaLink:
    """Implements ``seams.Link``.

    Parameters
    ----------
    framework : Framework
    shard : Shard
    plan : ArenaPlan
    placement : Placement
    arena : mmap.mmap
    barrier : Barrier

    Attributes
    ----------
    blocks : sequence of range
        The replicas of each worker.
    slots : Buckets
    publications : Publications
    parts : list of Part
        Of all replicas in this step; a link that reaches other hosts adds theirs.
    overlaps : bool
        Whether this step may send gradients while others are computed. Only links of devices do.
    there : list of int or None
        Which parameters have a gradient anywhere, on other hosts too (None: all).
    """

    def __init__(
        self,
        framework: Framework,
        shard: Shard,
        plan: ArenaPlan,
        placement: Placement,
        arena: mmap.mmap,
        barrier: Barrier,
    ) -> None:
        self._worker = barrier.worker
        self.blocks = placement.blocks
        self.hosted: Sequence[int] = placement.blocks[self._worker]
        self._framework = framework
        self._shard = shard
        self.slots = Buckets(framework.sharing.arrays, shard.local, plan.layout, arena, self._worker)
        self.publications = Publications(plan.flags(arena), plan.publishers, self._worker)
        self.parts: list[Part] = []
        self.overlaps = False
        self.there: list[int] | None = None
        self._counters = barrier.counters
        self._own = barrier.counters.workers[barrier.worker]
        self._barrier = barrier
        self._done = 0
        self._replicas = placement.replicas
        self._most = most_held(placement.replicas, self.hosted)
        self._order = functools.cache(functools.partial(added, placement.replicas, plan.nodes))
        self._published = functools.lru_cache(PATTERNS)(self._views)

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        self._count(0)
        self._barrier.at(Stage.COMPUTING)
        self._begin_fold()

    def _begin_fold(self) -> None:
        self._fold: Fold[HeldVector] = Fold(self._replicas, self._add)
        self._aim()

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        self._fold.push(replica, None if gradient is None else HeldVector(self._free, gradient))
        if samples:
            self._shard.leave(replica, buffers)
        self._count(self._done + 1)
        self._aim()
        if self._counters.pause == LEAVE:
            raise Trouble

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        self._counters.parts.write(self.blocks[self._worker].start, parts, self._framework.options_checksum)
        self._mine = self._publish()
        self._barrier.at(Stage.COMPUTED)
        self._barrier.wait()
        self._barrier.at(Stage.FOLDING)
        self.parts = [Part._make(row) for row in self._counters.parts.read()]
        return self.parts

    def mean(self, weight: float) -> Vector:
        vectors, self.there = self._gathered()
        return self.slots.fold(vectors, self._order, weight)

    def norm(self, gradient: Vector, parts: list[Part]) -> tuple[float, list[Part]]:
        return self.slots.state.norm(gradient, self._meet, self.there), parts

    def _meet(self) -> None:
        self._barrier.at(Stage.FOLDED)
        self._barrier.wait()

    def all_true(self, opinion: bool) -> bool:
        self._own.opinion = opinion
        self._barrier.wait()
        return all(worker.opinion for worker in self._counters.workers)

    def commit(self, step: int, gradient: Vector | None) -> None:
        self._barrier.at(Stage.UPDATING)
        if gradient is not None:
            buffers = self._left() if self._worker == 0 else None
            self._shard.frozen.thaw(step, gradient)
            self._framework.update(step, gradient, buffers)
            self._shard.settle()
            if self._worker == 0 and not self._framework.sharing.portable:
                self._counters.apart = 1
                self._shard.forget()
        self._barrier.at(Stage.UPDATED)
        self._barrier.wait()

    def leave(self) -> None:
        """Give up what is under way on a device, before anybody reads it: without a peer it may never end."""

    def _left(self) -> list[tuple[int, Any]]:
        """The samples of each replica that has any, and what it left in buffers."""
        return [
            (int(part.samples), self._shard.left(replica)) for replica, part in enumerate(self.parts) if part.samples
        ]

    def _gathered(self) -> tuple[list[Vector | None], list[int] | None]:
        """All partial sums, of all workers, and which parameters have a gradient in any (None: all)."""
        peers, there = self._published(self.publications.read())
        mine = iter(self._mine)
        owners = self.publications.publishers
        vectors = [next(mine) if worker == self._worker else peer for worker, peer in zip(owners, peers, strict=True)]
        return vectors, there

    def _check(self, pause: int = -1) -> None:
        """Leave the step if another worker failed, or if the caller wants that and nothing is under way."""
        if self._counters.trouble or self._counters.pause == pause:
            raise Trouble

    def _count(self, done: int) -> None:
        """Say how many replicas of this step are done."""
        self._own.replicas = self._done = done
        if done:
            self._own.total += 1

    def _publish(self) -> list[Vector | None]:
        """Publish this worker's partial sums; returns them."""
        mine: list[Vector | None] = []
        for position, partial in zip(self.publications.own, self._fold.partials(), strict=True):
            held = partial.value
            if held is None:
                self.publications.publish(position, None, b"")
                mine.append(None)
            else:
                self.slots.publish(held.number, held.vector)
                there = bytes(entry is not None for entry in held.vector)
                self.publications.publish(position, held.number, there)
                mine.append(held.vector)
        return mine

    def _views(self, flags: bytes) -> tuple[list[Vector | None], list[int] | None]:
        """What peers published, as ``flags`` say; and which parameters have a gradient anywhere (None: all)."""
        views: list[Vector | None] = []
        masks: list[bytes] = []
        rows = self.publications.rows(flags)
        for worker, (number, mask) in zip(self.publications.publishers, rows, strict=True):
            views.append(None)
            if number:
                masks.append(mask)
                if worker != self._worker:
                    entries = zip(self.slots.peer(worker, number - 1), mask, strict=True)
                    views[-1] = [entry if there else None for entry, there in entries]
        return views, union(masks)

    def _add(self, left: HeldVector, right: HeldVector) -> HeldVector:
        homes = self.slots.destinations(left.number)
        return HeldVector(left.number, self.slots.add_into(left.vector, right.vector, homes))

    def _aim(self) -> None:
        """Have the next replica's gradient written where no vector lies that is still needed."""
        taken = {partial.value.number for partial in self._fold.partials() if partial.value is not None}
        self._free = next((number for number in range(self._most) if number not in taken), -1)
        if self._free >= 0:
            self.slots.state.aim(self.slots.destinations(self._free))


def union(masks: Sequence[bytes]) -> list[int] | None:
    """Which parameters have a gradient in any of the partial sums; None for all."""
    if any(0 not in mask for mask in masks):
        return None
    return [index for index in range(len(masks[0]) if masks else 0) if any(mask[index] for mask in masks)]
