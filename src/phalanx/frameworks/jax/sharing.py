"""How a jax state is shared with worker processes: what it consists of, and what lies where in each of them.

jax arrays are never written, but a worker's arrays lie over shared memory. Between steps, when nobody computes, owners
write there what their updates returned. So every worker sees it without a copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from phalanx import seams
from phalanx.errors import UsageError
from phalanx.frameworks import arithmetic
from phalanx.frameworks.arithmetic import Gradient, view
from phalanx.frameworks.jax.optimizer import Update
from phalanx.frameworks.jax.state import Trees, copied, is_key, named, plain
from phalanx.plan.fold import Placement, dealt
from phalanx.seams import Arrays
from phalanx.seams.records import Exported
from phalanx.shared.layout import Contents, Layout, Spec, StatePiece, Take, lay_out, row_major


@dataclass
class Sharing(seams.Sharing):
    """Implements ``seams.Sharing`` for jax. No weights are frozen."""

    state: Trees
    updates: Update
    device: Any
    arrays: Arrays = arithmetic
    moving_seconds = 3.0  # of compiling
    devices = ()
    averages = keep_average = listen = None
    portable = True

    def lay_out(self, placement: Placement, take: Take, known: Contents | None = None) -> Layout:
        """The whole state is known from the start, so ``known`` is not needed."""
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
        contents, owners = self._dealt(placement.workers)
        return lay_out(contents, owners, placement, take)

    def open(self, layout: Layout, arena: mmap.mmap, worker: int | None) -> SharedState:
        if worker is None:
            return SharedState(self.state, layout)
        return WorkerState(self.state, self.updates, layout, arena, worker)

    def look(self, layout: Layout, arena: mmap.mmap, resting: Sequence[int], looks: dict[Any, Any]) -> Exported:
        """All arrays are copies."""
        pairs = zip(layout.weights, layout.contents.gradients, strict=True)
        params = copied(self.state.params, [view(arena, *pair) for pair in pairs])
        beside = [view(arena, *pair).copy() for pair in zip(layout.starts, layout.contents.buffers, strict=True)]
        state = jax.tree.unflatten(jax.tree.structure(self.state.buffers), beside)
        return Exported(lambda: (params, state) if beside else params, named(params), "")

    def _dealt(self, workers: int) -> tuple[Contents, list[int]]:
        """The state's contents, and each parameter's owner. The first worker owns all if updates cannot be dealt."""
        gradients, buffers, state = (
            list(map(_spec, jax.tree.leaves(tree)))
            for tree in (self.state.params, self.state.buffers, self.state.optimizer)
        )
        sizes = [spec.nbytes for spec in gradients]
        owners = dealt(sizes, workers)
        users = self.updates.users(owners)
        if users is None:
            owners, users = [0] * len(gradients), [0] * len(state)
        pieces = [
            StatePiece(user, str(number), spec) for number, (user, spec) in enumerate(zip(users, state, strict=True))
        ]
        return Contents(gradients, buffers, sizes, list(range(len(gradients))), pieces), owners


class SharedState:
    """Implements ``seams.SharedState`` for jax, in the caller's process.

    Parameters
    ----------
    state : Trees
    layout : Layout
    """

    direct = False  # jax computes into memory of its own, all entries at once

    def __init__(self, state: Trees, layout: Layout) -> None:
        self.starts: list[Any] = jax.tree.leaves(state.buffers)
        self._state = state
        self._specs = layout.contents.gradients

    def made(self, absent: Sequence[int]) -> dict[int, np.ndarray]:
        """All pieces exist from the start."""
        leaves = jax.tree.leaves(self._state.optimizer) if absent else []
        return {piece: plain(leaves[piece]) for piece in absent}

    def adopt(self, pieces: Mapping[int, np.ndarray], *, more: bool = False) -> None:
        """Copy all of the optimizer's state."""
        self._state.optimizer = copied(self._state.optimizer, list(pieces.values()))

    def rest(self) -> tuple[None, None]:
        """Nothing is left over: all of the state has places, and options are part of it."""
        return None, None

    def take(self, foreign: None, options: None) -> None:
        """Does nothing: ``rest`` returns nothing."""

    def aim(self, homes: Gradient | None) -> None:
        """Does nothing: gradients are copied there when they are published."""

    def weights(self, numbers: Sequence[int] | None = None) -> list[np.ndarray]:
        leaves = jax.tree.leaves(self._state.params)
        chosen = leaves if numbers is None else [leaves[number] for number in numbers]
        return [plain(leaf).reshape(-1).view(np.uint8) for leaf in chosen]

    def take_arrays(self, weights: Sequence[np.ndarray | None], buffers: Sequence[Any]) -> None:
        pairs = zip(weights, self._specs, strict=True)
        arrays = [cast("np.ndarray", content).view(np.dtype(spec.dtype)).reshape(spec.shape) for content, spec in pairs]
        self._state.params = copied(self._state.params, arrays)
        for mine, shared in zip(self.starts, buffers, strict=True):
            mine[...] = shared

    def norm(self, gradient: Gradient, meet: Callable[[], None], there: Sequence[int] | None) -> float:
        """No other process takes part."""
        return arithmetic.norm(gradient)


