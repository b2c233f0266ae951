"""How a torch state is shared with worker processes: what it consists of, and what lies where in each of them.

In a worker, weights and buffers are the arena's own; each owner updates, and keeps the optimizer state of, whole
tensors. The caller's process keeps a model of its own, which is copied into the arena and out of it.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
import mmap
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from phalanx.definition.reachable import reachable
from phalanx.errors import UsageError
from phalanx.frameworks.torch import accelerators, arithmetic
from phalanx.frameworks.torch.arithmetic import Gradient, blank, brought, spec_of, view
from phalanx.frameworks.torch.optimizer import Updates, check_no_global_hooks
from phalanx.frameworks.torch.optimizer_state import Averages, OptimizerState, find_pieces
from phalanx.frameworks.torch.replica.buffers import Buffers, Left
from phalanx.frameworks.torch.replica.gradient import Collector
from phalanx.frameworks.torch.results import Shown
from phalanx.plan.fold import Placement
from phalanx.seams import Arrays, Places
from phalanx.seams.records import Exported, Weights
from phalanx.shared.layout import Contents, Layout, Spec, StatePiece, Take, lay_out

DISPATCH = "__torch_dispatch__"
NEGATIVE: Any = torch  # its name for a view of the negatives is private
STORAGE: Any = torch.UntypedStorage
STATES = 2  # arrays per parameter that optimizers from elsewhere are taken to keep: Adam's


@dataclass
class Sharing:
    """Implements ``seams.Sharing`` for PyTorch: the parts of a framework that processes share."""

    model: torch.nn.Module
    buffers: Buffers
    updates: Updates
    collector: Collector
    environment: AbstractContextManager[None]
    devices: Sequence[str]
    portable: bool  # optimizers from elsewhere may keep some of the state in attributes
    arrays: Arrays = arithmetic
    moving_seconds = 0.2  # of making the arena and forking workers
    averaging: tuple[float, Weights | None] | None = None
    listen: Any = field(init=False)

    def __post_init__(self) -> None:
        self.listen = self.collector.listen

    @functools.cached_property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those of the model."""
        return list(self.model.parameters())

    @functools.cached_property
    def averages(self) -> Averages | None:
        """The average that is kept beside the state; made when it is first asked for."""
        return None if self.averaging is None else Averages(self.updates.named, *self.averaging)

    def lay_out(self, placement: Placement, take: Take, known: Contents | None = None) -> Layout:
        check_no_global_hooks()
        home = self.parameters[0].device
        if home.type != "cpu" and not placement.copies:
            raise UsageError(
                f"make_model puts the model on {home}, but workers share memory of the CPU where no devices are named; "
                f"name one for each, as in devices=['{home.type}:0', '{home.type}:1'], or leave workers out"
            )
        if known is None:
            with self.environment:
                contents = self._contents(find_pieces(self.updates, self.parameters, self.averages), placement.replicas)
        else:
            contents = dataclasses.replace(self._contents(known.state, 1), frozen=known.frozen, private=known.private)
        if placement.copies:
            contents = unshared(contents)
        alone = self.updates.whole and not placement.copies
        owners = [0] * len(self.parameters) if alone else contents.owners(placement.workers)
        return lay_out(contents, owners, placement, take)

    def open(self, layout: Layout, arena: mmap.mmap, worker: int | None) -> SharedState:
        if layout.copies:
            return CopiedState(self, layout)
        return SharedState(self, layout) if worker is None else WorkerState(self, layout, arena, worker)

    def move(self, layout: Layout, places: Places, *, stay: bool = False) -> None:
        rebind(self.model, layout.contents.storage_of, places, stay=stay)

    def look(self, layout: Layout, arena: mmap.mmap, resting: Sequence[int]) -> Callable[[], Exported]:
        """The model's weights and buffers are the arena's."""
        sizes = layout.contents.storages
        weights = [
            mine if at in resting else placed(mine, home_at((arena, layout.weights[at]), sizes[at]))
            for mine, at in zip(self.parameters, layout.contents.storage_of, strict=True)
        ]
        buffers = [view(arena, *pair) for pair in zip(layout.starts, layout.contents.buffers, strict=True)]
        return Shown(self.model, weights, buffers).follow

    def _contents(self, state: list[StatePiece], replicas: int) -> Contents:
        """No weight is frozen where a lone replica's forward, or a foreign optimizer, may write any."""
        storages = storages_of(self.parameters)
        numbers = {address: number for number, address in enumerate(storages)}
        storage_of = [numbers[parameter.untyped_storage().data_ptr()] for parameter in self.parameters]
        trained = {number for number, each in zip(storage_of, self.parameters, strict=True) if each.requires_grad}
        sizes = [storage.nbytes() for storage in storages.values()]
        frozen = [number for number, size in enumerate(sizes) if size and number not in trained]
        if replicas == 1 or self.updates.foreign:
            frozen = []
        gradients = list(map(spec_of, self.parameters))
        size = sum(spec.nbytes for number, spec in zip(storage_of, gradients, strict=True) if number not in frozen)
        private = size + STATES * size * self.updates.foreign  # owners keep their own gradients
        buffers = list(map(spec_of, self.buffers.starts))
        return Contents(gradients, buffers, sizes, storage_of, state, frozen, private)


