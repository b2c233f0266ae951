"""How a torch state is shared with worker processes: what it consists of, and what lies where in each of them.

In a worker, weights and buffers are the arena's own; each owner updates, and keeps the optimizer state of, whole
tensors. The caller's process keeps a model of its own, which is copied into the arena and out of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
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
from phalanx.plan.rounds import Rounds
from phalanx.seams import Arrays, Places
from phalanx.seams.records import Exported, Weights
from phalanx.shared.layout import Contents, Layout, Spec, StatePiece, Take, lay_out

DISPATCH = "__torch_dispatch__"
NEGATIVE: Any = torch  # its name for a view of the negatives is private
STARTS: Any = {  # the addresses of what has memory
    np.ndarray: lambda array: array.ctypes.data,
    torch.UntypedStorage: torch.UntypedStorage.data_ptr,
    torch.Tensor: lambda tensor: _address(tensor),
}
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
    movable: bool
    arrays: Arrays = arithmetic
    averages: Averages | None = None
    listen: Any = field(init=False)

    def __post_init__(self) -> None:
        self.listen = self.collector.listen

    @property
    def moving_seconds(self) -> float:
        """For making the arena and forking workers. What hooks keep apart stays where it is."""
        return math.inf if self.updates.custom else 0.2

    @property
    def portable(self) -> bool:
        """Custom optimizers may keep some of the state apart."""
        return self.movable and not self.updates.apart

    @functools.cached_property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those of the model."""
        return list(self.model.parameters())

    def keep_average(self, rounds: Rounds, decay: float, start: Weights | None = None) -> None:
        self.averages = Averages(self.updates.named, rounds, decay, start)

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
            self.movable = not self.updates.custom  # nobody says what hooks keep apart
        alone = self.updates.whole and not placement.copies
        owners = [0] * len(self.parameters) if alone else contents.owners(placement.workers)
        return lay_out(contents, owners, placement, take)

    def open(self, layout: Layout, arena: mmap.mmap, worker: int | None) -> SharedState:
        if layout.copies:
            return CopiedState(self, layout)
        return SharedState(self, layout) if worker is None else WorkerState(self, layout, arena, worker)

    def move(self, layout: Layout, places: Places, *, stay: bool = False) -> None:
        rebind(self.model, layout.contents.storage_of, places, stay=stay)

    def look(self, layout: Layout, arena: mmap.mmap, resting: Sequence[int], looks: dict[Any, Any]) -> Exported:
        """The model's weights and buffers are the arena's."""
        if (known := tuple(resting)) not in looks:
            sizes = layout.contents.storages
            weights = [
                mine if at in resting else placed(mine, home_at((arena, layout.weights[at]), sizes[at]))
                for mine, at in zip(self.parameters, layout.contents.storage_of, strict=True)
            ]
            buffers = [view(arena, *pair) for pair in zip(layout.starts, layout.contents.buffers, strict=True)]
            looks[known] = Shown(self.model, weights, buffers)
        return looks[known].follow()

    def _contents(self, state: list[StatePiece], replicas: int) -> Contents:
        """No weight is frozen where a lone replica's forward, or a custom optimizer, may write any."""
        storages = storages_of(self.parameters)
        numbers = {address: number for number, address in enumerate(storages)}
        storage_of = [numbers[parameter.untyped_storage().data_ptr()] for parameter in self.parameters]
        trained = {number for number, each in zip(storage_of, self.parameters, strict=True) if each.requires_grad}
        sizes = [storage.nbytes() for storage in storages.values()]
        frozen = [number for number, size in enumerate(sizes) if size and number not in trained]
        if replicas == 1 or self.updates.custom:
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
    homes = {
        _address(parameter): home_at(places[number], parameter.untyped_storage().nbytes())
        for parameter, number in zip(parameters, storages, strict=True)
        if number in places
    }
    homes.pop(0, None)
    if not homes:
        return
    if not stay and not set(map(id, parameters)) <= set(map(id, gc.get_objects())):
        # User code froze what it had made. Otherwise what a worker inherited stays frozen: to list it takes 60 ms.
        gc.unfreeze()
    known = [*parameters, *(item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))]
    tensors = {id(tensor): tensor for tensor in known if _address(tensor) in homes}
    held = _held(tensors)
    if held and not stay:
        _check_views(model, tensors, held)
    for tensor in tensors.values():
        address = _address(tensor)
        if address in held:
            if stay:
                continue
            weakref.finalize(tensor, id, held[address])  # the memory stays as long as an array that was made of it
        tensor.data = placed(tensor, homes[address])


def _held(tensors: Mapping[int, Any]) -> dict[int, torch.UntypedStorage]:
    """The storages of these tensors, by address, that somebody has of whom garbage collection does not know.

    An array is such a one. It refers to the tensor that it was made of.
    """
    known = Counter(id(item) for item in gc.get_referents(*gc.get_objects()) if id(item) in tensors)
    views = Counter(id(tensor._base) for tensor in tensors.values())
    held, alone = dict[int, torch.UntypedStorage](), torch.empty(0, device="cpu")
    for tensor in tensors.values():
        beyond = tensor._use_count() - 1  # views in C++, and what DLPack made
        others = sys.getrefcount(tensor) - known[id(tensor)] - bool(beyond) > sys.getrefcount(alone)
        kept = sys.getrefcount(tensor.untyped_storage()) > sys.getrefcount(alone.untyped_storage())
        if others or kept or beyond > views[id(tensor)]:
            held[_address(tensor)] = tensor.untyped_storage()
    return held


def _check_views(model: torch.nn.Module, tensors: Mapping[int, Any], held: Mapping[int, torch.UntypedStorage]) -> None:
    """Refuse what the model itself has in these storages, and is not among the tensors that move."""
    for path, item in reachable({"model": model}):
        # What functions of its class know may be there for others.
        if type(item) in STARTS and id(item) not in tensors and ".__class__" not in path:
            start = STARTS[type(item)](item)
            for name, parameter in model.named_parameters():
                storage = held.get(_address(parameter))
                if storage is not None and 0 <= start - storage.data_ptr() < storage.nbytes():
                    raise UsageError(
                        f"{path} ({type(item).__name__}) lies in the memory of the weight {name!r}. Worker processes "
                        "move that, and only tensors made of the weight itself move with it. Keep such a tensor there "
                        "(weight.detach()) and make an array of it in forward, or keep a copy; or use engine='inline'"
                    )


def home_at(location: tuple[mmap.mmap, int], size: int) -> torch.UntypedStorage:
    """A stretch of memory as a storage."""
    return view(*location, Spec((size,), (1,), "uint8", 1)).untyped_storage()


def placed(tensor: torch.Tensor, home: torch.UntypedStorage) -> torch.Tensor:
    """What a tensor would be if its storage were this one."""
    geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
    moved = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(home, *geometry)
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
    """A storage's memory."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
