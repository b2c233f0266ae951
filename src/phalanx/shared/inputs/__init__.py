"""Samples that were read ahead, in memory that readers share with those who compute.

A share of a step is read by one reader, the same wherever the run is: (step R + replica) modulo the number of readers.
Nobody depends on it: whoever computes a replica says so, waits for a share that is being read, and reads it by itself
if nobody has begun, or if the reader is gone. Each word has one writer, but for the one that says who was given up. A
reader's bytes go round in a ring, which is what holds it back.

Layout, in words of 64 bits: head, the step that each replica is at, what reading took there, pids of readers, and for
each of the next ``AHEAD`` steps and each replica where its samples lie. After these, the rings.
"""

from __future__ import annotations

import os
import time

from phalanx.shared.memory import ALIGNMENT, Memory, aligned, fence, order

MOST = 64  # readers
AHEAD = 32  # steps
RINGS_BYTES = 256 << 20  # of all readers together
PATIENCE_SECONDS = 60.0  # that a reader may take for a share, from when somebody waits for it
FIRST_NAP, LONGEST_NAP, LOOK_SECONDS = 0.00002, 0.0003, 0.05
COUNT, GIVEN_UP, HEAD = 0, 1, 2  # how many readers there are; 1 + the number of one that was given up
WALL, PROCESSOR, SHARES, SPENT = 0, 1, 2, 3  # nanoseconds and shares that were read where they are computed
TAG, OFFSET, BYTES, ENTRY = 0, 1, 2, 3


def claimed(step: int) -> int:
    """The tag of a share that is being read."""
    return 2 * step + 1


def ready(step: int) -> int:
    """The tag of a share that can be taken."""
    return 2 * step + 2


class Inputs:
    """The memory, as everybody sees it.

    Parameters
    ----------
    memory : Memory
        Zeros, at first.
    replicas : int
        R.
    """

    def __init__(self, memory: Memory, replicas: int) -> None:
        self._at = HEAD
        self._spent = self._at + replicas
        self._pids = self._spent + SPENT * replicas
        self._entries = self._pids + MOST
        words = self._entries + ENTRY * AHEAD * replicas
        self.begin = -(-8 * words // ALIGNMENT) * ALIGNMENT
        memory.grow(self.begin + RINGS_BYTES)
        self._replicas = replicas
        self.bytes = memoryview(memory.map())
        self.words = self.bytes[: 8 * words].cast("q")

    @property
    def readers(self) -> int:
        """How many there are."""
        return self.words[COUNT]

    @readers.setter
    def readers(self, count: int) -> None:
        """Said once, and 0 where they are given up."""
        self.words[COUNT] = count

    @property
    def ring_bytes(self) -> int:
        """How long each reader's ring is."""
        return RINGS_BYTES // self.readers // ALIGNMENT * ALIGNMENT

    def given_up(self) -> int:
        """A reader that somebody has waited for in vain, told once; -1 if there is none."""
        found = self.words[GIVEN_UP] - 1
        self.words[GIVEN_UP] = 0
        return found

    def owner(self, step: int, replica: int) -> int:
        """The reader of a share; -1 if readers have been given up."""
        readers = self.readers
        return (step * self._replicas + replica) % readers if readers else -1

    def entry(self, step: int, replica: int) -> int:
        """The first word of what is known of a share."""
        return self._entries + ENTRY * (step % AHEAD * self._replicas + replica)

    def at(self, replica: int) -> int:
        """The step of which a replica was read last."""
        return self.words[self._at + replica]

    def note_pid(self, reader: int, pid: int) -> None:
        """Who starts readers says which process is one."""
        self.words[self._pids + reader] = pid

    @property
    def spent(self) -> tuple[int, int, int]:
        """Wall time and processor time, in nanoseconds, of as many shares that were read by those who compute them."""
        found = self.words[self._spent : self._pids]
        return sum(found[WALL::SPENT]), sum(found[PROCESSOR::SPENT]), sum(found[SHARES::SPENT])

    def note_spent(self, replica: int, wall: int, processor: int) -> None:
        """A share was read by who computes it."""
        word = self._spent + SPENT * replica
        self.words[word + WALL] += wall
        self.words[word + PROCESSOR] += processor
        self.words[word + SHARES] += 1

    def take(self, step: int, replica: int) -> memoryview | None:
        """The bytes of a share, for who computes it; None if that has to read it by itself."""
        words, entry = self.words, self.entry(step, replica)
        words[self._at + replica] = step + 1  # what lies before this step may be overwritten
        if not self.readers:
            return None
        fence()  # either the reader sees that, and leaves the share alone, or its claim is seen here
        nap, began = FIRST_NAP, time.monotonic()
        looked = began
        while words[entry + TAG] == claimed(step):
            time.sleep(nap)
            nap = min(LONGEST_NAP, 2 * nap)
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                if not self._worth_waiting(self.owner(step, replica), began):
                    return None
        order()
        if words[entry + TAG] != ready(step):
            return None
        offset, size = words[entry + OFFSET], words[entry + BYTES]
        if size < 0 or not self.begin <= offset <= offset + size <= len(self.bytes):
            return None
        found = aligned(self.bytes[offset : offset + size])
        order()
        return found if words[entry + TAG] == ready(step) else None  # not overwritten meanwhile

    def _worth_waiting(self, reader: int, began: float) -> bool:
        """Whether a reader that has begun lives, and is not late beyond all measure."""
        if reader < 0:
            return False
        if time.monotonic() - began > PATIENCE_SECONDS:
            self.words[GIVEN_UP] = 1 + reader
            return False
        try:
            os.kill(self.words[self._pids + reader], 0)
        except OSError:
            return False
        return self.words[self._pids + reader] != 0
