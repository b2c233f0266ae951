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
from collections import defaultdict, namedtuple

import numpy

WORD = 8
SPIN_SECONDS = 0.0002  # that a process spins before it looks again though nothing has changed
KEPT = 12  # older values of a word that a late read may give
Write = namedtuple("Write", "process at value due group")  # what a process has written and others do not see yet


class Words:
    """All words of a host, by address. An element of any size has a word of its own."""

    def __init__(self, schedule, *, weak):
        self.schedule, self.weak = schedule, weak
        self.values, self.changes = defaultdict(int), 0
        self._pending, self._late, self._delayable = [], 0, False
        self._groups, self._spun = defaultdict(int), {}  # of each process: calls of ``order``; changes when it spun
        self._older = defaultdict(list)  # address to (change, value), the newest last
        self._floor, self._met = defaultdict(int), defaultdict(dict)  # the oldest change that a read may go back to

    def late(self, count):
        """Make the access at this action late, if there is one that can be."""
        self._late = count if self._delayable else 0
        return self._late > 0

    def read(self, addresses):
        """Some words as the process that is acting sees them."""
        late, process = self._access(self.weak), self.schedule.process
        if not self._pending and not self.weak:
            return [self.values[at] for at in addresses]
        own = {write.at: write.value for write in self._pending if write.process == process}
        return [own[at] if at in own else self._seen(process, at, late) for at in addresses]

    def write(self, at, value):
        """Write a word."""
        late, process = self._access(True), self.schedule.process
        if late or (self._pending and any(each.process == process for each in self._pending)):
            self._pending.append(Write(process, at, value, self.schedule.actions + late, self._groups[process]))
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
        for write in self._pending:
            if write.process == process:
                self._show(write.process, write.at, write.value)
        self._pending = [write for write in self._pending if write.process != process]

    def spin(self):
        """``sched_yield`` in a loop: let others act until something has changed since the last time."""
        process = self.schedule.process
        since = self._spun.get(process, -1)
        self.schedule.wait(lambda: self.changes != since, SPIN_SECONDS)
        self._settle()
        self._spun[process] = self.changes

    def _access(self, delayable):
        """Others may act; returns by how much the access is late."""
        self._delayable = delayable
        self.schedule.pause()
        late, self._late, self._delayable = self._late, 0, False
        if self._pending:
            self._settle()
        return late

    def _settle(self):
        """What is due becomes visible."""
        writes, self._pending = self._pending, []
        for write in writes:
            before = [each for each in self._pending if each.process == write.process]
            free = all(self.weak and each.group == write.group and each.at != write.at for each in before)
            if free and write.due <= self.schedule.actions:
                self._show(write.process, write.at, write.value)
            else:
                self._pending.append(write)

    def _show(self, process, at, value):
        self.changes += 1
        if self.weak:
            older = self._older[at]
            older.append((self.changes, value))
            del older[:-KEPT]
            self._met[process][at] = self.changes
        self.values[at] = value

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

    __slots__ = ("addresses", "readonly", "words")

    def __init__(self, words, addresses, readonly=False):
        self.words, self.addresses, self.readonly = words, addresses, readonly

    def __len__(self):
        return len(self.addresses)

    def __getitem__(self, key):
        at = self.addresses[key]
        return self.words.read((at,))[0] if isinstance(at, int) else Cells(self.words, at, self.readonly)

    def __setitem__(self, key, value):
        if self.readonly:
            raise TypeError("cannot modify read-only memory")
        at = self.addresses[slice(None) if key is Ellipsis else key]
        if isinstance(at, int):
            self.words.write(at, value)
        else:
            for each, one in zip(at, value, strict=True):
                self.words.write(each, one)

    def __iter__(self):
        return (self.words.read((at,))[0] for at in self.addresses)

    def __bytes__(self):
        return bytes(self.tolist())

    def tolist(self):
        """All elements; bytes are read at once."""
        return self.words.read(self.addresses) if self.addresses.step == 1 else list(self)

    def tobytes(self):
        """Something that is equal as long as nothing changes."""
        return [self.words.values[at] for at in self.addresses]

    def cast(self, code):
        """The same stretch with elements of another size."""
        step = 1 if code == "B" else WORD
        return Cells(self.words, range(self.addresses.start, self.addresses.stop, step), self.readonly)

    def toreadonly(self):
        """The same stretch, not to be written."""
        return Cells(self.words, self.addresses, True)

    def sum(self):
        """The sum of all elements."""
        return sum(self.tolist())


class Memory:
    """In place of ``shared.memory.Memory``: it is its own descriptor."""

    def __init__(self, words, number):
        self.fd, self.words, self.size, self._base = self, words, 0, (number + 1) << 32

    def grow(self, size):
        """Make it at least as large."""
        self.size = max(self.size, size)

    def map(self, *, private=False):
        """All of it."""
        return Cells(self.words, range(self._base, self._base + self.size))

    def read(self, size):
        """What ``write`` wrote; it lies in one word."""
        return self.words.read((self._base,))[0]

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
    return pickle.loads(memory.read(0))  # noqa: S301  pickled in this process


def viewed(memory):
    """In place of ``memoryview``."""
    return memory if isinstance(memory, Cells) else builtins.memoryview(memory)


def frombuffer(memory, dtype, count, offset):
    """In place of that of numpy: an array of words."""
    return memory[offset:][: count * numpy.dtype(dtype).itemsize].cast("q")
