"""Simulated memory of a host: what a process writes becomes visible to the others later, in an order that is drawn.

Every access is a point at which others may act. A process sees its own writes at once. They become visible to the
others later: in the order in which they were made (x86), or with ``weak`` in any order between two calls of ``order``
(as ARM allows). With ``weak`` a read may also have been done earlier, as far back as the last ``order``. A word is
written as a whole. Whatever a killed process has written becomes visible. ARM may also do a write before an earlier
read; that is not simulated.

Without a decision, everything is visible at once. ``("late", n)`` at an action makes this one access late: a write
becomes visible ``n`` actions later, a read gives what was there up to ``n`` writes ago.
"""

from __future__ import annotations

import builtins
import pickle
from collections import defaultdict

import numpy

WORD = 8
SPIN_SECONDS = 0.0002  # that a process spins before it looks again though nothing has changed
KEPT = 12  # older values of a word that a late read may give


class Write:
    """What a process has written and others do not see yet."""

    def __init__(self, at, value, due, group):
        self.at, self.value, self.due, self.group = at, value, due, group


class Words:
    """All words of a host, by address. An element of any size has a word of its own."""

    def __init__(self, schedule, *, weak):
        self.schedule, self.weak = schedule, weak
        self.values = defaultdict(int)
        self.watched = {}  # address to what is called when a write there becomes visible
        self.changes = 0
        self._late, self._kind = 0, ""
        self._pending = {}  # of each process that has any
        self._groups = defaultdict(int)  # of each process: how often it has called ``order``
        self._older = defaultdict(list)  # address to (change, value), the newest last
        self._floor, self._met, self._spun = defaultdict(int), defaultdict(dict), {}

    def late(self, count):
        """Make the access at this action late, if there is one that can be."""
        self._late = count if self._kind == "write" or (self._kind and self.weak) else 0
        return bool(self._late)

    def read(self, first, count=1):
        """Some words as the process that is acting sees them."""
        late, process = self._access("read"), self.schedule.process
        own = {write.at: write.value for write in self._pending.get(process, ())}
        if not own and not self.weak:
            return [self.values[at] for at in range(first, first + count)]
        return [own[at] if at in own else self._seen(process, at, late) for at in range(first, first + count)]

    def write(self, at, value):
        """Write a word."""
        late, process = self._access("write"), self.schedule.process
        if late or process in self._pending:
            write = Write(at, value, self.schedule.actions + late, self._groups[process])
            self._pending.setdefault(process, []).append(write)
        else:
            self._show(process, at, value)

    def order(self):
        """What ``shared.memory.order`` promises; x86 promises that anyhow."""
        self.schedule.check()
        process = self.schedule.process
        self._groups[process] += 1
        self._floor[process] = self.changes

    def fence(self):
        """What ``shared.memory.fence`` promises, and what a round trip through the kernel does."""
        self.schedule.pause()
        self.drain(self.schedule.process)
        self.order()

    def drain(self, process):
        """Everything that a process has written becomes visible."""
        for write in self._pending.pop(process, ()):
            self._show(process, write.at, write.value)

    def spin(self):
        """``sched_yield`` in a loop: let others act until something has changed since the last time."""
        process = self.schedule.process
        since = self._spun.get(process, -1)
        self.schedule.wait(lambda: self.changes != since, SPIN_SECONDS)
        self._settle()
        self._spun[process] = self.changes

    def _access(self, kind):
        self._kind, self._late = kind, 0
        self.schedule.pause()
        late, self._late, self._kind = self._late, 0, ""
        if self._pending:
            self._settle()
        return late

    def _settle(self):
        """What is due becomes visible."""
        now = self.schedule.actions
        for process, writes in list(self._pending.items()):
            kept, waiting = [], set()
            for write in writes:
                ordered = kept and (not self.weak or kept[0].group < write.group or write.at in waiting)
                if ordered or write.due > now:
                    kept.append(write)
                    waiting.add(write.at)
                else:
                    self._show(process, write.at, write.value)
            if kept:
                self._pending[process] = kept
            else:
                del self._pending[process]

    def _show(self, process, at, value):
        self.changes += 1
        if self.weak:
            older = self._older[at]
            older.append((self.changes, value))
            del older[:-KEPT]
            self._met[process][at] = self.changes
        self.values[at] = value
        if at in self.watched:
            self.watched[at](value)

    def _seen(self, process, at, late):
        """A word as of now, or of some writes ago, but not of before ``order``, nor older than what was seen."""
        older = self._older.get(at)
        if not older:
            return self.values[at]
        index, met = len(older) - 1, self._met[process]
        oldest = max(self._floor[process], met.get(at, 0))
        while late and index > 0 and older[index][0] > oldest:
            index, late = index - 1, late - 1
        if late and older[0][0] > oldest and len(older) < KEPT:
            return 0  # as it was at first
        met[at] = max(met.get(at, 0), older[index][0])
        return older[index][1]