class SharedState:
    """Implements ``seams.SharedState`` for PyTorch, in the caller's process.

    Parameters
    ----------
    sharing : Sharing
    layout : Layout
    """

    direct = True

    def __init__(self, sharing: Sharing, layout: Layout) -> None:
        self._parameters = sharing.parameters
        self._buffers = sharing.buffers
        self._updates = sharing.updates
        self._owned: Sequence[int] = range(len(sharing.parameters))
        state = self._state = OptimizerState(
            sharing.updates, sharing.parameters, layout.contents.state, sharing.averages
        )
        self.made, self.adopt = state.made, state.adopt
        self.aim = sharing.collector.set_destination

    @property
    def starts(self) -> Left:
        return self._buffers.starts

    def rest(self) -> tuple[list[Any] | None, list[Any]]:
        return self._state.foreign(self._owned), self._updates.options()

    def take(self, foreign: list[Any] | None, options: list[Any]) -> None:
        self._state.take_foreign(foreign, self._owned)
        self._updates.take_options(options)
        self._buffers.expect()  # somebody else may have written them

    def weights(self, numbers: Sequence[int] | None = None) -> list[np.ndarray]:
        """These are the model's own memory."""
        storages = list(storages_of(self._parameters).values())
        return [bytes_of(storages[number]) for number in (range(len(storages)) if numbers is None else numbers)]

    def take_arrays(self, weights: Sequence[np.ndarray | None], buffers: Sequence[torch.Tensor]) -> None:
        for mine, shared in zip(self.weights(), weights, strict=True):
            if shared is not None:
                mine[:] = shared
        self._buffers.rehome([shared.clone() for shared in buffers])

    def norm(self, gradient: Gradient, meet: Callable[[], None], there: Sequence[int] | None) -> float:
        """No other process takes part."""
        return self._updates.norm(gradient)


