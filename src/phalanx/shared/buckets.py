"""Gradient buckets: where in an arena partial sums are published, for whom, and in which order an owner adds them up.

Arrays are made, added and measured by the framework.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Sequence
from typing import Any

from phalanx.seams import Arrays, Order, SharedState
from phalanx.seams.records import Vector
from phalanx.shared.layout import OWNED, Layout


class Buckets:
    """The buckets of all workers as one of them sees them.

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
        """See to it that what others own of the ``number``-th vector is where they look for it."""
        if not self.state.direct:
            for home, entry in zip(self.destinations(number), vector, strict=True):
                if home is not None:
                    home[...] = entry

    def fold(self, vectors: Sequence[Vector | None], order: Order, divisor: float) -> Vector:
        """Add vectors as ``order(positions that are there)`` says, and divide the sum; for what this worker owns."""
        total: Vector = [None] * len(self._layout.owners)
        for index in self._owned:
            entries = [None if vector is None else vector[index] for vector in vectors]
            there = tuple(position for position, entry in enumerate(entries) if entry is not None)
            if there:
                total[index] = self._arrays.add_up(entries, order(there), there[0], divisor)
        return total

    def blanks(self) -> list[Any]:
        """An array as each parameter's gradient is, in memory of its own that is never touched."""
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
