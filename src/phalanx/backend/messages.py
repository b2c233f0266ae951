"""Messages from one rank to another, through a pipe in shared memory per pair of ranks.

A message may be longer than its pipe: the sender writes on as the receiver reads. Messages of one pair arrive in the
order in which they were sent; one that nobody asked for yet is kept by its tag.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from typing import Any

import torch

from phalanx.backend.memory import GroupMemory
from phalanx.backend.progress import Queue, Steps
from phalanx.errors import UsageError

HEADER = struct.Struct("=qq")  # tag, bytes


def send(memory: GroupMemory, target: int, tag: int, flat: torch.Tensor) -> Steps:
    """Write ``flat``, which is bytes, into the pipe to ``target``."""
    pipe = memory.pipe(memory.rank, target)
    data: Any = flat.numpy()
    for content in (memoryview(HEADER.pack(tag, len(flat))), memoryview(data)):
        remaining = content
        while remaining:
            size = pipe.write(remaining)
            if size:
                memory.moved += 1
                remaining = remaining[size:]
            else:
                yield (target,)


class Inbox:
    """What came from one rank.

    Parameters
    ----------
    memory : GroupMemory
    source : int

    Attributes
    ----------
    name : int
        The rank in the world.
    """

    def __init__(self, memory: GroupMemory, source: int) -> None:
        self.name = memory.names[source]
        self._memory = memory
        self._pipe = memory.pipe(source, memory.rank)
        self._part = bytearray()  # of a message, or of its header
        self._coming: tuple[int, int] | None = None
        self.kept: dict[int, deque[bytearray]] = defaultdict(deque)
        self.queues: dict[int, Queue] = defaultdict(Queue)

    def look(self) -> None:
        """Take out of the pipe what is there."""
        while True:
            need = (HEADER.size if self._coming is None else self._coming[1]) - len(self._part)
            size = self._pipe.read(need, self._part)
            if need and not size:
                return
            self._memory.moved += 1
            if size == need:
                self._whole()

    def queue(self, tag: int) -> Queue:
        """The queue of receives of a tag: the first receive gets the first message."""
        if not self.queues[tag].operations:
            self.queues[tag] = Queue()
        return self.queues[tag]

    def _whole(self) -> None:
        part, self._part = self._part, bytearray()
        if self._coming is None:
            self._coming = HEADER.unpack(part)
        else:
            self.kept[self._coming[0]].append(part)
            self._coming = None


def receive(inboxes: dict[int, Inbox], sources: list[int], tag: int, flat: torch.Tensor) -> Steps:
    """Read the next message of ``tag`` into ``flat``, which is bytes.

    ``sources`` has the rank that sends it. If it is empty, any rank may send it for which no other receive of the tag
    waits; that rank is put there.
    """
    allowed = sources or list(inboxes)
    while True:
        for source in allowed:
            inbox = inboxes[source]
            inbox.look()
            if inbox.kept[tag] and (sources or not inbox.queues[tag].operations):
                sources[:] = [source]
                message = inbox.kept[tag].popleft()
                if len(message) != len(flat):
                    raise UsageError(
                        f"rank {inbox.name} sent {len(message)} bytes, and the tensor to receive them has {len(flat)}; "
                        "make both equal"
                    )
                if message:
                    flat.copy_(torch.frombuffer(message, dtype=torch.uint8))
                return
        yield allowed
