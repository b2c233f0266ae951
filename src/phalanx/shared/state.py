"""A run's state in an arena: as one worker works with it, and as the caller's process fills and reads it.

Memory is copied and added up here as bytes; arrays are the framework's, which makes them over arena memory.

Weights that no update writes are held once for all processes of a run. They lie in a memory that nobody writes after
the run's start, so it is also what a snapshot would hold of them. Each process maps it for itself: what user code
writes there is seen by that process alone.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from phalanx.seams import Framework, Sharing
from phalanx.shared.layout import WORD, Layout
from phalanx.shared.memory import Memory, give_back

GROUP = 256 << 20  # bytes that are copied before their old memory is given back


class FrozenWeights:
    """The storages that were frozen when the run began, as one process sees them.

    A weight may get a gradient later all the same. Its owner then copies it to its place in the arena before the
    update, and notes there which step that was: in the state of an earlier step it is as it was at the start.

    Parameters
    ----------
    sharing : Sharing
    layout : Layout
    arena : mmap.mmap
    memory : Memory
        Where they lie; not mapped if nothing is frozen.
    owned : sequence of int
        The parameters that this process updates.
    """

    def __init__(
        self, sharing: Sharing, layout: Layout, arena: mmap.mmap, memory: Memory, owned: Sequence[int] = ()
    ) -> None:
        self._sharing = sharing
        self._layout = layout
        self._arena = arena
        self._memory = memory
        self._base = memory.map(private=True) if layout.frozen else arena
        self._owned = [index for index in owned if layout.contents.storage_of[index] in layout.frozen]
        self._thawed = np.frombuffer(arena, np.int64, len(layout.contents.storages), layout.thawed)
        self._own: set[int] | None = None  # storages that are mapped from the arena in this process

    def resting(self, number: int) -> bool:
        """Whether a storage is, in the newest state, as it was at the start."""
        return number in self._layout.frozen and not self._thawed[number]

    def enter(self, step: int) -> None:
        """Map each storage where it lies before ``step``; storages that this process thawed later are frozen again."""
        if not self._layout.frozen:
            return
        flags = self._thawed.tolist()
        for index in self._owned:
            number = self._layout.contents.storage_of[index]
            if flags[number] > step:
                self._thawed[number] = 0
        own = {number for number, thawed in enumerate(flags) if 0 < thawed <= step}
        if own != self._own:
            first, before = self._own is None, self._own or set[int]()
            self._own = own
            back = self._layout.frozen.keys() - own if first else before - own
            self._sharing.move(self._layout, {number: self.place(number) for number in own - before})
            self._sharing.move(self._layout, {number: self.place(number) for number in back}, stay=first)

    def thaw(self, step: int, gradient: Sequence[Any]) -> None:
        """Before the update of ``step``: copy weights that it writes for the first time to their place in the arena."""
        for index in self._owned:
            number = self._layout.contents.storage_of[index]
            if gradient[index] is not None and not self._thawed[number]:
                home, base = self._layout.weights[number], self._layout.frozen[number]
                self._stretch(self._arena, home, number)[:] = self._stretch(self._base, base, number)
                # The word says from which state on the weight lies in the arena. A plain flag would not do: when the
                # update of this step is taken back, the weight has to be read from the base again. `enter` compares
                # the word with the step, and resets it in the worker that owns the weight. So `Worker.take` enters a
                # step before it restores the snapshot: `Shard._kept` then leaves out what was frozen. The copy is
                # made in shared memory. So this has to come in the stage UPDATING, which recovery takes back. Workers
                # read the word of another owner, and never write it. Not covered: R = 1, optimizers from elsewhere or
                # with hooks, devices and jax. Nothing is frozen there.
                self._thawed[number] = step + 1
        self.enter(step + 1)

    def fill(self, weights: list[Any]) -> None:
        """At the start: move this process's storages to memory that all share; drops their bytes from ``weights``."""
        shared = self._memory.map() if self._layout.frozen else self._arena
        self._own, places = set(), dict[int, tuple[mmap.mmap, int]]()
        pending = list(self._layout.frozen)
        while pending:
            number = pending.pop()
            self._stretch(shared, self._layout.frozen[number], number)[:] = weights[number]
            weights[number], places[number] = None, self.place(number)
            if not pending or sum(self._layout.contents.storages[each] for each in places) >= GROUP:
                self._sharing.move(self._layout, places, stay=True)
                places.clear()
                give_back()

    def renew(self, weights: Sequence[np.ndarray]) -> None:
        """Undo writes to this process's frozen ``weights``: no worker computed with those."""
        if self._layout.frozen:
            self._base.madvise(mmap.MADV_DONTNEED)
        for number, at in self._layout.frozen.items():
            base = self._stretch(self._base, at, number)
            if not np.array_equal(weights[number], base):  # what is elsewhere may be read-only
                weights[number][:] = base

    def place(self, number: int) -> tuple[mmap.mmap, int]:
        """Where a storage lies in this process; each begins a page, or at a multiple of 64 bytes."""
        resting = number in self._layout.frozen and number not in (self._own or ())
        return (self._base, self._layout.frozen[number]) if resting else (self._arena, self._layout.weights[number])

    def _stretch(self, memory: mmap.mmap, offset: int, number: int) -> np.ndarray:
        return np.frombuffer(memory, np.uint8, self._layout.contents.storages[number], offset)


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
    local : SharedState
        The framework's own.
    came : sequence of sequence
        For each replica the buffers that it left, wherever it ran; what did not change may be anything.
    """

    def __init__(self, sharing: Sharing, layout: Layout, arena: mmap.mmap, base: Memory, worker: int) -> None:
        self._arrays = sharing.arrays
        self.frozen = FrozenWeights(sharing, layout, arena, base, layout.owned(worker))
        self.local = sharing.open(layout, arena, worker)
        self._layout = layout
        self._arena = arena
        self._worker = worker
        self._storages = [number for number, keeper in enumerate(layout.keepers) if keeper == worker]
        self._state = layout.kept(worker)
        self._present = memoryview(arena)[layout.present :]
        self._absent: list[int] = []  # pieces of optimizer state that no update has made yet
        self._changed = memoryview(arena)[layout.changed :]
        self._copies = memoryview(arena)[layout.snapshot.present :]
        memory, sizes = memoryview(arena), [spec.nbytes for spec in layout.contents.buffers]
        self.buffer_payload = [
            [memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
            + [self._changed[replica * len(sizes) :][: len(sizes)]]
            for replica, offsets in enumerate(layout.left)
            if sizes
        ]
        self.came: Sequence[Sequence[Any]] = [
            [self._arrays.view(arena, *pair) for pair in zip(offsets, layout.contents.buffers, strict=True)]
            for offsets in layout.left
        ]

    @property
    def weights(self) -> list[np.ndarray]:
        """The weights that it owns, as words."""
        sizes = [self._layout.contents.storages[number] for number in self._storages]
        places = zip(map(self.frozen.place, self._storages), sizes, strict=True)
        return [np.frombuffer(memory, np.int64, -(-size // WORD), at) for (memory, at), size in places]

    def checksum(self, framework: Framework, step: int) -> int:
        """Of the weights before ``step`` that this worker owns, which its counterparts on other hosts have, too."""
        return int(np.array([weights.sum() for weights in self.weights], np.int64).sum())  # modulo 2**64

    def leave(self, replica: int, buffers: Sequence[Any]) -> None:
        """Publish the buffers that a replica left, where they differ from the step's start."""
        for number in self._note(replica, buffers):
            self.came[replica][number][...] = buffers[number]

    def _note(self, replica: int, buffers: Sequence[Any]) -> list[int]:
        """Say which buffers a replica changed; returns their numbers."""
        flags = [value is not start for value, start in zip(buffers, self.local.starts, strict=True)]
        first = replica * len(flags)
        self._changed[first : first + len(flags)] = bytes(flags)
        return [number for number, changed in enumerate(flags) if changed]

    def left(self, replica: int) -> list[Any]:
        """The buffers that a replica changed, and the step's start in place of others."""
        starts, came = self.local.starts, self.came[replica]
        flags = self._changed[replica * len(starts) :][: len(starts)]
        return [value if changed else start for value, start, changed in zip(came, starts, flags, strict=True)]

    def settle(self) -> None:
        """After an update: move optimizer state that the update made into the arena."""
        arrays = self.local.made(self._absent) if self._absent else {}
        if arrays:
            homes = {piece: self._home(piece) for piece in arrays}
            for piece, home in homes.items():
                home[...] = arrays[piece]
            self.local.adopt(homes, more=True)
            for piece in arrays:
                self._present[piece] = 1
            self._absent = [piece for piece in self._absent if piece not in arrays]

    def forget(self) -> None:
        """From now on all optimizer state is described, and none is in the arena."""
        self._absent = []
        for piece in self._state:
            self._present[piece] = 0

    def state(self) -> dict[str, Any]:
        """What of the state is not weights or buffers, as far as this worker owns it; can be pickled."""
        return dict(zip(("foreign", "options"), self.local.rest(), strict=True))

    def take(self, foreign: Any, options: Any) -> None:
        """Continue from what lies in the arena, from optimizer state without a place there, and from options."""
        self.local.take(foreign, options)
        self._adopt()

    def save(self) -> int:
        """Copy what this worker owns into the snapshot; returns the checksum of that.

        The sum of words is a checksum at the speed of memory: CRC-32 takes ten times as long as the copy. It changes
        with any one bit.
        """
        for piece in self._state:
            self._copies[piece] = self._present[piece]
        return self._copied(back=False)

    def restore(self) -> int:
        """Copy the snapshot back; returns its checksum."""
        checksum = self._copied(back=True)
        for piece in self._state:
            self._present[piece] = self._copies[piece]
        self._adopt()
        return checksum

    def _copied(self, *, back: bool) -> int:
        """Copy into the snapshot, or back; returns the checksum of that, modulo 2**64, as numpy adds."""
        sums: list[Any] = [sum(self._copies[piece] for piece in self._state)]
        for home, copy in self._kept():
            target, source = (home, copy) if back else (copy, home)
            target[:] = source
            sums.append(copy.sum())
        return int(np.array(sums, np.int64).sum())

    def _adopt(self) -> None:
        """Take the optimizer state that is in the arena, and no other."""
        self.local.adopt({piece: self._home(piece) for piece in self._state if self._present[piece]})
        self._absent = [piece for piece in self._state if not self._present[piece]]

    def _home(self, piece: int) -> Any:
        offset, spec = self._layout.state[self._worker][piece], self._layout.contents.state[piece].spec
        return self._arrays.view(self._arena, offset, spec)

    def _kept(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What the snapshot holds of this worker's state, with the copies, as words."""
        layout, contents = self._layout, self._layout.contents
        weights, starts, state, _ = layout.snapshot
        live = [number for number in self._storages if not self.frozen.resting(number)]
        pieces = [(layout.weights[number], weights[number], contents.storages[number]) for number in live]
        homes, copies = layout.state[self._worker], state[self._worker]
        there = [piece for piece in self._state if self._copies[piece]]  # there was then, which may not be so now
        pieces += [(homes[piece], copies[piece], contents.state[piece].spec.nbytes) for piece in there]
        if self._worker == 0:  # it settles the buffers
            sizes = [spec.nbytes for spec in contents.buffers]
            pieces += zip(layout.starts, starts, sizes, strict=True)
        for offset, copy, size in pieces:
            count = -(-size // WORD)
            yield np.frombuffer(self._arena, np.int64, count, offset), np.frombuffer(self._arena, np.int64, count, copy)


class CopiedShard(Shard):
    """The part of a worker that has the whole state, on a device of its own, beside the arena.

    It writes what it owns to the arena when a snapshot is taken, or the caller asks. Buffers that replicas left go from
    device to device; the arena says which of them changed. Takes the parameters of ``Shard``.

    Attributes
    ----------
    mine : dict
        Buffers that this worker's replicas left, by replica.
    """

    def __init__(self, sharing: Sharing, layout: Layout, arena: mmap.mmap, base: Memory, worker: int) -> None:
        super().__init__(sharing, layout, arena, base, worker)
        self.buffer_payload = [row[-1:] for row in self.buffer_payload]
        self._mirror = Mirror(sharing, layout, arena, base)
        self.mine: dict[int, Sequence[Any]] = {}

    def changed(self) -> np.ndarray:
        """Flags of all replicas and buffers: whether that replica wrote that buffer."""
        replicas, count = len(self._layout.left), len(self._layout.contents.buffers)
        flags = np.frombuffer(self._arena, np.uint8, replicas * count, self._layout.changed)
        return flags.reshape(replicas, count).astype(bool)

    @property
    def weights(self) -> list[np.ndarray]:
        self._mirror.put(self._worker)
        return super().weights

    def checksum(self, framework: Framework, step: int) -> int:
        """Of all weights, and of buffers; computed on the device, of which one number for each tensor is read."""
        weights = framework.export(step, copy=False, digest=False).params
        return framework.arithmetic.checksum([*weights.values(), *self.local.starts])

    def leave(self, replica: int, buffers: Sequence[Any]) -> None:
        """Say which of them differ from the step's start, and keep them for the exchange."""
        self._note(replica, buffers)
        self.mine[replica] = buffers

    def settle(self) -> None:
        """Optimizer state stays where the update made it."""

    def state(self) -> dict[str, Any]:
        self._mirror.put(self._worker)
        return super().state()

    def whole(self) -> dict[str, Any]:
        """Write all of the state to the arena, for other workers; returns what has no place there."""
        return self._mirror.put()

    def take(self, foreign: Any, options: Any) -> None:
        self.local.take(foreign, options)
        self.load()

    def load(self) -> None:
        """Continue from what lies in the arena."""
        self._mirror.load(self._worker)

    def save(self) -> int:
        self._mirror.put(self._worker)
        return super().save()

    def _adopt(self) -> None:
        """What others restore is not there yet."""


class Mirror:
    """The same arena seen from a process whose framework keeps a state of its own: the caller's, as a rule.

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
        self._looks: dict[Any, Any] = {}  # they show this arena, so they go with it

    def put(self, worker: int | None = None) -> dict[str, Any]:
        """Copy the state into the arena, or what a worker keeps of it; returns what describes the rest."""
        layout, whole = self._layout, worker is None
        mine = [whole or keeper == worker for keeper in layout.keepers]
        weights = self._own.weights(None if whole else [number for number, own in enumerate(mine) if own])
        for weight, shared in zip(weights, itertools.compress(self._weights(), mine), strict=True):
            if shared is not None:
                shared[:] = weight
        for start, shared in zip(self._own.starts, self._starts(), strict=True) if not worker else ():
            shared[...] = start
        pieces = range(len(layout.contents.state)) if worker is None else layout.kept(worker)
        state = self._own.made(pieces)
        for piece in pieces:
            self._arena[layout.present + piece] = piece in state
            rows = layout.state if worker is None else [layout.state[worker]]
            for offset in {row[piece] for row in rows} if piece in state else ():
                self._piece(piece, offset)[...] = state[piece]
        return dict(zip(("foreign", "options"), self._own.rest(), strict=True))

    def load(self, worker: int = 0, layout: Any = None) -> None:
        """Take the arrays that lie in the arena; optimizer state from the places of a worker, in a snapshot or not."""
        rows, present = (layout or self._layout).state, (layout or self._layout).present
        self._own.take_arrays(self._weights(), self._starts())
        there = [piece for piece in range(len(rows[worker])) if self._arena[present + piece]]
        self._own.adopt({piece: self._piece(piece, rows[worker][piece]) for piece in there})

    def get(self, states: Sequence[dict[str, Any]], *, saved: bool) -> None:
        """Copy the state out of the arena, with what the workers described.

        Optimizer state may stay where it is; ``saved``: in the snapshot, which is not written meanwhile.
        """
        self._frozen.renew(self._own.weights())
        self._own.take(states[0]["foreign"], states[0]["options"])
        self.load(layout=self._layout.snapshot if saved else None)

    def look(self) -> Any:
        """The state in the arena, exported, without a copy where the framework's arrays may be written."""
        resting = [number for number in self._layout.frozen if self._frozen.resting(number)]
        return self._sharing.look(self._layout, self._arena, resting, self._looks)

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
