"""Gradient buckets: where in an arena partial sums are published, for whom, and in which order an owner adds them up.

Arrays are made, added and measured by the framework.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.seams.sharing import Order, Vector
from phalanx.shared.layout import OWNED, Layout, Spec

AddUp = Callable[[Sequence[Any], Sequence[tuple[int, int]], int, float], Any]


class BucketViews:
    """The buckets of all workers as one of them sees them.

    Parameters
    ----------
    view : callable
        ``view(offset, spec)``: an array of the framework over arena memory.
    layout : Layout
    worker : int

    Attributes
    ----------
    owned : list of int
        The parameters that this worker owns.
    destinations : callable
        ``destinations(number)``: where this worker publishes what others own of the ``number``-th vector that it
        holds; None for what it owns itself. Made once.
    """

    def __init__(self, view: Callable[[int, Spec], Any], layout: Layout, worker: int) -> None:
        self._view = view
        self._layout = layout
        self._worker = worker
        self.owned = layout.owned(worker)
        self.destinations = functools.cache(functools.partial(self._vector, worker, mine=False))

    def peer(self, worker: int, number: int) -> Vector:
        """What another worker published, as far as this one owns it."""
        return self._vector(worker, number, mine=True)

    def fold(self, vectors: Sequence[Vector | None], order: Order, divisor: float, add_up: AddUp) -> Vector:
        """Add vectors as ``order(positions that are there)`` says, and divide the sum; for what this worker owns.

        ``add_up(entries, additions, first, divisor)`` does so for one parameter; the sum ends up in entry ``first``.
        """
        total: Vector = [None] * len(self._layout.owners)
        for index in self.owned:
            entries = [None if vector is None else vector[index] for vector in vectors]
            there = tuple(position for position, entry in enumerate(entries) if entry is not None)
            if there:
                total[index] = add_up(entries, order(there), there[0], divisor)
        return total

    def _vector(self, worker: int, number: int, *, mine: bool) -> Vector:
        """A vector of ``worker``; ``mine``: what this worker owns of it, else what others own."""
        layout = self._layout
        places = zip(layout.sets[worker][number], layout.contents.gradients, layout.owners, strict=True)
        return [
            self._view(offset, spec) if offset != OWNED and (owner == self._worker) is mine else None
            for offset, spec, owner in places
        ]
