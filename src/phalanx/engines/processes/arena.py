"""Partial sums in an arena: workers publish them there, and each folds what it owns.

Only this module knows that gradients lie in the arena, and where (``Buckets``). The framework makes, adds and measures
arrays.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.definition.data import Share
from phalanx.engines.processes.board import Shared, Station
from phalanx.plan.fold import Fold, added, most_held
from phalanx.seams import Arrays, Order, SharedState
from phalanx.seams.records import Part, Vector
from phalanx.shared.layout import OWNED, Layout

PATTERNS = 64  # cached sets of present gradients; a mixture of experts may have more, which are then found anew
Beyond = Callable[[Sequence[bytes], Sequence[Vector | None], Order], Vector]  # masks of all hosts; this one's sums


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


class Owned:
    """Implements ``engines.link.Sums``: each worker adds up the parameters that it owns, and updates those.

    Parameters
    ----------
    station : Station
    board : Shared
    beyond : Beyond, optional
        Adds to this host's sums those of others.

    Attributes
    ----------
    slots : Buckets
    """

    def __init__(self, station: Station, board: Shared, beyond: Beyond | None = None) -> None:
        self.slots = Buckets(
            station.framework.sharing.arrays, station.shard.local, station.plan.layout, station.arena, station.worker
        )
        self._station, self._board, self._beyond = station, board, beyond
        self._worker, self._replicas = station.worker, station.placement.replicas
        self._there: list[int] | None = None  # which parameters have a gradient anywhere (None: all)
        self._most = most_held(self._replicas, station.hosted)
        self._order = functools.cache(functools.partial(added, self._replicas, station.plan.nodes))
        self._published = functools.lru_cache(PATTERNS)(self._views)

    def begin(self, step: int, shares: Sequence[Share], *, early: bool) -> None:
        self._fold: Fold[HeldVector] = Fold(self._replicas, self._add)
        self._aim()

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        self._fold.push(replica, None if gradient is None else HeldVector(self._free, gradient))
        if samples:
            self._station.shard.leave(replica, buffers)
        self._aim()

    def close(self, parts: Sequence[Part]) -> Sequence[Part]:
        publications = self._board.publications
        self._mine: list[Vector | None] = []
        for position, partial in zip(publications.own, self._fold.partials(), strict=True):
            held = partial.value
            if held is None:
                publications.publish(position, None, b"")
                self._mine.append(None)
            else:
                self.slots.publish(held.number, held.vector)
                there = bytes(entry is not None for entry in held.vector)
                publications.publish(position, held.number, there)
                self._mine.append(held.vector)
        return parts

    def mean(self, weight: float, parts: Sequence[Part]) -> Vector:
        vectors, self._there = self._gathered()
        if self._beyond is None:
            return self.slots.fold(vectors, self._order, weight)
        masks = self._board.masks()
        self._there = union(masks)
        return self.slots.fold([self._beyond(masks, vectors, self._order)], lambda _: (), weight)

    def norm(self, gradient: Vector, parts: list[Part]) -> tuple[float, list[Part]]:
        norm = self.slots.state.norm(gradient, self._board.meet, self._there)
        self._board.note(norm)
        return norm, parts

    def commit(self, step: int, gradient: Vector | None, parts: Sequence[Part]) -> None:
        station = self._station
        self._board.updating()
        if gradient is not None:
            buffers = station.left(parts) if self._worker == 0 else None
            station.shard.frozen.thaw(step, gradient)
            station.framework.update(step, gradient, buffers)
            station.shard.settle()
            if self._worker == 0 and not station.framework.sharing.portable:
                station.barrier.counters.apart = 1
                station.shard.forget()
        self._board.updated()

    def leave(self) -> None: ...

    def _gathered(self) -> tuple[list[Vector | None], list[int] | None]:
        """All partial sums of this host, and which parameters have a gradient in any (None: all)."""
        publications = self._board.publications
        peers, there = self._published(publications.read())
        mine = iter(self._mine)
        owners = publications.publishers
        vectors = [next(mine) if worker == self._worker else peer for worker, peer in zip(owners, peers, strict=True)]
        return vectors, there

    def _views(self, flags: bytes) -> tuple[list[Vector | None], list[int] | None]:
        """What peers published, as ``flags`` say; and which parameters have a gradient anywhere (None: all)."""
        views: list[Vector | None] = []
        masks: list[bytes] = []
        publications = self._board.publications
        rows = publications.rows(flags)
        for worker, (number, mask) in zip(publications.publishers, rows, strict=True):
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
