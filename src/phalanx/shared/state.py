"""A run's state in an arena: as one worker works with it, and as the caller's process fills and reads it.

Memory is copied and added up here as bytes; arrays are the framework's, which makes them over arena memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from phalanx.seams import Sharing
from phalanx.shared.buckets import Buckets
from phalanx.shared.frozen import FrozenWeights
from phalanx.shared.layout import WORD, Layout
from phalanx.shared.memory import Memory


class Shard:
    """One worker's part of the state in an arena: it owns some parameters, and their optimizer state.

    Parameters
    ----------
    sharing : Sharing
        The framework's; from here on, its state lies in the arena.
    layout : Layout
    arena : mmap.mmap
    base : Memory
        Where what is frozen lies.
    worker : int

    Attributes
    ----------
    buffer_payload : list of list of memoryview
        For each replica the memory that ``leave`` writes: its buffers, and which of them changed; empty without
        buffers.
    frozen : FrozenWeights
    slots : Buckets
    """

    def __init__(self, sharing: Sharing, layout: Layout, arena: mmap.mmap, base: Memory, worker: int) -> None:
        self._arrays = sharing.arrays
        self.frozen = FrozenWeights(sharing, layout, arena, base, layout.owned(worker))
        self._local = sharing.open(layout, arena, worker)
        self._layout = layout
        self._arena = arena
        self._worker = worker
        self._storages = [number for number, keeper in enumerate(layout.keepers) if keeper == worker]
        self._state = layout.kept(worker)
        self._present = memoryview(arena)[layout.present :]
        self._absent: list[int] = []  # pieces of optimizer state that no update has made yet
        self._changed = memoryview(arena)[layout.changed :]
        self.slots = Buckets(sharing.arrays, self._local, layout, arena, worker)
        self.buffer_payload = _buffer_payload(layout, memoryview(arena))
        self._left = [
            [self._arrays.view(arena, *pair) for pair in zip(offsets, layout.contents.buffers, strict=True)]
            for offsets in layout.left
        ]

    @property
    def weights(self) -> list[np.ndarray]:
        """The weights that it owns, as words."""
        sizes = [self._layout.contents.storages[number] for number in self._storages]
        places = zip(map(self.frozen.place, self._storages), sizes, strict=True)
        return [np.frombuffer(memory, np.int64, -(-size // WORD), at) for (memory, at), size in places]

    def leave(self, replica: int, left: Sequence[Any]) -> None:
        """Publish the buffers that a replica left, where they differ from the step's start."""
        first = replica * len(left)
        for number, (value, start) in enumerate(zip(left, self._local.starts, strict=True)):
            self._changed[first + number] = changed = value is not start
            if changed:
                self._left[replica][number][...] = value

    def left(self, replica: int) -> list[Any]:
        """The buffers that a replica left, wherever it ran."""
        starts = self._local.starts
        first = replica * len(starts)
        pairs = zip(self._left[replica], starts, strict=True)
        return [left if self._changed[first + number] else start for number, (left, start) in enumerate(pairs)]

    def settle(self) -> None:
        """After an update: move optimizer state that it made into the arena."""
        made = self._local.made(self._absent) if self._absent else {}
        if made:
            homes = {piece: self._home(piece) for piece in made}
            for piece, home in homes.items():
                home[...] = made[piece]
            self._local.adopt(homes, more=True)
            for piece in made:
                self._present[piece] = 1
            self._absent = [piece for piece in self._absent if piece not in made]

    def state(self) -> dict[str, Any]:
        """What of the state is not weights or buffers, as far as this worker owns it; can be pickled."""
        return dict(zip(("foreign", "options"), self._local.rest(), strict=True))

    def take(self, foreign: Any, options: Any) -> None:
        """Continue from what lies in the arena, from optimizer state that no place is known for, and from options."""
        self._local.take(foreign, options)
        self._adopt()

    def save(self) -> int:
        """Copy what this worker owns into the snapshot; returns the checksum of that.

        The sum of words is a checksum at the speed of memory: CRC-32 takes ten times as long as the copy. It changes
        with any one bit.
        """
        sums: list[np.int64] = []
        present, copies = self._present, self._flag_copies()
        for piece in self._state:
            copies[piece] = present[piece]
        for home, copy in self._kept(copies):
            copy[:] = home
            sums.append(copy.sum())
        return _total(sums, self._noted(copies))

    def restore(self) -> int:
        """Copy it back; returns the checksum of what was there."""
        sums: list[np.int64] = []
        copies = self._flag_copies()
        for home, copy in self._kept(copies):  # which optimizer state there was then, not now
            sums.append(copy.sum())
            home[:] = copy
        for piece in self._state:
            self._present[piece] = copies[piece]
        self._adopt()
        return _total(sums, self._noted(copies))

    def _flag_copies(self) -> memoryview:
        return memoryview(self._arena)[self._layout.snapshot.present :]

    def _noted(self, flags: memoryview) -> int:
        """What the flags of this worker's pieces add to a checksum."""
        return sum(flags[piece] for piece in self._state)

    def _adopt(self) -> None:
        """Take the optimizer state that is in the arena, and no other."""
        self._local.adopt({piece: self._home(piece) for piece in self._state if self._present[piece]})
        self._absent = [piece for piece in self._state if not self._present[piece]]

    def _home(self, piece: int) -> Any:
        offset, spec = self._layout.state[self._worker][piece], self._layout.contents.state[piece].spec
        return self._arrays.view(self._arena, offset, spec)

    def _live(self) -> list[int]:
        """The storages that it owns, and that lie in the arena."""
        return [number for number in self._storages if not self.frozen.resting(number)]

    def _kept(self, present: memoryview) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All that a snapshot holds of this worker's, with its copy, as words; ``present``: which optimizer state."""
        layout, contents = self._layout, self._layout.contents
        weights, starts, state, _ = layout.snapshot
        pieces = [(layout.weights[number], weights[number], contents.storages[number]) for number in self._live()]
        homes, copies = layout.state[self._worker], state[self._worker]
        there = [piece for piece in self._state if present[piece]]
        pieces += [(homes[piece], copies[piece], contents.state[piece].spec.nbytes) for piece in there]
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
    sharing : Sharing
    layout : Layout
    arena : mmap.mmap
    base : Memory
        Where what is frozen lies; the framework's own moves there.
    """

    def __init__(self, sharing: Sharing, layout: Layout, arena: mmap.mmap, base: Memory) -> None:
        self._frozen = FrozenWeights(sharing, layout, arena, base)
        self._arrays = sharing.arrays
        self._own = sharing.open(layout, arena, None)
        self._frozen.fill(list(self._own.weights()))
        self._layout = layout
        self._arena = arena
        self._sharing = sharing

    def put(self) -> dict[str, Any]:
        """Copy the state into the arena; returns what describes the rest."""
        for mine, shared in zip(self._own.weights(), self._weights(), strict=True):
            if shared is not None:
                shared[:] = mine
        for start, shared in zip(self._own.starts, self._starts(), strict=True):
            shared[...] = start
        layout, pieces = self._layout, range(len(self._layout.contents.state))
        state = self._own.made(pieces)
        for piece in pieces:
            self._arena[layout.present + piece] = piece in state
            for offset in {row[piece] for row in layout.state} if piece in state else ():
                self._piece(piece, offset)[...] = state[piece]
        return dict(zip(("foreign", "options"), self._own.rest(), strict=True))

    def get(self, states: Sequence[dict[str, Any]], *, saved: bool) -> None:
        """Copy the state out of the arena, with what the workers described.

        Optimizer state may stay where it is; ``saved``: in the snapshot, which is not written while the run goes on.
        """
        self._frozen.renew(self._own.weights())
        self._own.take_arrays(self._weights(), self._starts())
        layout = self._layout.snapshot if saved else self._layout
        there = [piece for piece in range(len(layout.state[0])) if self._arena[layout.present + piece]]
        self._own.take(states[0]["foreign"], states[0]["options"])
        self._own.adopt({piece: self._piece(piece, layout.state[0][piece]) for piece in there})

    def look(self) -> Any:
        """What lies in the arena as a state is exported, without a copy where the framework's arrays may be written."""
        resting = [number for number in self._layout.frozen if self._frozen.resting(number)]
        return self._sharing.look(self._layout, self._arena, resting)

    def _piece(self, piece: int, offset: int) -> Any:
        return self._arrays.view(self._arena, offset, self._layout.contents.state[piece].spec)

    def _weights(self) -> list[np.ndarray | None]:
        """The bytes of each storage; None where it is frozen."""
        pairs = enumerate(zip(self._layout.contents.storages, self._layout.weights, strict=True))
        return [
            None if self._frozen.resting(number) else np.frombuffer(self._arena, np.uint8, size, offset)
            for number, (size, offset) in pairs
        ]

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


def _total(sums: Sequence[np.int64], noted: int = 0) -> int:
    """Modulo 2**64, as numpy adds."""
    return int(np.array([*sums, noted], np.int64).sum())
