"""A run's state in an arena: as one worker works with it, and as the caller's process fills and reads it.

Memory is copied and added up here as bytes; arrays are the framework's, which makes them over arena memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from phalanx.seams.sharing import Arrays, CallerState, GradientBuckets, WorkerState
from phalanx.shared.layout import Layout

WORD = 8  # bytes; places are multiples of 64, and what pads them is never written


class Shard:
    """One worker's part of the state in an arena: it owns some parameters, and their optimizer state.

    Parameters
    ----------
    arrays : Arrays
    local : WorkerState
        What the framework keeps in this process.
    layout : Layout
    arena : mmap.mmap
    worker : int

    Attributes
    ----------
    weights : list of (offset, bytes)
        Where the weights that it owns lie in the arena.
    buffer_payload : list of list of memoryview
        For each replica the memory that ``leave`` writes: its buffers, and which of them changed; empty without
        buffers.
    slots : GradientBuckets
    """

    def __init__(self, arrays: Arrays, local: WorkerState, layout: Layout, arena: mmap.mmap, worker: int) -> None:
        self._arrays = arrays
        self._local = local
        self._layout = layout
        self._arena = arena
        self._worker = worker
        self._storages = [number for number, keeper in enumerate(layout.keepers) if keeper == worker]
        self._state = layout.kept(worker)
        self._changed = memoryview(arena)[layout.changed :]
        self.slots: GradientBuckets = local.buckets
        self.weights = [(layout.weights[number], layout.contents.storages[number]) for number in self._storages]
        self.buffer_payload = _buffer_payload(layout, memoryview(arena))
        self._left = [
            [arrays.view(arena, *pair) for pair in zip(offsets, layout.contents.buffers, strict=True)]
            for offsets in layout.left
        ]

    def leave(self, replica: int, left: Sequence[Any]) -> None:
        """Publish the buffers that a replica left, where they differ from the step's start."""
        first = replica * len(left)
        for number, (value, start) in enumerate(zip(left, self._local.starts, strict=True)):
            self._changed[first + number] = changed = value is not start
            if changed:
                self._arrays.write(self._left[replica][number], value)

    def left(self, replica: int) -> list[Any]:
        """The buffers that a replica left, wherever it ran."""
        starts = self._local.starts
        first = replica * len(starts)
        pairs = zip(self._left[replica], starts, strict=True)
        return [left if self._changed[first + number] else start for number, (left, start) in enumerate(pairs)]

    def place_in_arena(self) -> bool:
        """Move optimizer state that this worker owns into the arena, as far as it is not there; True if some was."""
        return self._local.place_in_arena()

    def described(self) -> Any:
        """The optimizer state that this worker owns; can be pickled, and stays true as long as nothing is housed."""
        return self._local.described()

    def state(self) -> dict[str, Any]:
        """What of the state is not weights or buffers, as far as this worker owns it; can be pickled."""
        return {"optimizers": self._local.described(), "options": self._local.options()}

    @property
    def scheduled(self) -> Any:
        """Options after the schedulers' last step, if that cannot be done again from a loss; else None."""
        return self._local.scheduled

    def take(self, optimizers: Sequence[Any], options: Any) -> None:
        """Continue from what was described, earlier descriptions first, and from options."""
        self._local.take(optimizers, options)

    def save(self) -> int:
        """Copy what this worker owns into the snapshot; returns the checksum of that.

        The sum of words is a checksum at the speed of memory: CRC-32 takes ten times as long as the copy. It changes
        with any one bit.
        """
        sums: list[np.int64] = []
        for home, copy in self._kept():
            copy[:] = home
            sums.append(copy.sum())
        return _total(sums)

    def restore(self) -> int:
        """Copy it back, optimizer state as far as it was taken; returns the checksum of what was there."""
        sums: list[np.int64] = []
        for home, copy in self._kept():
            sums.append(copy.sum())
            home[:] = copy
        return _total(sums)

    def _kept(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All that a snapshot holds of this worker's, with its copy, as words."""
        layout, contents = self._layout, self._layout.contents
        weights, starts, state = layout.snapshot
        pieces = [(layout.weights[number], weights[number], contents.storages[number]) for number in self._storages]
        mine, copies = layout.state[self._worker], state[self._worker]
        pieces += [(mine[number], copies[number], self._local.used(number)) for number in self._state]
        if self._worker == 0:  # it settles the buffers
            sizes = [spec.nbytes for spec in contents.buffers]
            pieces += zip(layout.starts, starts, sizes, strict=True)
        for offset, copy, size in pieces:
            count = -(-size // WORD)
            yield np.frombuffer(self._arena, np.int64, count, offset), np.frombuffer(self._arena, np.int64, count, copy)


class Mirror:
    """The same arena seen from the caller's process, whose framework keeps a state of its own.

    Parameters
    ----------
    arrays : Arrays
    own : CallerState
        The framework's state in this process.
    layout : Layout
    arena : mmap.mmap
    """

    def __init__(self, arrays: Arrays, own: CallerState, layout: Layout, arena: mmap.mmap) -> None:
        self._arrays = arrays
        self._own = own
        self._layout = layout
        self._arena = arena

    def put(self) -> dict[str, Any]:
        """Copy the state into the arena; returns what describes the rest."""
        for mine, shared in zip(self._own.weights(), self._weights(), strict=True):
            shared[:] = mine
        for start, shared in zip(self._own.starts, self._starts(), strict=True):
            self._arrays.write(shared, start)
        return {"optimizers": self._own.put_optimizers(), "options": self._own.options()}

    def get(self, states: Sequence[dict[str, Any]], *, saved: bool) -> None:
        """Copy the state out of the arena, with what the workers described.

        Optimizer state that has a place there stays where it is; ``saved``: in the snapshot, which is not written while
        the run goes on.
        """
        self._own.take_weights(self._weights())
        self._own.take_buffers(self._starts())
        self._own.take_optimizers([state["optimizers"] for state in states], states[0]["options"], saved=saved)

    def _weights(self) -> list[np.ndarray]:
        """The bytes of each storage."""
        pairs = zip(self._layout.contents.storages, self._layout.weights, strict=True)
        return [np.frombuffer(self._arena, np.uint8, size, offset) for size, offset in pairs]

    def _starts(self) -> list[Any]:
        pairs = zip(self._layout.starts, self._layout.contents.buffers, strict=True)
        return [self._arrays.view(self._arena, *pair) for pair in pairs]


def _buffer_payload(layout: Layout, arena: memoryview) -> list[list[memoryview]]:
    """For each replica the memory of what it left: its buffers, and which of them changed."""
    sizes = [spec.nbytes for spec in layout.contents.buffers]
    return [
        [arena[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        + [arena[layout.changed + replica * len(sizes) :][: len(sizes)]]
        for replica, offsets in enumerate(layout.left)
        if sizes
    ]


def _total(sums: Sequence[np.int64]) -> int:
    """Modulo 2**64, as numpy adds."""
    return int(np.array(sums, np.int64).sum())