class Cells:
    """A stretch of simulated memory, used as ``mmap``, ``memoryview`` and numpy arrays are."""

    __slots__ = ("base", "count", "readonly", "size", "words")

    def __init__(self, words, base, count, size=1, readonly=False):
        self.words, self.base, self.count, self.size, self.readonly = words, base, count, size, readonly

    def __len__(self):
        return self.count

    def __getitem__(self, key):
        if isinstance(key, int):
            assert 0 <= key < self.count
            return self.words.read(self.base + key * self.size)[0]
        start, stop, _ = key.indices(self.count)
        return Cells(self.words, self.base + start * self.size, max(0, stop - start), self.size, self.readonly)

    def __setitem__(self, key, value):
        if self.readonly:
            raise TypeError("cannot modify read-only memory")
        if isinstance(key, int):
            assert 0 <= key < self.count
            return self.words.write(self.base + key * self.size, value)
        start, stop, _ = (slice(None) if key is Ellipsis else key).indices(self.count)
        for at, one in zip(range(start, stop), value, strict=True):
            self.words.write(self.base + at * self.size, one)
        return None

    def __iter__(self):
        return (self[at] for at in range(self.count))

    def __bytes__(self):
        return bytes(self.tolist())

    def tolist(self):
        """All elements, read at once."""
        if self.size == 1:
            return self.words.read(self.base, self.count)
        return [self.words.read(self.base + at * self.size)[0] for at in range(self.count)]

    def tobytes(self):
        """Something that is equal as long as nothing changes."""
        return repr([self.words.values[self.base + at * self.size] for at in range(self.count)]).encode()

    def cast(self, code):
        """The same stretch with elements of another size."""
        size = 1 if code == "B" else WORD
        return Cells(self.words, self.base, self.count * self.size // size, size, self.readonly)

    def toreadonly(self):
        """The same stretch, not to be written."""
        return Cells(self.words, self.base, self.count, self.size, True)

    def sum(self):
        """The sum of all elements."""
        return builtins.sum(self.tolist())


class Memory:
    """In place of ``shared.memory.Memory``: it is its own descriptor."""

    def __init__(self, words, number):
        self.words, self.size, self._base = words, 0, (number + 1) << 32

    @property
    def fd(self):
        """What workers inherit."""
        return self

    def grow(self, size):
        """Make it at least as large."""
        self.size = max(self.size, size)

    def map(self, *, private=False):
        """All of it."""
        return Cells(self.words, self._base, self.size)

    def read(self, size):
        """What ``write`` wrote; it lies in one word."""
        return self.words.read(self._base)[0]

    def write(self, content):
        """Put ``content`` at the beginning."""
        self.words.write(self._base, content)

    def close(self):
        """Nothing is held."""


def pack(thing, memory, reducer=None):
    """In place of ``serialization.pack``."""
    memory.write(pickle.dumps(thing))
    return 0


def unpack(memory):
    """In place of ``serialization.unpack``."""
    content = memory.read(0)
    return pickle.loads(content) if isinstance(content, bytes) else content  # noqa: S301  pickled in this process


def viewed(memory):
    """In place of ``memoryview``."""
    return memory if isinstance(memory, Cells) else builtins.memoryview(memory)


class Numpy:
    """In place of numpy, where it makes arrays over memory."""

    def __getattr__(self, name):
        return getattr(numpy, name)

    @staticmethod
    def frombuffer(memory, dtype, count, offset):
        """An array of words."""
        count = count // WORD if dtype is numpy.uint8 else count
        return Cells(memory.words, memory.base + offset, count, WORD)
