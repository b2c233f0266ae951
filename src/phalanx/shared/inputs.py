"""Shares of steps that were read ahead, in memory that readers share with the processes that take them.

A share of a step always has the same reader: (step R + replica) modulo the number of readers. No process depends on it.
One that computes a replica says so, and waits for a share that is being read. It reads the share itself if no reader
has begun, or if the reader has ended. A reader that hangs for a minute is killed. Each word has one writer. A reader's
bytes go round in a ring, and a full ring holds the reader back.

Layout, in words of 64 bits: how many readers there are, the step that each replica is at, pids of readers, and for each
of the next steps and each replica where its samples lie. After these, the rings.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence

from phalanx.shared.memory import ALIGNMENT, Memory, aligned, fence, order

MOST = 64  # readers
AHEAD = 32  # steps for which there are entries; readers stay two steps below that
RINGS_BYTES = 256 << 20  # of all readers together
FIRST_NAP, LONGEST_NAP, LOOK_SECONDS = 0.00002, 0.0003, 0.05
HANGING_SECONDS = 60.0  # that a share may be waited for
COUNT, AT = 0, 1  # words: how many readers there are; where the replicas' own begin
TAG, OFFSET, BYTES, ENTRY = 0, 1, 2, 3
GONE = -1  # instead of the pid of a reader that has ended; 0 of one that has not begun


def claimed(step: int) -> int:
    """The tag of a share that is being read."""
    return 2 * step + 1


def ready(step: int) -> int:
    """The tag of a share that can be taken."""
    return 2 * step + 2


class Inputs:
    """The memory, as every process sees it.

    Parameters
    ----------
    memory : Memory
        Zeros, at first.
    replicas : int
        R.
    """

    def __init__(self, memory: Memory, replicas: int) -> None:
        self._replicas = replicas
        self._pids = AT + replicas
        self._entries = self._pids + MOST
        words = self._entries + ENTRY * AHEAD * replicas
        self.begin = -(-8 * words // ALIGNMENT) * ALIGNMENT
        memory.grow(self.begin + RINGS_BYTES)
        self.bytes = memoryview(memory.map())
        self.words = self.bytes[: 8 * words].cast("q")

    @property
    def readers(self) -> int:
        """How many readers there are."""
        return self.words[COUNT]

    @readers.setter
    def readers(self, count: int) -> None:
        """Set once, and to 0 if they are given up."""
        self.words[COUNT] = count

    def owner(self, step: int, replica: int) -> int:
        """The reader of a share; -1 if readers have been given up."""
        readers = self.readers
        return (step * self._replicas + replica) % readers if readers else -1

    def entry(self, step: int, replica: int) -> int:
        """The index of the first word of a share's entry."""
        return self._entries + ENTRY * (step % AHEAD * self._replicas + replica)

    def at(self, replica: int) -> int:
        """The step after the last one in which a replica's share was taken."""
        return self.words[AT + replica]

    def note_pid(self, reader: int, pid: int) -> None:
        """The process that starts readers notes the pid of one, or that it has ended."""
        self.words[self._pids + reader] = pid

    def take(self, step: int, replica: int) -> memoryview | None:
        """A copy of a share's bytes; None if the caller has to read the share itself.

        It can be taken again until that of the next step is.
        """
        words, entry = self.words, self.entry(step, replica)
        words[AT + replica] = step + 1  # what lies before this step may be overwritten
        if not self.readers:
            return None
        fence()  # either the reader sees that, and leaves the share alone, or its claim is seen here
        nap = FIRST_NAP
        began = looked = time.monotonic()
        while words[entry + TAG] == claimed(step):
            time.sleep(nap)
            nap = min(LONGEST_NAP, 2 * nap)
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                if self._gone(self.owner(step, replica), hanging=looked - began > HANGING_SECONDS):
                    break
        order()
        if words[entry + TAG] != ready(step):
            return None
        offset = words[entry + OFFSET]
        copy = aligned(self.bytes[offset : offset + words[entry + BYTES]])
        order()
        return copy if words[entry + TAG] == ready(step) else None  # not overwritten meanwhile

    def _gone(self, reader: int, *, hanging: bool) -> bool:
        pid = GONE if reader < 0 else self.words[self._pids + reader]
        if pid <= 0:
            return pid == GONE
        try:
            os.kill(pid, signal.SIGKILL if hanging else 0)
        except OSError:
            return True
        return False


