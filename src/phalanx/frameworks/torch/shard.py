"""A torch run's state in an arena, as one worker works with it.

Weights and buffers are the arena's own; gradients are published there for the workers that own the parameters; each
owner folds, updates and keeps the optimizer state of whole tensors.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.errors import UsageError
from phalanx.frameworks.torch.arithmetic import Gradient, add_sliced
from phalanx.frameworks.torch.buffers import Buffers, Left
from phalanx.frameworks.torch.gradient import Collector
from phalanx.frameworks.torch.layout import OWNED, Layout, Take, lay_out
from phalanx.frameworks.torch.optimizer import Update
from phalanx.frameworks.torch.rooms import Rooms, view
from phalanx.plan.placement import Placement

Order = Callable[[tuple[int, ...]], Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Sharing:
    """Implements ``contracts.Sharing`` for PyTorch: the parts of a framework that processes share."""

    parameters: list[torch.nn.Parameter]
    buffers: Buffers
    updates: Update
    collector: Collector

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return len(self.parameters)

    def lay_out(self, placement: Placement, take: Take) -> Layout:
        """Give everything its place in an arena."""
        for parameter in self.parameters:
            if parameter.device.type != "cpu":
                raise UsageError(
                    f"the model is on {parameter.device}, but worker processes compute on the CPU in this version; use "
                    "engine='inline'"
                )
        return lay_out(self.parameters, self.buffers.starts, placement, self.updates.whole, take)

    def mirror(self, layout: Layout, arena: mmap.mmap) -> Mirror:
        """The arena as the caller's process sees it."""
        return Mirror(self, layout, arena)

    def shard(self, layout: Layout, arena: mmap.mmap, worker: int) -> Shard:
        """The arena as a worker sees it, whose model now lies in it."""
        return Shard(self, layout, arena, worker)


class Shard:
    """Implements ``contracts.Shard`` for PyTorch. Made in a worker; binds its model to the arena.

    Parameters
    ----------
    sharing : Sharing
    layout : Layout
    arena : mmap.mmap
    worker : int
    """

    def __init__(self, sharing: Sharing, layout: Layout, arena: mmap.mmap, worker: int) -> None:
        buffers, updates = sharing.buffers, sharing.updates
        self._buffers = buffers
        self._updates = updates
        self._collector = sharing.collector
        self._layout = layout
        self._arena = arena
        self._worker = worker
        self.owned = [index for index, owner in enumerate(layout.owners) if owner == worker]
        rebind(layout, arena)
        buffers.rehome([view(arena, *placed) for placed in zip(layout.starts, layout.buffers, strict=True)])
        updates.restrict(self.owned)
        self._collector.watch([index for index, owner in enumerate(layout.owners) if owner != worker])
        self._rooms = Rooms(updates.optimizers, sharing.parameters, layout.rooms, arena, movable=not updates.foreign)
        self._without = self.owned
        self._norms = view(arena, layout.norms, ((len(layout.owners),), (1,), updates.norm_dtype))
        self._changed = memoryview(arena)[layout.changed :]
        self._left = [
            [view(arena, *placed) for placed in zip(offsets, layout.buffers, strict=True)] for offsets in layout.left
        ]

    def homes(self, number: int) -> Gradient:
        """Where this worker publishes the ``number``-th vector that it holds; None for what it owns."""
        return self._vector(self._worker, number, mine=False)

    def live_in(self, homes: Gradient) -> None:
        """Put the next replica's gradient there."""
        self._collector.live_in(homes)

    def peer(self, worker: int, number: int) -> Gradient:
        """What another worker published, as far as this one owns it."""
        return self._vector(worker, number, mine=True)

    def add(self, left: Gradient, right: Gradient, homes: Gradient) -> Gradient:
        """``left + right`` in place of ``left``, which lives in ``homes``; so does what only ``right`` has."""
        added: Gradient = []
        for mine, other, home in zip(left, right, homes, strict=True):
            if mine is not None:
                added.append(mine if other is None else mine.add_(other))
            else:
                added.append(other if other is None or home is None else home.copy_(other))
        return added

    def fold(self, vectors: Sequence[Gradient | None], order: Order, divisor: float) -> Gradient:
        """Add vectors as ``order(positions that are there)`` says, and divide the sum; for what this worker owns."""
        total: Gradient = [None] * len(self._layout.owners)
        for index in self.owned:
            parts = [None if vector is None else vector[index] for vector in vectors]
            there = tuple(position for position, part in enumerate(parts) if part is not None)
            if there:
                total[index] = parts[there[0]]
                add_sliced(parts, order(there), parts[there[0]], divisor)
        return total

    def publish_norms(self, gradient: Gradient) -> None:
        """Write the norms of what this worker owns."""
        if self._updates.whole:
            if self._worker == 0:
                self._norms[0] = self._updates.norm(gradient)
            return
        for index in self.owned:
            grad = gradient[index]
            if grad is not None:
                torch.linalg.vector_norm(grad, out=self._norms[index])

    def total_norm(self, there: Sequence[int] | None) -> float:
        """The global norm, out of what all published; ``there``: which parameters have a gradient, None for all."""
        if self._updates.whole:
            return self._norms[0].item()
        return self._updates.total_norm(self._norms if there is None else self._norms[list(there)])

    def leave(self, replica: int, left: Left) -> None:
        """Publish the buffers that a replica left, where they differ from the step's start."""
        first = replica * len(left)
        for number, (value, start) in enumerate(zip(left, self._buffers.starts, strict=True)):
            self._changed[first + number] = changed = value is not start
            if changed:
                self._left[replica][number].copy_(value)

    def left(self, replica: int) -> Left:
        """The buffers that a replica left, wherever it ran."""
        starts = self._buffers.starts
        first = replica * len(starts)
        pairs = zip(self._left[replica], starts, strict=True)
        return [left if self._changed[first + number] else start for number, (left, start) in enumerate(pairs)]

    def house(self) -> None:
        """Move optimizer state that this worker owns into the arena, as far as it is not there yet."""
        if self._without:
            self._without = self._rooms.house(self._without)

    def state(self) -> dict[str, Any]:
        """What of the state is not weights or buffers: optimizer state that this worker owns, options, schedules."""
        return {"optimizers": self._rooms.describe(self.owned), "options": self._updates.options()}

    def take(self, state: dict[str, Any]) -> None:
        """Continue from a described state."""
        self._rooms.take(state["optimizers"], self.owned)
        self._updates.take_options(state["options"])

    def _vector(self, worker: int, number: int, *, mine: bool) -> Gradient:
        places = self._layout.sets[worker][number]
        return [
            view(self._arena, place, spec) if place != OWNED and (owner == self._worker) is mine else None
            for place, spec, owner in zip(places, self._layout.gradients, self._layout.owners, strict=True)
        ]


