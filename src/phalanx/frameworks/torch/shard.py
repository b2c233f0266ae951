"""A torch run's state in an arena, as one worker works with it.

Weights and buffers are the arena's own; gradients are published there for the workers that own the parameters; each
owner folds, updates and keeps the optimizer state of whole tensors.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from phalanx.errors import UsageError
from phalanx.frameworks.torch.buckets import GradientBuckets
from phalanx.frameworks.torch.buffers import Buffers, Left
from phalanx.frameworks.torch.gradient import Collector
from phalanx.frameworks.torch.layout import Layout, Take, bytes_in, lay_out
from phalanx.frameworks.torch.optimizer import Update, check_no_global_hooks
from phalanx.frameworks.torch.optimizer_state import OptimizerState, view
from phalanx.plan.placement import Placement


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
        return lay_out(self.parameters, self.buffers.starts, placement, self.updates.whole, take)

    def mirror(self, layout: Layout, arena: mmap.mmap) -> Mirror:
        """The arena as the caller's process sees it."""
        return Mirror(self, layout, arena)

    def shard(self, layout: Layout, arena: mmap.mmap, worker: int) -> Shard:
        """The arena as a worker sees it, whose model now lies in it."""
        return Shard(self, layout, arena, worker)


class Shard:
    """Implements ``seams.sharing.Shard`` for PyTorch. Made in a worker; binds its model to the arena.

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
        self._arena = arena
        self._layout = layout
        self._keeps_buffers = worker == 0
        rebind(layout, arena)
        self._buffers.rehome([view(arena, *placed) for placed in zip(layout.starts, layout.buffers, strict=True)])
        self._updates.restrict(self._owned)
        self.slots = GradientBuckets(sharing.collector, sharing.updates, layout, arena, worker)
        movable = not self._updates.foreign
        self._rooms = OptimizerState(self._updates.optimizers, sharing.parameters, layout.rooms, arena, movable=movable)
        self._without = self._owned
        self._storages = [number for number, keeper in enumerate(layout.keepers) if keeper == worker]
        self._changed = memoryview(arena)[layout.changed :]
        self.weights = [(offset, size) for _, size, offset in map(layout.storages.__getitem__, self._storages)]
        self.buffer_payload = _buffer_payload(layout, memoryview(arena))
        self._left = [
            [view(arena, *placed) for placed in zip(offsets, layout.buffers, strict=True)] for offsets in layout.left
        ]

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

    def place_in_arena(self) -> bool:
        """Move optimizer state that this worker owns into the arena, as far as it is not there; True if some was."""
        if not self._without or self._updates.foreign:
            return False
        before, self._without = self._without, self._rooms.place_in_arena(self._without)
        return len(self._without) < len(before)

    def described(self) -> list[Any]:
        """The optimizer state that this worker owns: where it lies, or itself."""
        return self._rooms.describe(self._owned)

    def state(self) -> dict[str, Any]:
        """What of the state is not weights or buffers: optimizer state that this worker owns, options, schedules."""
        return {"optimizers": self.described(), "options": self._updates.options()}

    @property
    def scheduled(self) -> list[Any] | None:
        """Options and schedules now, if a scheduler looked at parameters: later they are others."""
        return self._updates.options() if self._updates.touched else None

    def take(self, optimizers: Sequence[list[Any]], options: list[Any]) -> None:
        """Continue from described optimizer state, earlier descriptions first, and options."""
        self._rooms.reset()
        for number, described in enumerate(optimizers):
            self._rooms.take(described, self._owned, beside=number == 0)
        self._without = self._owned
        self._updates.take_options(options)
        self._buffers.expect()  # somebody else may have written them

    def save(self) -> int:
        """Copy what this worker owns into the snapshot; returns the checksum of that."""
        checksum = torch.zeros((), dtype=torch.int64)
        for home, copy, words in self._kept():
            copy.copy_(home)
            checksum += words.sum()
        return int(checksum)

    def restore(self) -> int:
        """Copy what this worker owns back, optimizer state as far as it was described; returns the checksum of that."""
        checksum = torch.zeros((), dtype=torch.int64)
        for home, copy, words in self._kept():
            checksum += words.sum()
            home.copy_(copy)
        return int(checksum)

    def _kept(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """All that a snapshot holds of this worker's, with its copy; as bytes, the copy also as words to be added.

        The sum of words is a checksum at the speed of memory: CRC-32 takes ten times as long as the copy. It changes
        with any one bit.
        """
        storages, starts, rooms = self._layout.snapshot
        places = [(self._layout.storages[number][1:], storages[number]) for number in self._storages]
        pairs = [(offset, size, copy) for (size, offset), copy in places]
        for index in self._owned:
            offset, size = self._rooms.used(index)
            pairs.append((offset, size, rooms[index]))
        if self._keeps_buffers:
            specs = zip(self._layout.starts, self._layout.buffers, starts, strict=True)
            pairs += [(offset, bytes_in(spec), copy) for offset, spec, copy in specs]
        for offset, size, copy in pairs:
            words = view(self._arena, copy, ((-(-size // 8),), (1,), torch.int64))  # places are multiples of 64 bytes
            yield view(self._arena, offset, _raw(size)), view(self._arena, copy, _raw(size)), words


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
        kept = [{key: _shallow(value) for key, value in item.state.items()} for item in self._updates.optimizers]
        described = self._new_rooms().describe(self._all)  # moves the state into the arena
        for optimizer, own in zip(self._updates.optimizers, kept, strict=True):
            optimizer.state.clear()
            optimizer.state.update(own)  # the caller's stays as it is: it may have to be put there again
        return {"optimizers": described, "options": self._updates.options()}

    def get(self, states: Sequence[dict[str, Any]], *, saved: bool) -> None:
        """Copy weights and buffers out of the arena; take the optimizer state there, or in the snapshot, as it lies."""
        for mine, shared in self._storages():
            mine.copy_(shared)
        self._buffers.rehome([shared.clone() for shared in self._shared_buffers()])
        for optimizer in self._updates.optimizers:
            optimizer.state.clear()
        rooms = self._new_rooms()
        copies = self._layout.snapshot[2] if saved else None
        for number, state in enumerate(states):  # what optimizers keep beside is the first worker's
            rooms.take(state["optimizers"], self._all, beside=number == 0, copies=copies)
        self._updates.take_options(states[0]["options"])

    def _new_rooms(self) -> OptimizerState:
        movable = not self._updates.foreign
        return OptimizerState(
            self._updates.optimizers, self._parameters, self._layout.rooms, self._arena, movable=movable
        )

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


def _buffer_payload(layout: Layout, arena: memoryview) -> list[list[memoryview]]:
    """For each replica the memory of what it left: its buffers, and which of them changed."""
    sizes = [bytes_in(spec) for spec in layout.buffers]
    return [
        [arena[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        + [arena[layout.changed + replica * len(sizes) :][: len(sizes)]]
        for replica, offsets in enumerate(layout.left)
        if sizes
    ]


def _address(tensor: torch.Tensor) -> int:
    """Of its storage; 0 for what has none of the usual kind."""
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return tensor.untyped_storage().data_ptr() if plain else 0


def _shallow(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _raw(size: int) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return (size,), (1,), torch.uint8