class Ring:
    """A reader's own part of the memory, which it alone writes.

    Parameters
    ----------
    inputs : Inputs
    number : int
    hosted : sequence of int
        The replicas that are computed by those who share this memory.
    """

    def __init__(self, inputs: Inputs, number: int, hosted: Sequence[int]) -> None:
        self._inputs, self._number, self._hosted = inputs, number, hosted
        self._size = RINGS_BYTES // inputs.readers // ALIGNMENT * ALIGNMENT
        self._begin = inputs.begin + number * self._size
        self._held: deque[tuple[int, int, int, int]] = deque()  # step, replica, first byte, the one after the last
        for step in range(AHEAD):  # shares of the reader that this one replaces
            for replica in hosted:
                tag = inputs.words[inputs.entry(step, replica) + TAG]
                if tag and inputs.owner((tag - 1) // 2, replica) == number:
                    self.give_up(step, replica)
        order()

    def mine(self, step: int) -> list[int]:
        """The replicas of a step whose shares this reader reads."""
        return [replica for replica in self._hosted if self._inputs.owner(step, replica) == self._number]

    def begun(self) -> int:
        """The first step that no process has begun."""
        return max(self._inputs.at(replica) for replica in self._hosted)

    def may_claim(self, step: int) -> bool:
        """Whether there is an entry for this step."""
        return step - self.begun() < AHEAD - 2

    def claim(self, step: int, replica: int) -> bool:
        """Say that this share is being read; False if the process that computes it came first."""
        self._inputs.words[self._inputs.entry(step, replica) + TAG] = claimed(step)
        fence()
        if self._inputs.at(replica) <= step:
            return True
        self.give_up(step, replica)
        return False

    def give_up(self, step: int, replica: int) -> None:
        """Leave a share to the process that computes it, say because reading raised: that must happen there."""
        self._inputs.words[self._inputs.entry(step, replica) + TAG] = 0

    def hopeless(self, step: int, replica: int, size: int) -> bool:
        """Whether a share that finds no room now never will: it is too long, or already waited for."""
        return size > self._size or self._inputs.at(replica) > step

    def place(self, size: int) -> int | None:
        """The offset at which ``size`` bytes may be put now; None if what lies there is still needed."""
        while self._held and self._inputs.at(self._held[0][1]) > self._held[0][0] + 1:
            step, replica, *_ = self._held.popleft()
            if self._inputs.words[self._inputs.entry(step, replica) + TAG] == ready(step):
                self.give_up(step, replica)
                order()
        if not self._held:
            return 0 if size <= self._size else None
        first, end = self._held[0][2], self._held[-1][3]
        if end > first:  # what is free lies before what is held, and behind it: memory that was used before comes first
            if size < first and (first > end - first or end + size > self._size):
                return 0
            return end if end + size <= self._size else None
        return end if end + size < first else None

    def put(self, step: int, replica: int, start: int, pieces: Sequence[memoryview | bytes]) -> None:
        """Put a share at ``start``; from now on it can be taken."""
        words, entry, offset = self._inputs.words, self._inputs.entry(step, replica), self._begin + start
        end = offset
        for piece in pieces:
            self._inputs.bytes[end : end + len(piece)] = piece
            end += len(piece)
        words[entry + OFFSET], words[entry + BYTES] = offset, end - offset
        order()
        words[entry + TAG] = ready(step)
        self._held.append((step, replica, start, end - self._begin))
