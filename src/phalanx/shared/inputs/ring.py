"""What a reader writes of the memory that it shares with those who compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from phalanx.shared.inputs import AHEAD, BYTES, OFFSET, TAG, Inputs, claimed, ready
from phalanx.shared.memory import fence, order


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
        self._size = inputs.ring_bytes
        self._begin = inputs.begin + number * self._size
        self._held: deque[tuple[int, int, int, int]] = deque()  # step, replica, first byte, the one after the last
        self._next = 0
        for step in range(AHEAD):  # of the reader whose place this one takes
            for replica in hosted:
                entry = inputs.entry(step, replica)
                tag = inputs.words[entry + TAG]
                if tag and inputs.owner((tag - 1) // 2, replica) == number:
                    inputs.words[entry + TAG] = 0
        order()

    def mine(self, step: int) -> list[int]:
        """The replicas of a step whose shares this reader reads."""
        return [replica for replica in self._hosted if self._inputs.owner(step, replica) == self._number]

    def begun(self) -> int:
        """The first step that nobody has begun."""
        return max(self._inputs.at(replica) for replica in self._hosted)

    def may_claim(self, step: int) -> bool:
        """Whether there is an entry for this step."""
        return step - self.begun() < AHEAD - 2

    def claim(self, step: int, replica: int) -> bool:
        """Say that this share is being read; False if somebody who computes it has come first."""
        words, entry = self._inputs.words, self._inputs.entry(step, replica)
        words[entry + TAG] = claimed(step)
        fence()
        if self._inputs.at(replica) <= step:
            return True
        words[entry + TAG] = 0
        return False

    def give_up(self, step: int, replica: int) -> None:
        """Leave a share to who computes it: reading it raised, say, which is to happen there."""
        self._inputs.words[self._inputs.entry(step, replica) + TAG] = 0

    def place(self, size: int) -> int | None:
        """Where so many bytes may be put now; None if what lies there is still needed."""
        while self._held and self._inputs.at(self._held[0][1]) > self._held[0][0] + 1:
            step, replica, *_ = self._held.popleft()
            entry = self._inputs.entry(step, replica)
            if self._inputs.words[entry + TAG] == ready(step):
                self._inputs.words[entry + TAG] = 0
                order()
        first = self._held[0][2] if self._held else None
        if first is None or self._next > first:  # what is free lies behind what is held, and before it
            if self._next + size <= self._size:
                return self._next
            return 0 if size < (self._size if first is None else first) else None
        return self._next if self._next + size < first else None

    def hopeless(self, step: int, replica: int, size: int) -> bool:
        """Whether room for a share is waited for in vain: it is too long, or somebody waits for it and holds others."""
        return size > self._size // 2 or self._inputs.at(replica) > step

    def put(self, step: int, replica: int, start: int, pieces: Sequence[memoryview | bytes]) -> None:
        """Put a share there; from now on it can be taken."""
        words, entry, offset = self._inputs.words, self._inputs.entry(step, replica), self._begin + start
        end = offset
        for piece in pieces:
            self._inputs.bytes[end : end + len(piece)] = piece
            end += len(piece)
        words[entry + OFFSET], words[entry + BYTES] = offset, end - offset
        order()
        words[entry + TAG] = ready(step)
        self._next = end - self._begin
        self._held.append((step, replica, start, self._next))
