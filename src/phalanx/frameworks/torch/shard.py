"""How a torch state is shared with worker processes: what it consists of, and what lies where in each of them.

In a worker, weights and buffers are the arena's own; each owner updates, and keeps the optimizer state of, whole
tensors. The caller's process keeps a model of its own, which is copied into the arena and out of it.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from phalanx.errors import UsageError
from phalanx.frameworks.torch import arithmetic
from phalanx.frameworks.torch.arithmetic import spec_of, view
from phalanx.frameworks.torch.buckets import GradientBuckets
from phalanx.frameworks.torch.buffers import Buffers, Left
from phalanx.frameworks.torch.gradient import Collector
from phalanx.frameworks.torch.optimizer import Update, check_no_global_hooks
from phalanx.frameworks.torch.optimizer_state import OptimizerState
from phalanx.plan.placement import Placement
from phalanx.shared.layout import Contents, Layout, Spec, StatePiece, Take, lay_out
from phalanx.shared.state import Mirror, Shard

ROOM_FACTOR = 8  # optimizers keep up to three states of up to twice the parameter's bytes; unused pages cost nothing
ROOM_BYTES = 4096
STATES = 2  # what memory is checked for: Adam's


@dataclass(frozen=True)
class Sharing:
    """Implements ``seams.sharing.Sharing`` for PyTorch: the parts of a framework that processes share."""

    parameters: list[torch.nn.Parameter]
    buffers: Buffers
    updates: Update
    collector: Collector
    moving_seconds: ClassVar[float] = 0.2  # of making the arena and forking workers

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return len(self.parameters)

    @property
    def portable(self) -> bool:
        """Whether the whole state is known: optimizers from elsewhere may keep some in attributes."""
        return not self.updates.foreign

    def lay_out(self, placement: Placement, take: Take) -> Layout:
        """Give everything its place in an arena."""
        check_no_global_hooks()
        for parameter in self.parameters:
            if parameter.device.type != "cpu":
                raise UsageError(
                    f"the model is on {parameter.device}, but worker processes compute on the CPU in this version; use "
                    "engine='inline'"
                )
        contents = _contents(self.parameters, self.buffers.starts)
        owners = [0] * len(self.parameters) if self.updates.whole else contents.owners(placement.workers)
        return lay_out(contents, owners, placement, take)

    def mirror(self, layout: Layout, arena: mmap.mmap) -> Mirror:
        """The arena as the caller's process sees it."""
        return Mirror(arithmetic, CallerState(self, layout, arena), layout, arena)

    def shard(self, layout: Layout, arena: mmap.mmap, worker: int) -> Shard:
        """The arena as a worker sees it, whose model now lies in it."""
        return Shard(arithmetic, WorkerState(self, layout, arena, worker), layout, arena, worker)


class WorkerState:
    """Implements ``seams.sharing.WorkerState`` for PyTorch. Binds the worker's model to the arena.

    Parameters
    ----------
    sharing : Sharing
    layout : Layout
    arena : mmap.mmap
    worker : int
    """

    def __init__(self, sharing: Sharing, layout: Layout, arena: mmap.mmap, worker: int) -> None:
        self._buffers = sharing.buffers
        self._updates = sharing.updates
        self._owned = layout.owned(worker)
        rebind(sharing.parameters, layout, arena)
        buffers = zip(layout.starts, layout.contents.buffers, strict=True)
        self._buffers.rehome([view(arena, *placed) for placed in buffers])
        self._updates.restrict(self._owned)
        self.buckets = GradientBuckets(sharing.collector, sharing.updates, layout, arena, worker)
        self._state = _optimizer_state(sharing, layout, arena)
        self._without = self._owned  # of these parameters no optimizer state is in the arena yet

    @property
    def starts(self) -> Left:
        """See ``seams.sharing.WorkerState.starts``."""
        return self._buffers.starts

    def used(self, piece: int) -> int:
        """See ``seams.sharing.WorkerState.used``; there is one piece for each parameter."""
        return self._state.used(piece)

    def place_in_arena(self) -> bool:
        """See ``seams.sharing.WorkerState.place_in_arena``."""
        if not self._without or self._updates.foreign:
            return False
        before, self._without = self._without, self._state.place_in_arena(self._without)
        return len(self._without) < len(before)

    def described(self) -> list[Any]:
        """The optimizer state that this worker owns: where it lies, or itself."""
        return self._state.describe(self._owned)

    def options(self) -> list[Any]:
        """See ``seams.sharing.WorkerState.options``."""
        return self._updates.options()

    @property
    def scheduled(self) -> list[Any] | None:
        """Options and schedules now, if a scheduler looked at parameters: later they are others."""
        return self._updates.options() if self._updates.touched else None

    def take(self, optimizers: Sequence[list[Any]], options: list[Any]) -> None:
        """See ``seams.sharing.WorkerState.take``."""
        self._state.reset()
        for number, described in enumerate(optimizers):
            self._state.take(described, self._owned, beside=number == 0)
        self._without = self._owned
        self._updates.take_options(options)
        self._buffers.expect()  # somebody else may have written them


