"""How a torch state is shared with worker processes: what it consists of, and what lies where in each of them.

In a worker, weights and buffers are the arena's own; each owner updates, and keeps the optimizer state of, whole
tensors. The caller's process keeps a model of its own, which is copied into the arena and out of it.
"""

from __future__ import annotations

import functools
import gc
import mmap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from phalanx.errors import UsageError
from phalanx.frameworks.torch import arithmetic
from phalanx.frameworks.torch.arithmetic import spec_of, view
from phalanx.frameworks.torch.optimizer import check_no_global_hooks
from phalanx.frameworks.torch.phases import Updates
from phalanx.frameworks.torch.replica.buffers import Buffers, Left
from phalanx.frameworks.torch.replica.gradient import Collector
from phalanx.frameworks.torch.results import copied, shown
from phalanx.frameworks.torch.sharing.buckets import GradientBuckets
from phalanx.frameworks.torch.sharing.optimizer_state import OptimizerState, find_pieces
from phalanx.plan.placement import Placement
from phalanx.seams import Exported
from phalanx.seams.sharing import Arrays
from phalanx.shared.layout import Contents, Layout, Spec, StatePiece, Take, lay_out

DISPATCH = "__torch_dispatch__"
STATES = 2  # arrays per parameter that optimizers from elsewhere are taken to keep: Adam's


