"""A jax run's state in an arena, as one worker works with it.

jax arrays are never written, but these lie over memory that is: between steps, when nobody computes, owners put there
what their updates returned. So what others updated is seen without being copied.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from phalanx.errors import UsageError
from phalanx.frameworks.jax import arithmetic
from phalanx.frameworks.jax.arithmetic import Gradient
from phalanx.frameworks.jax.layout import Layout, Spec, held, view
from phalanx.frameworks.jax.optimizer import Update
from phalanx.frameworks.jax.snapshot import State
from phalanx.frameworks.jax.tree import is_key
from phalanx.seams.sharing import Order


class Shard:
    """Implements ``seams.sharing.Shard`` for jax. Made in a worker; its state lies in the arena from then on.

    Parameters
    ----------
    state : State
    updates : Update
    layout : Layout
    arena : mmap.mmap
    worker : int
    """

    def __init__(self, state: State, updates: Update, layout: Layout, arena: mmap.mmap, worker: int) -> None:
        self.slots = GradientBuckets(layout, arena, worker)
        owned, mine = held(layout.owners, worker), held(layout.keepers, worker)
        kept, (copies, kept_copies) = layout.kept[worker], layout.snapshot
        places = [(layout.weights[index], copies[index], layout.params[index]) for index in owned]
        places += [(kept[index], kept_copies[worker][index], layout.state[index]) for index in mine]
        self._places = places
        self.weights = [(layout.weights[index], layout.params[index].size) for index in owned]
        self.buffer_payload: list[list[memoryview]] = []
        self._arena = arena
        weights = [view(arena, *placed) for placed in zip(layout.weights, layout.params, strict=True)]
        homes = [view(arena, kept[index], layout.state[index]) for index in mine]
        leaves, structure = jax.tree.flatten(state.params)
        state.params = jax.tree.unflatten(
            structure, [alias(array, leaf) for array, leaf in zip(weights, leaves, strict=True)]
        )
        known = jax.tree.leaves(state.optimizer)
        arrays = [alias(array, known[index]) for array, index in zip(homes, mine, strict=True)]
        state.optimizer = None  # nobody has all of it
        params = [jax.tree.leaves(state.params)[index] for index in owned]
        updates.restrict(owned, mine, params, arrays, [weights[index] for index in owned] + homes)

    def leave(self, replica: int, left: list[Any]) -> None:
        """There are no buffers."""

    def left(self, replica: int) -> list[Any]:
        """There are no buffers."""
        return []

    def place_in_arena(self) -> bool:
        """The optimizer's state lies in the arena from the start."""
        return False

    def described(self) -> None:
        """What lies in the arena needs no description."""

    def state(self) -> dict[str, Any]:
        """See ``seams.sharing.Shard.state``: all of it lies in the arena."""
        return {"optimizers": None, "options": None}

    @property
    def scheduled(self) -> None:
        """Schedules are the optimizer's own."""

    def take(self, optimizers: Sequence[Any], options: Any) -> None:
        """See ``seams.sharing.Shard.take``: it is there already."""

    def save(self) -> int:
        """Copy what this worker owns into the snapshot; returns the checksum of that."""
        sums: list[np.int64] = []
        for home, copy in self._kept():
            copy[:] = home
            sums.append(copy.sum())
        return _total(sums)

    def restore(self) -> int:
        """Copy what this worker owns back; returns the checksum of what was there."""
        sums: list[np.int64] = []
        for home, copy in self._kept():
            sums.append(copy.sum())
            home[:] = copy
        return _total(sums)

    def _kept(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """As 64-bit words; places are multiples of 64 bytes, and what pads them is 0."""
        for offset, copy, spec in self._places:
            words = Spec((-(-spec.size // 8),), np.dtype(np.int64))
            yield view(self._arena, offset, words), view(self._arena, copy, words)


class GradientBuckets:
    """Implements ``seams.sharing.GradientBuckets`` for jax.

    Parameters
    ----------
    layout : Layout
    arena : mmap.mmap
    worker : int
    """

    def __init__(self, layout: Layout, arena: mmap.mmap, worker: int) -> None:
        self._layout = layout
        self._arena = arena
        self._worker = worker
        self._owned = held(layout.owners, worker)
        self.blank = functools.partial(_blank, layout)
        self._homes = functools.cache(functools.partial(self._vector, worker, mine=False))
        self._squares = view(arena, layout.squares, Spec((len(layout.params),), np.dtype(np.float64)))

    def set_destination(self, number: int) -> None:
        """Jax computes into memory of its own."""

    def watch(self, told: Callable[[int, Any], None]) -> bool:
        """They come all at once."""
        return False

    def add(self, left: Gradient, right: Gradient, number: int) -> Gradient:
        """``left + right``, published later."""
        return arithmetic.add(left, right)

    def publish(self, number: int, vector: Gradient) -> None:
        """Copy what others own to where they look for it."""
        for home, entry in zip(self._homes(number), vector, strict=True):
            if home is not None:
                home[...] = np.asarray(entry)

    def peer(self, worker: int, number: int) -> Gradient:
        """What another worker published, as far as this one owns it."""
        return self._vector(worker, number, mine=True)

    def fold(self, vectors: Sequence[Gradient | None], order: Order, divisor: float) -> Gradient:
        """Add vectors as ``order(positions that are there)`` says, and divide the sum; for what this worker owns."""
        parts = [None if vector is None else [vector[index] for index in self._owned] for vector in vectors]
        there = tuple(position for position, part in enumerate(parts) if part is not None)
        for into, other in order(there):
            left, right = parts[into], parts[other]
            assert left is not None
            assert right is not None
            parts[into] = arithmetic.add(left, right)
        total = parts[there[0]] if there else None
        if total is None:
            return [None] * len(self._layout.owners)
        if divisor != 1:
            total = arithmetic.divide(total, divisor)
        found: Gradient = [None] * len(self._layout.owners)
        for index, entry in zip(self._owned, total, strict=True):
            found[index] = entry
        return found

    def publish_norms(self, gradient: Gradient) -> None:
        """Write the sums of squares of what this worker owns."""
        if self._owned:
            self._squares[self._owned] = arithmetic.squares([gradient[index] for index in self._owned])

    def total_norm(self, there: Sequence[int] | None) -> float:
        """The global norm; every parameter has a gradient."""
        return arithmetic.root(self._squares)

    def _vector(self, worker: int, number: int, *, mine: bool) -> list[np.ndarray | None]:
        places, layout = self._layout.sets[worker][number], self._layout
        return [
            view(self._arena, place, spec) if owner != worker and (owner == self._worker) is mine else None
            for place, spec, owner in zip(places, layout.params, layout.owners, strict=True)
        ]


def _blank(layout: Layout, index: int) -> np.ndarray:
    return np.empty(*layout.params[index])


def alias(array: np.ndarray, like: Any = None) -> Any:
    """A jax array over the memory of ``array``; ``like``: random keys, if that is what it is to hold.

    Raises
    ------
    UsageError
        jax made a copy, which would never see what owners write.
    """
    found = jax.device_put(array, jax.devices("cpu")[0], may_alias=True)
    if array.size and found.unsafe_buffer_pointer() != array.ctypes.data:
        raise UsageError(
            f"jax {jax.__version__} copied shared memory instead of using it; take engine='inline' (same answer), and "
            "please report this"
        )
    if like is not None and is_key(like):
        return jax.random.wrap_key_data(found, impl=jax.random.key_impl(like))
    return found


def _total(sums: Sequence[np.int64]) -> int:
    """Modulo 2**64, as numpy adds."""
    return int(np.array(sums, np.int64).sum())