class CallerState:
    """Implements ``seams.sharing.CallerState`` for PyTorch.

    Parameters
    ----------
    sharing : Sharing
    layout : Layout
    arena : mmap.mmap
    """

    def __init__(self, sharing: Sharing, layout: Layout, arena: mmap.mmap) -> None:
        self._sharing = sharing
        self._buffers = sharing.buffers
        self._updates = sharing.updates
        self._layout = layout
        self._arena = arena
        self._all = range(len(sharing.parameters))

    @property
    def starts(self) -> Left:
        """See ``seams.sharing.CallerState.starts``."""
        return self._buffers.starts

    def weights(self) -> list[np.ndarray]:
        """See ``seams.sharing.CallerState.weights``: memory of the model's own."""
        return [_bytes_of(storage) for storage in _storages(self._sharing.parameters).values()]

    def put_optimizers(self) -> list[Any]:
        """See ``seams.sharing.CallerState.put_optimizers``."""
        kept = [{key: _shallow(value) for key, value in item.state.items()} for item in self._updates.optimizers]
        described = _optimizer_state(self._sharing, self._layout, self._arena).describe(self._all)  # moves it there
        for optimizer, own in zip(self._updates.optimizers, kept, strict=True):
            optimizer.state.clear()
            optimizer.state.update(own)  # the caller's stays as it is: it may have to be put there again
        return described

    def options(self) -> list[Any]:
        """See ``seams.sharing.CallerState.options``."""
        return self._updates.options()

    def take_weights(self, contents: Sequence[np.ndarray]) -> None:
        """See ``seams.sharing.CallerState.take_weights``."""
        for mine, shared in zip(self.weights(), contents, strict=True):
            mine[:] = shared

    def take_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """See ``seams.sharing.CallerState.take_buffers``."""
        self._buffers.rehome([shared.clone() for shared in buffers])

    def take_optimizers(self, described: Sequence[list[Any]], options: list[Any], *, saved: bool) -> None:
        """See ``seams.sharing.CallerState.take_optimizers``: state stays where it lies, and is not copied."""
        for optimizer in self._updates.optimizers:
            optimizer.state.clear()
        state = _optimizer_state(self._sharing, self._layout, self._arena)
        copies = self._layout.snapshot[2][0] if saved else None
        for number, item in enumerate(described):  # what optimizers keep beside is the first worker's
            state.take(item, self._all, beside=number == 0, copies=copies)
        self._updates.take_options(options)


def rebind(parameters: Sequence[torch.Tensor], layout: Layout, arena: mmap.mmap) -> None:
    """Make every tensor of this process that lies in a parameter's storage lie in the arena's instead.

    Not only the parameters: a view of a weight that is kept as a plain attribute must go on seeing the weight.
    """
    homes = {
        address: view(arena, offset, _raw(storage.nbytes())).untyped_storage()
        for (address, storage), offset in zip(_storages(parameters).items(), layout.weights, strict=True)
        if storage.nbytes()
    }
    for tensor in [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]:
        home = homes.get(_address(tensor))
        if home is not None:
            place = (tensor.storage_offset(), tensor.size(), tensor.stride())
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(home, *place)


def _contents(parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> Contents:
    """What a state consists of; how much its optimizers will keep is not known before they have kept it."""
    storages = _storages(parameters)
    numbers = {address: number for number, address in enumerate(storages)}
    gradients = list(map(spec_of, parameters))
    sizes = [spec.nbytes for spec in gradients]
    state = [
        StatePiece(index, _raw(ROOM_FACTOR * size + ROOM_BYTES), STATES * size) for index, size in enumerate(sizes)
    ]
    return Contents(
        gradients,
        list(map(spec_of, buffers)),
        [storage.nbytes() for storage in storages.values()],
        [numbers[parameter.untyped_storage().data_ptr()] for parameter in parameters],
        state,
    )


def _storages(parameters: Sequence[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Every storage by its address in this process, in the order of the parameters."""
    return {storage.data_ptr(): storage for storage in (parameter.untyped_storage() for parameter in parameters)}


def _optimizer_state(sharing: Sharing, layout: Layout, arena: mmap.mmap) -> OptimizerState:
    rooms = [(offset, piece.spec.nbytes) for offset, piece in zip(layout.state[0], layout.contents.state, strict=True)]
    updates = sharing.updates
    return OptimizerState(updates.optimizers, sharing.parameters, rooms, arena, movable=not updates.foreign)


def _address(tensor: torch.Tensor) -> int:
    """Of its storage; 0 for what has none of the usual kind."""
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return tensor.untyped_storage().data_ptr() if plain else 0


def _shallow(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _raw(size: int) -> Spec:
    return Spec((size,), (1,), "uint8", 1)


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