@dataclass(frozen=True)
class Sharing:
    """Implements ``seams.sharing.Sharing`` for PyTorch: the parts of a framework that processes share."""

    model: torch.nn.Module
    buffers: Buffers
    updates: Updates
    collector: Collector
    environment: AbstractContextManager[None]
    arrays: ClassVar[Arrays] = arithmetic
    moving_seconds: ClassVar[float] = 0.2  # of making the arena and forking workers
    lasting: ClassVar[bool] = True

    @functools.cached_property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those of the model."""
        return list(self.model.parameters())

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return len(self.parameters)

    @property
    def portable(self) -> bool:
        """Whether the whole state is known: optimizers from elsewhere may keep some in attributes."""
        return not self.updates.foreign

    def lay_out(self, placement: Placement, take: Take, state: list[StatePiece] | None = None) -> Layout:
        """See ``seams.sharing.Sharing.lay_out``."""
        check_no_global_hooks()
        for parameter in self.parameters:
            if parameter.device.type != "cpu":
                raise UsageError(
                    f"the model is on {parameter.device}, but worker processes compute on the CPU in this version; use "
                    "engine='inline'"
                )
        if state is None:
            with self.environment:
                state = find_pieces(self.updates, self.parameters)
        contents = self._contents(state)
        owners = [0] * len(self.parameters) if self.updates.whole else contents.owners(placement.workers)
        return lay_out(contents, owners, placement, take)

    def caller_state(self, layout: Layout) -> CallerState:
        """The model and its optimizers in the caller's process."""
        return CallerState(self, layout)

    def worker_state(self, layout: Layout, arena: mmap.mmap, worker: int) -> WorkerState:
        """The model and its optimizers in a worker's process; from here on, they lie in the arena."""
        return WorkerState(self, layout, arena, worker)

    def look(self, layout: Layout, arena: mmap.mmap) -> Exported:
        """See ``seams.sharing.Sharing.look``: a model whose weights and buffers are the arena's."""
        model = copied(self.model)
        rebind(list(model.parameters()), layout, arena)
        Buffers(model).bind(
            [view(arena, *placed) for placed in zip(layout.starts, layout.contents.buffers, strict=True)]
        )
        return shown(model)

    def _contents(self, state: list[StatePiece]) -> Contents:
        storages = _storages(self.parameters)
        numbers = {address: number for number, address in enumerate(storages)}
        gradients = list(map(spec_of, self.parameters))
        size = sum(spec.nbytes for spec in gradients)
        return Contents(
            gradients,
            list(map(spec_of, self.buffers.starts)),
            [storage.nbytes() for storage in storages.values()],
            [numbers[parameter.untyped_storage().data_ptr()] for parameter in self.parameters],
            state,
            size + STATES * size * self.updates.foreign,  # owners keep their own gradients
        )


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
        self._parameters = sharing.parameters
        rebind(sharing.parameters, layout, arena)
        buffers = zip(layout.starts, layout.contents.buffers, strict=True)
        self._buffers.rehome([view(arena, *placed) for placed in buffers])
        self._updates.restrict(self._owned)
        self.buckets = GradientBuckets(sharing.collector, sharing.updates, layout, arena, worker)
        state = self._state = OptimizerState(sharing.updates, sharing.parameters, layout.contents.state)
        self.made, self.adopt = state.made, state.adopt

    @property
    def starts(self) -> Left:
        """See ``seams.sharing.WorkerState.starts``."""
        return self._buffers.starts

    def foreign(self) -> list[Any] | None:
        """See ``seams.sharing.WorkerState.foreign``."""
        return self._state.foreign(self._owned)

    def options(self) -> list[Any]:
        """See ``seams.sharing.WorkerState.options``."""
        return self._updates.options()

    @property
    def scheduled(self) -> list[Any] | None:
        """Options and schedules now, if a scheduler looked at parameters: later they are others."""
        return self._updates.options() if self._updates.touched else None

    def take(self, foreign: list[Any] | None, options: list[Any]) -> None:
        """See ``seams.sharing.WorkerState.take``."""
        self._state.take_foreign(foreign, self._owned)
        self._updates.take_options(options)
        self._buffers.expect()  # somebody else may have written them

    @property
    def rehearses(self) -> bool:
        """See ``seams.sharing.WorkerState.rehearses``: not where an optimizer has to see all parameters at once."""
        return not self._updates.whole

    def weight(self, parameter: int) -> torch.Tensor:
        """See ``seams.sharing.WorkerState.weight``."""
        return self._parameters[parameter].detach()

    def rehearsed(
        self,
        parameter: int,
        weight: torch.Tensor,
        pieces: Mapping[int, torch.Tensor],
        gradient: torch.Tensor | None,
        norm: float,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """See ``seams.sharing.WorkerState.rehearsed``."""
        copy = weight.clone()
        copy.grad = None if gradient is None else gradient.clone()
        self._updates.clip([copy], norm)
        return copy, self._state.stepped(self._updates.group_of, parameter, copy, pieces)


class CallerState:
    """Implements ``seams.sharing.CallerState`` for PyTorch.

    Parameters
    ----------
    sharing : Sharing
    layout : Layout
    """

    def __init__(self, sharing: Sharing, layout: Layout) -> None:
        self._parameters = sharing.parameters
        self._buffers = sharing.buffers
        self._updates = sharing.updates
        state = self._state = OptimizerState(sharing.updates, sharing.parameters, layout.contents.state)
        self._pieces = range(len(layout.contents.state))
        self.adopt = state.adopt

    @property
    def starts(self) -> Left:
        """See ``seams.sharing.CallerState.starts``."""
        return self._buffers.starts

    def weights(self) -> list[np.ndarray]:
        """See ``seams.sharing.CallerState.weights``: memory of the model's own."""
        return [_bytes_of(storage) for storage in _storages(self._parameters).values()]

    def state(self) -> dict[int, torch.Tensor]:
        """See ``seams.sharing.CallerState.state``."""
        return self._state.made(self._pieces)

    def foreign(self) -> list[Any] | None:
        """See ``seams.sharing.CallerState.foreign``."""
        return self._state.foreign(range(len(self._parameters)))

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

    def take(self, foreign: list[Any] | None, options: list[Any]) -> None:
        """See ``seams.sharing.CallerState.take``."""
        self._state.take_foreign(foreign, range(len(self._parameters)))
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


def _storages(parameters: Sequence[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Every storage by its address in this process, in the order of the parameters."""
    return {storage.data_ptr(): storage for storage in (parameter.untyped_storage() for parameter in parameters)}


def _address(tensor: torch.Tensor) -> int:
    """Of its storage; 0 for what has none of the usual kind."""
    pretends = getattr(type(tensor), DISPATCH) != getattr(torch.Tensor, DISPATCH)  # as fake tensors do: without memory
    if pretends or tensor.layout != torch.strided or tensor.device.type != "cpu" or is_lazy(tensor):
        return 0
    return tensor.untyped_storage().data_ptr()


def _raw(size: int) -> Spec:
    return Spec((size,), (1,), "uint8", 1)


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