class CopiedState(SharedState):
    """Implements ``seams.SharedState`` for a process that has the whole state, on any device, beside the arena."""

    direct = False

    def __init__(self, sharing: Sharing, layout: Layout) -> None:
        super().__init__(sharing, layout)
        self._specs = layout.contents.gradients
        self._device = self._parameters[0].device
        self.adopt = self._placed

    def weights(self, numbers: Sequence[int] | None = None) -> list[np.ndarray]:
        """Copies in host memory."""
        chosen = range(len(self._specs)) if numbers is None else numbers
        with accelerators.watched([self._device]):
            copies = [brought(self._parameters[number].detach(), blank(self._specs[number])) for number in chosen]
        return [bytes_of(copy.untyped_storage()) for copy in copies]

    def take_arrays(self, weights: Sequence[np.ndarray | None], buffers: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, content, spec in zip(self._parameters, weights, self._specs, strict=True):
                parameter.copy_(view(cast("mmap.mmap", content), 0, spec))
        self._buffers.rehome([shared.clone().to(self._device) for shared in buffers])

    def _placed(self, pieces: Mapping[int, torch.Tensor], *, more: bool = False) -> None:
        """Use copies of them, each on the device where torch's own loading would put it."""
        on = {piece: self._state.on_device(piece, shared.clone()) for piece, shared in pieces.items()}
        self._state.adopt(on, more=more)


def unshared(contents: Contents) -> Contents:
    """The same contents, with memory of its own for each parameter; on other devices, parameters share none."""
    sizes = [spec.nbytes for spec in contents.gradients]
    return dataclasses.replace(contents, storages=sizes, storage_of=list(range(len(sizes))), frozen=[])


class WorkerState(SharedState):
    """Implements ``seams.SharedState`` in a worker: binds its model to the arena.

    Parameters
    ----------
    sharing : Sharing
    layout : Layout
    arena : mmap.mmap
    worker : int
    """

    def __init__(self, sharing: Sharing, layout: Layout, arena: mmap.mmap, worker: int) -> None:
        sharing.move(
            layout, {number: (arena, at) for number, at in enumerate(layout.weights) if number not in layout.frozen}
        )
        buffers = zip(layout.starts, layout.contents.buffers, strict=True)
        sharing.buffers.rehome([view(arena, *placed) for placed in buffers])
        sharing.updates.restrict(layout.owned(worker))
        super().__init__(sharing, layout)
        self._owned = layout.owned(worker)
        self._first = worker == 0
        count, dtype = len(layout.owners), sharing.updates.norm_dtype
        self._norms = torch.frombuffer(arena, dtype=dtype, count=count, offset=layout.norms)
        self._norm_of = list(self._norms)
        sharing.collector.watch([index for index, owner in enumerate(layout.owners) if owner != worker])

    def norm(self, gradient: Gradient, meet: Callable[[], None], there: Sequence[int] | None) -> float:
        if self._updates.whole:
            if self._first:
                self._norms[0] = self._updates.norm(gradient)
            meet()
            return self._norms[0].item()
        for index in self._owned:
            grad = gradient[index]
            if grad is not None:
                torch.linalg.vector_norm(grad, out=self._norm_of[index])
        meet()
        return self._updates.total_norm(self._norms if there is None else self._norms[list(there)])


def rebind(model: torch.nn.Module, storages: Sequence[int], places: Places, *, stay: bool) -> None:
    """Make every tensor of this process that lies in a parameter's storage lie in another memory instead.

    Not only the parameters: a view of a weight that is kept as a plain attribute must go on seeing the weight. What is
    no tensor cannot be moved, as an array. Memory is never freed under it.

    Parameters
    ----------
    model : torch.nn.Module
    storages : sequence of int
        The number of each parameter's storage.
    places : dict
        The new memory, and the offset there, of some storages by their number.
    stay : bool
        The new memory has the same bytes. So what somebody else has, too, stays where it is.

    Raises
    ------
    UsageError
        The model has something else than tensors over memory that has to move.
    """
    parameters = list(model.parameters())
    numbers = {_address(parameter): number for parameter, number in zip(parameters, storages, strict=True)}
    moving = _lying(parameters, {at: [] for at, number in numbers.items() if at and number in places}, every=not stay)
    views: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}
    for at in moving.keys() - (_held(moving) if stay else ()):
        tensors = moving[at]
        size = tensors[0].untyped_storage().nbytes()
        left = _put(tensors, home_at(places[numbers[at]], size), doubt=not stay)
        if left is not None and stay:
            _put(tensors, left)
        elif left is not None:
            views[at] = tensors[0], left
    if views:
        _check_views(model, views)


def _put(tensors: Sequence[Any], home: torch.UntypedStorage, *, doubt: bool = False) -> torch.UntypedStorage | None:
    """Move tensors of a storage; returns it if somebody else has it, or, in ``doubt``, may have an array of it."""
    storage = tensors[0].untyped_storage()
    old, kept = StorageWeakRef(storage), doubt and (not storage.resizable() or _beyond_python(tensors)) and storage
    del storage
    for tensor in tensors:
        tensor.data = placed(tensor, home)
    return kept or (None if old.expired() else STORAGE._new_with_weak_ptr(old.cdata))


def _lying(parameters: Sequence[Any], lying: dict[int, list[Any]], *, every: bool) -> dict[int, list[Any]]:
    """Fill in the tensors that lie at these addresses, parameters first; ``every``: those that ``gc.freeze`` hides."""
    tensors = _tensors() if lying else []
    if lying and every and not set(map(id, parameters)) <= set(map(id, tensors)):
        # User code froze what it had made. Otherwise what a worker inherited stays frozen: to list it takes 60 ms.
        gc.unfreeze()
        tensors = _tensors()
    for tensor in {id(tensor): tensor for tensor in (*parameters, *tensors)}.values() if lying else ():
        if (address := _address(tensor)) in lying:
            lying[address].append(tensor)
    return lying


def _tensors() -> list[torch.Tensor]:
    """All that this process knows of, but for frozen ones."""
    return [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]


