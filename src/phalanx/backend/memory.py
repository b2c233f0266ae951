"""One group's shared memory: the first rank makes it, the others open it, the kernel frees it when all are gone.

Ranks find each other through the store that torch.distributed gives them. What travels there is JSON; the memory itself
is opened as ``/proc/PID/fd/N``, so it has no name and needs no listener.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pathlib
import select
import socket
import stat
import sys
import time
from collections.abc import Sequence
from typing import Any

from phalanx.errors import UsageError
from phalanx.shared.memory import Memory, order

LINE = 8  # words in a cache line: writers do not share one
ARRIVED, TAGS = 0, 1  # words of a rank's line: rounds that it has come to, and what it does in the latest two
SLOT = 1 << 20  # bytes that a rank shows in one round, twice: while others still read one round, it writes the next
PIPE = 1 << 16  # bytes of a message that are under way from one rank to another
WRITTEN, READ, PIPE_WORDS = 0, LINE, 2 * LINE  # words of a pipe: bytes written, bytes read, each in its own line
POLL_SECONDS = 0.02  # between two looks at whether the others are alive


class GroupMemory:
    """The shared memory of a group, as one rank sees it.

    Parameters
    ----------
    mapped : mmap.mmap
    rank : int
    pids : sequence of int
        Processes of all ranks.

    Attributes
    ----------
    slots : memoryview
        Bytes: two slots per rank.
    names : sequence of int
        What people call the ranks: their numbers in the world.
    moved : int
        Grows with every round and every piece of a message: progress, after which a timeout starts anew.
    """

    def __init__(self, mapped: mmap.mmap, rank: int, pids: Sequence[int]) -> None:
        self.rank, self.pids = rank, tuple(pids)
        self.size = size = len(self.pids)
        whole = memoryview(mapped)
        words, slots = _words(size), 2 * SLOT * size
        self._words = whole[:words].cast("q")  # a line per rank, then two lines per pair of ranks
        self.slots = whole[words : words + slots]
        self._pipes = whole[words + slots :]  # one per pair of ranks, from and to
        self._ended: set[int] = set()
        self._watched: dict[int, int] = {}
        self._poll = select.poll()
        for peer, pid in enumerate(pids):
            if peer == rank:
                continue
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(peer)
            else:
                self._watched[fd] = peer
                self._poll.register(fd, select.POLLIN)
        self._looked = 0.0
        self.moved = 0
        self.names = tuple(range(size))

    def gone(self, peers: Sequence[int]) -> list[int]:
        """Those of these ranks whose processes have ended; the kernel is asked some fifty times a second."""
        now = time.monotonic()
        if now - self._looked >= POLL_SECONDS:
            self._looked = now
            self._ended |= {self._watched[fd] for fd, _ in self._poll.poll(0)}
        return [peer for peer in peers if peer in self._ended]

    def close(self) -> None:
        """Close the descriptors. The memory is freed with the last view of it."""
        for fd in self._watched:
            os.close(fd)
        self._watched = {}
        self._poll = select.poll()

    def arrive(self, number: int, tag: int) -> None:
        """Announce that this rank has come to a round, its slot written, to do ``tag``. Nobody else may write here."""
        mine = self.rank * LINE
        self._words[mine + TAGS + (number & 1)] = tag
        order()  # a rank that sees the counter must see the tag and the slot
        self._words[mine + ARRIVED] = number
        self.moved += 1

    def arrived(self, rank: int) -> int:
        """The latest round that a rank has come to."""
        return self._words[rank * LINE + ARRIVED]

    def tag(self, rank: int, number: int) -> int:
        """What a rank does in a round that it has come to."""
        return self._words[rank * LINE + TAGS + (number & 1)]

    def pipe(self, source: int, target: int) -> Pipe:
        """The pipe from one rank to another."""
        number = source * self.size + target
        first = self.size * LINE + number * PIPE_WORDS
        return Pipe(self._words[first : first + PIPE_WORDS], self._pipes[number * PIPE : (number + 1) * PIPE])


class Pipe:
    """Bytes under way from one rank to another: a ring in shared memory with two counters, one writer each.

    Parameters
    ----------
    words, content : memoryview
    """

    def __init__(self, words: memoryview, content: memoryview) -> None:
        self._words = words
        self._content = content

    def write(self, data: memoryview) -> int:
        """Append as much of ``data`` as there is room for; returns how many bytes. Only the source calls this."""
        written = self._words[WRITTEN]
        start = written % PIPE
        size = min(len(data), PIPE - (written - self._words[READ]), PIPE - start)
        if size:
            self._content[start : start + size] = data[:size]
            order()  # a target that sees the counter must see the bytes
            self._words[WRITTEN] = written + size
        return size

    def read(self, most: int, into: bytearray) -> int:
        """Move at most ``most`` bytes to the end of ``into``; returns how many. Only the target calls this."""
        read = self._words[READ]
        start = read % PIPE
        size = min(most, self._words[WRITTEN] - read, PIPE - start)
        order()  # the counter is read before the bytes
        if size:
            into += self._content[start : start + size]
            order()  # the bytes are copied before the source may write over them
            self._words[READ] = read + size
        return size


def _words(size: int) -> int:
    """Bytes of all counters, rounded up to pages."""
    words = 8 * (size * LINE + size * size * PIPE_WORDS)
    return -(-words // mmap.PAGESIZE) * mmap.PAGESIZE


def join(store: Any, rank: int, size: int) -> GroupMemory:
    """Meet the other ranks of a group in its store, and share memory with them.

    Raises
    ------
    UsageError
        They cannot share memory: not all are on one host, of one user, on Linux.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError(f"backend 'phalanx' needs Linux, this is {sys.platform}; use backend='gloo'")
    needed = _words(size) + 2 * SLOT * size + PIPE * size * size
    with contextlib.ExitStack() as held:
        memory = held.enter_context(contextlib.closing(Memory(needed))) if rank == 0 else None
        turn = store.add(f"rank {rank} comes", 1)  # a group may be made again with the same store
        fd = -1 if memory is None else memory.fd
        mine = {"host": socket.gethostname(), "where": _where(), "uid": os.getuid(), "pid": os.getpid(), "fd": fd}
        store.set(f"{turn} rank {rank}", json.dumps(mine))
        ranks = [json.loads(store.get(f"{turn} rank {peer}")) for peer in range(size)]
        for peer, other in enumerate(ranks):
            if (other["where"], other["uid"]) != (ranks[0]["where"], ranks[0]["uid"]):
                raise UsageError(
                    f"rank {peer} runs on {other['host']} as user {other['uid']}, rank 0 on {ranks[0]['host']} as user "
                    f"{ranks[0]['uid']}: backend 'phalanx' is shared memory, for one host, one user, one container; "
                    "use backend='gloo' there"
                )
        with contextlib.closing(_opened(ranks[0]["pid"], ranks[0]["fd"], needed)) as shared:
            mapped = shared.map()
        store.set(f"{turn} ready {rank}", "")
        store.wait([f"{turn} ready {peer}" for peer in range(size)])  # the descriptor stays until all have the memory
    return GroupMemory(mapped, rank, [other["pid"] for other in ranks])


def _opened(pid: int, fd: int, needed: int) -> Memory:
    """Open the memory of another process; any other kind of file is refused."""
    path = pathlib.Path(f"/proc/{int(pid)}/fd/{int(fd)}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"the memory of rank 0 (process {pid}) cannot be opened: {error.strerror}; both ranks must be processes of "
            "one user in one container, or use backend='gloo'"
        ) from error
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink or facts.st_uid != os.getuid() or facts.st_size != needed:
        os.close(descriptor)
        raise UsageError(
            f"{path} is not the memory that rank 0 shares; start all ranks with the same version of phalanx"
        )
    return Memory(0, descriptor)


def _where() -> str:
    """A text that is equal for processes that can see each other: boot of the kernel, and namespace of process ids."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