class WorkerState(SharedState):
    """Implements ``seams.SharedState`` in a worker: puts its state into the arena, all of it, for good.

    Parameters
    ----------
    state : Trees
    updates : Update
    layout : Layout
    arena : mmap.mmap
    worker : int
    """

    def __init__(self, state: Trees, updates: Update, layout: Layout, arena: mmap.mmap, worker: int) -> None:
        super().__init__(state, layout)
        self._squares = np.frombuffer(arena, np.float64, len(layout.owners), layout.norms)
        self.starts = [view(arena, *pair) for pair in zip(layout.starts, layout.contents.buffers, strict=True)]
        state.buffers = jax.tree.unflatten(jax.tree.structure(state.buffers), self.starts)
        pieces = layout.contents.state
        owned, mine = layout.owned(worker), layout.kept(worker)
        self._owned = owned
        self._weights = weights = [
            view(arena, *pair) for pair in zip(layout.weights, layout.contents.gradients, strict=True)
        ]
        homes = [view(arena, layout.state[worker][piece], pieces[piece].spec) for piece in mine]
        leaves, structure = jax.tree.flatten(state.params)
        state.params = jax.tree.unflatten(
            structure, [alias(array, leaf) for array, leaf in zip(weights, leaves, strict=True)]
        )
        known = jax.tree.leaves(state.optimizer)
        arrays = [alias(array, known[piece]) for array, piece in zip(homes, mine, strict=True)]
        state.optimizer = None  # nobody has all of it
        params = [jax.tree.leaves(state.params)[index] for index in owned]
        updates.restrict(owned, mine, params, arrays, [weights[index] for index in owned] + homes)

    def adopt(self, pieces: Mapping[int, np.ndarray], *, more: bool = False) -> None:
        """Does nothing: they are in use already."""

    def norm(self, gradient: Gradient, meet: Callable[[], None], there: Sequence[int] | None) -> float:
        """The norm, from all workers' sums of squares. Every parameter has a gradient, or none has."""
        if self._owned and gradient[self._owned[0]] is not None:
            self._squares[self._owned] = arithmetic.squares([gradient[index] for index in self._owned])
        meet()
        return arithmetic.root(self._squares)


def alias(array: np.ndarray, like: Any = None) -> Any:
    """A jax array over the memory of ``array``; ``like``: if it holds random keys, so does the new one.

    Raises
    ------
    UsageError
        jax made a copy, which would never see what owners write.
    """
    shared = jax.device_put(array, jax.devices("cpu")[0], may_alias=True)
    if array.size and shared.unsafe_buffer_pointer() != array.ctypes.data:
        raise UsageError(
            f"jax {jax.__version__} copied shared memory instead of using it; take engine='inline' (same answer), and "
            "please report this"
        )
    if like is not None and is_key(like):
        return jax.random.wrap_key_data(shared, impl=jax.random.key_impl(like))
    return shared


def _spec(leaf: jax.Array) -> Spec:
    """The spec of a leaf; for random keys, that of their words."""
    numbers = plain(leaf)
    return Spec(numbers.shape, row_major(numbers.shape), numbers.dtype.name, numbers.dtype.itemsize)