def _held(lying: Mapping[int, Sequence[Any]]) -> set[int]:
    """Where somebody refers to a tensor whom garbage collection does not know, as ``tensor.numpy()`` does.

    torch marks the storages of arrays: they cannot be resized. That says nothing of whether the array is there still.
    """
    held = {at for at, tensors in lying.items() if _beyond_python(tensors)}
    marked = [one for at, one in lying.items() if at not in held and not one[0].untyped_storage().resizable()]
    if not marked:
        return held
    alone = [torch.empty(0), torch.empty(0)]  # nobody else has these, but the first has a view, which counts in C++
    tensors, _view = [*itertools.chain(*marked), *alone], alone[0][:]
    wanted = set(map(id, tensors))
    known = Counter(id(item) for item in gc.get_referents(*gc.get_objects()) if id(item) in wanted)
    counts = [sys.getrefcount(tensors[at]) - known[id(tensors[at])] for at in range(len(tensors))]
    pairs = zip(tensors, counts, strict=True)
    return held | {_address(tensor) for tensor, count in pairs if count > counts[-2 if tensor._use_count() > 1 else -1]}


def _beyond_python(tensors: Sequence[Any]) -> bool:
    """Whether C++ has one of them, and not for a view of it: for an array of DLPack, say."""
    views = Counter(id(tensor._base) for tensor in tensors)
    return any(tensor._use_count() > 1 + views[id(tensor)] for tensor in tensors)


def _check_views(model: torch.nn.Module, left: Mapping[int, tuple[torch.Tensor, torch.UntypedStorage]]) -> None:
    """Refuse what the model has over storages that its weights have ``left``; what others have keeps its memory."""
    starts = sorted(left)
    elsewhere = (("", item) for item in gc.get_referents(*gc.get_objects()))
    for path, value in itertools.chain(reachable({"model": model}), elsewhere):
        at = _start(value)
        if not starts[0] <= at:
            continue
        parameter, storage = left[starts[bisect.bisect(starts, at) - 1]]
        if at >= storage.data_ptr() + storage.nbytes():
            continue
        if path and ".__class__" not in path:  # what a function of its class knows may be for others
            name = next(name for name, item in model.named_parameters() if item is parameter)
            raise UsageError(
                f"{path} ({type(value).__name__}) lies in the memory of the weight {name!r}. Worker processes move "
                "that, and only tensors made of the weight itself move with it. Keep one of those (weight.detach()) "
                "and make an array of it in forward, or keep a copy; or use engine='inline'"
            )
        if issubclass(type(value), np.ndarray):
            weakref.finalize(value, id, storage)


def _start(value: Any) -> int:
    """The address of memory; 0 for what has none."""
    kind = type(value)  # to ask an object for its class may run code of its own
    if issubclass(kind, np.ndarray):
        return value.ctypes.data
    if issubclass(kind, torch.UntypedStorage):
        return value.data_ptr()
    return _address(value) if issubclass(kind, torch.Tensor) else 0


def home_at(location: tuple[mmap.mmap, int], size: int) -> torch.UntypedStorage:
    """A stretch of memory as a storage."""
    return view(*location, Spec((size,), (1,), "uint8", 1)).untyped_storage()


def placed(tensor: torch.Tensor, home: torch.UntypedStorage) -> torch.Tensor:
    """What a tensor would be if its storage were this one."""
    geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
    moved = torch.empty(0, dtype=tensor.dtype).set_(home, *geometry)
    moved = moved.conj() if tensor.is_conj() else moved
    return NEGATIVE._neg_view(moved) if tensor.is_neg() else moved


def storages_of(parameters: Sequence[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Every storage by its address in this process, in the order of the parameters."""
    return {storage.data_ptr(): storage for storage in (parameter.untyped_storage() for parameter in parameters)}


def _address(tensor: torch.Tensor) -> int:
    """The address of its storage; 0 if it has none of the usual kind."""
    pretends = getattr(type(tensor), DISPATCH) != getattr(torch.Tensor, DISPATCH)  # as fake tensors do: without memory
    if pretends or tensor.layout != torch.strided or tensor.device.type != "cpu" or is_lazy(tensor):
        return 0
    with contextlib.suppress(RuntimeError):  # what is left of a function transform that has ended
        return tensor.untyped_storage().data_ptr()
    return 0


def bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    """A storage's memory. It is not marked as that of an array."""
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    memory.storage = storage
    return np.ndarray(storage.nbytes(), np.uint8, memory)
