"""How a jax state is shared with worker processes, and the arena as the caller's process sees it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from phalanx.errors import UsageError
from phalanx.frameworks.jax.layout import Layout, Spec, held, lay_out, owners_of, view
from phalanx.frameworks.jax.optimizer import Update
from phalanx.frameworks.jax.shard import Shard
from phalanx.frameworks.jax.snapshot import State
from phalanx.frameworks.jax.tree import like, plain
from phalanx.plan.placement import Placement


@dataclass(frozen=True)
class Sharing:
    """Implements ``seams.sharing.Sharing`` for jax."""

    state: State
    updates: Update
    device: Any
    moving_seconds: ClassVar[float] = 3.0  # of compiling

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return len(jax.tree.leaves(self.state.params))

    @property
    def portable(self) -> bool:
        """A state is known as a whole."""
        return True

    def lay_out(self, placement: Placement, take: Callable[[int], int]) -> Layout:
        """Give everything its place in an arena."""
        if self.device.platform != "cpu":
            raise UsageError(
                f"the parameters are on {self.device}, but worker processes compute on the CPU in this version; use "
                "engine='inline'"
            )
        if not self.updates.steady:
            raise UsageError(
                "the optimizer's state changes its shapes or dtypes in the first update, so it has no place that "
                "worker processes could share; use engine='inline', or make init return what update does"
            )
        params, state = (list(map(_spec, jax.tree.leaves(tree))) for tree in (self.state.params, self.state.optimizer))
        users = self.updates.users()
        owners, keepers = owners_of(params, state, users, placement.workers)
        workers = range(placement.workers)
        if not all(self.updates.fits(held(owners, w), held(keepers, w)) for w in workers):
            owners, keepers = owners_of(params, state, None, placement.workers)
        return lay_out(params, state, owners, keepers, placement, take)

    def mirror(self, layout: Layout, arena: mmap.mmap) -> Mirror:
        """The arena as the caller's process sees it."""
        return Mirror(self.state, layout, arena)

    def shard(self, layout: Layout, arena: mmap.mmap, worker: int) -> Shard:
        """The arena as a worker sees it, whose state now lies in it."""
        return Shard(self.state, self.updates, layout, arena, worker)


class Mirror:
    """The same arena seen from the caller's process, which keeps a state of its own.

    Parameters
    ----------
    state : State
    layout : Layout
    arena : mmap.mmap
    """

    def __init__(self, state: State, layout: Layout, arena: mmap.mmap) -> None:
        self._state = state
        self._layout = layout
        self._arena = arena

    def put(self) -> dict[str, Any]:
        """Copy the state into the arena; nothing is left to be described."""
        for leaf, home in zip(jax.tree.leaves(self._state.params), self._weights(), strict=True):
            home[...] = plain(leaf)
        for kept in self._layout.kept:
            for leaf, home in zip(jax.tree.leaves(self._state.optimizer), self._views(kept), strict=True):
                home[...] = plain(leaf)
        return {"optimizers": None, "options": None}

    def get(self, states: Sequence[dict[str, Any]], *, saved: bool) -> None:
        """Copy the state out of the arena; of the optimizer's, all there is is there."""
        self._state.params = _copied(self._state.params, self._weights())
        self._state.optimizer = _copied(self._state.optimizer, self._views(self._layout.kept[0]))

    def _weights(self) -> Iterator[np.ndarray]:
        return (view(self._arena, *placed) for placed in zip(self._layout.weights, self._layout.params, strict=True))

    def _views(self, offsets: Sequence[int]) -> Iterator[np.ndarray]:
        return (view(self._arena, *placed) for placed in zip(offsets, self._layout.state, strict=True))


def _copied(tree: Any, arrays: Iterator[np.ndarray]) -> Any:
    """``tree`` with copies of these in place of its leaves, on the device where those are."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [like(leaf, array.copy()) for leaf, array in zip(leaves, arrays, strict=True)])


def _spec(leaf: jax.Array) -> Spec:
    numbers = plain(leaf)
    return Spec(numbers.shape, numbers.dtype)