class Mirror:
    """The same arena seen from the caller's process, which keeps a model of its own.

    Parameters
    ----------
    sharing : Sharing
    layout : Layout
    arena : mmap.mmap
    """

    def __init__(self, sharing: Sharing, layout: Layout, arena: mmap.mmap) -> None:
        self._parameters = sharing.parameters
        self._buffers = sharing.buffers
        self._updates = sharing.updates
        self._layout = layout
        self._arena = arena
        self._all = range(len(sharing.parameters))

    def put(self) -> dict[str, Any]:
        """Copy weights, buffers and optimizer state into the arena; returns the description of the rest."""
        for mine, shared in self._storages():
            shared.copy_(mine)
        for start, placed in zip(self._buffers.starts, self._shared_buffers(), strict=True):
            placed.copy_(start)
        return {"optimizers": self._new_rooms().describe(self._all), "options": self._updates.options()}

    def get(self, states: Sequence[dict[str, Any]]) -> None:
        """Copy weights and buffers out of the arena; take the optimizer state that workers described."""
        for mine, shared in self._storages():
            mine.copy_(shared)
        self._buffers.rehome([shared.clone() for shared in self._shared_buffers()])
        for optimizer in self._updates.optimizers:
            optimizer.state.clear()
        rooms = self._new_rooms()
        for state in states:
            rooms.take(state["optimizers"], self._all)
        self._updates.take_options(states[0]["options"])

    def _new_rooms(self) -> Rooms:
        movable = not self._updates.foreign
        return Rooms(self._updates.optimizers, self._parameters, self._layout.rooms, self._arena, movable=movable)

    def _shared_buffers(self) -> list[torch.Tensor]:
        return [view(self._arena, *placed) for placed in zip(self._layout.starts, self._layout.buffers, strict=True)]

    def _storages(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        seen: set[int] = set()
        places = {address: (offset, size) for address, size, offset in self._layout.storages}
        for parameter in self._parameters:
            storage = parameter.untyped_storage()
            offset, size = places[storage.data_ptr()]
            if size and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield torch.empty(0, dtype=torch.uint8).set_(storage), view(self._arena, offset, _raw(size))


def rebind(layout: Layout, arena: mmap.mmap) -> None:
    """Make every tensor of this process that lies in a parameter's storage lie in the arena's instead.

    Not only the parameters: a view of a weight that is kept as a plain attribute must go on seeing the weight.
    """
    homes = {
        address: view(arena, offset, _raw(size)).untyped_storage() for address, size, offset in layout.storages if size
    }
    for tensor in [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]:
        home = homes.get(_address(tensor))
        if home is not None:
            place = (tensor.storage_offset(), tensor.size(), tensor.stride())
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(home, *place)


def _address(tensor: torch.Tensor) -> int:
    """Of its storage; 0 for what has none of the usual kind."""
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return tensor.untyped_storage().data_ptr() if plain else 0


def _raw(size: int) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return (size,), (1,), torch.uint8
