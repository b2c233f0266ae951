"""Memory of processes: what they share, in which order they see it, and what a process keeps that was freed.

Shared memory is anonymous: no name, no leftover. A memfd; where there is none, an unlinked temporary file.

A processor may let others see plain writes in another order than they were made, and may read ahead of its own writes.
x86 never swaps two writes or two reads; it only delays a write past a later read. Others, as ARM, may swap any two.
Python has no memory barrier of its own, so what is needed is had from instructions that contain one (``order``,
``fence``).

The next step needs again what a step frees. A replica's gradients and activations are big blocks, and glibc maps and
unmaps those one by one, so each step faults them in again. For a small resnet18 with R = 8 that is 160,000 pages a
step, which took longer than computing it. So such memory stays with the process while a run is open (``keep_freed``).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pathlib
import platform
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from phalanx.errors import UsageError
from phalanx.surroundings import presence

ALIGNMENT = 64
UNLIMITED = 1 << 60
SPARE = 0.05  # of the available memory, left to others


class Memory:
    """A stretch of memory that processes share through its descriptor. Pages cost nothing before they are written.

    Attributes
    ----------
    fd : int
        To be inherited by workers; owned by this object.
    size : int
        Bytes.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.fd, self.size = (_anonymous(), 0) if fd is None else (fd, os.fstat(fd).st_size)
        self.grow(size)
        presence.own(self)

    def grow(self, size: int) -> None:
        """Make it at least ``size`` bytes; never smaller. Maps made before see the part that they had."""
        if size > self.size:
            size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            try:
                os.ftruncate(self.fd, size)
            except OSError as error:
                raise UsageError(
                    f"{size:,} bytes of shared memory cannot be had ({error}); raise the limit on files (ulimit "
                    "-f), or use engine='inline' (same answer)"
                ) from error
            self.size = size

    def map(self, *, private: bool = False) -> mmap.mmap:
        """All of it; ``private``: what is written stays with the writer."""
        self.size = os.fstat(self.fd).st_size
        try:
            return mmap.mmap(self.fd, self.size, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        except (OSError, MemoryError) as error:
            raise UsageError(
                f"{self.size / 1e9:.1f} GB of shared memory cannot be mapped ({error}); raise the limit on address "
                "space (ulimit -v), or use engine='inline'"
            ) from error

    def read(self, size: int) -> bytes:
        """A copy of the first ``size`` bytes."""
        return os.pread(self.fd, size, 0)

    def write(self, content: bytes) -> None:
        """Put ``content`` at the beginning."""
        with self.map() as mapped:
            mapped[: len(content)] = content

    def close(self) -> None:
        """Give the descriptor back. Maps stay as long as somebody holds them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    leave = close  # see ``presence.Owned``


class Memories(NamedTuple):
    """What workers inherit: each fills in the memories of its caller, in this order.

    Attributes
    ----------
    environment, recipe, mailbox, orders : Memory
        Pickles of the caller's: its environment, what to train, a task, and where a worker begins.
    arena : Memory
        The state, partial sums and counters.
    base : Memory
        What is frozen.
    inputs : Memory
        The ring of the readers.
    meeting : Memory
        Where workers with devices find each other.
    posts : Memory
        What each of them says for losses over the whole batch.
    """

    environment: Memory
    recipe: Memory
    arena: Memory
    mailbox: Memory
    orders: Memory
    base: Memory
    inputs: Memory
    meeting: Memory
    posts: Memory


class Carver:
    """Hands out places in a stretch of memory, one after another, each at a multiple of so many bytes."""

    def __init__(self, alignment: int = ALIGNMENT) -> None:
        self.size, self._alignment = 0, alignment

    def take(self, size: int) -> int:
        """The offset of the next ``size`` bytes."""
        offset = self.size
        self.size += -(-size // self._alignment) * self._alignment
        return offset


def aligned(content: bytes | memoryview) -> memoryview:
    """A copy that begins where frameworks let arrays begin: how a sum over one is computed may depend on that."""
    room = bytearray(len(content) + ALIGNMENT)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    begin = -address % ALIGNMENT
    copy = memoryview(room)[begin : begin + len(content)]
    copy[:] = content
    return copy


def available_bytes() -> int:
    """Memory that processes may still take: what the machine has, or what control groups leave; huge if unknown."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return UNLIMITED
    machine = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), UNLIMITED)
    return min([machine, *_left_by_groups()])


def check_room(needed: int, workers: int) -> None:
    """Refuse what does not fit, before anything starts: afterwards the kernel would kill a process."""
    available = available_bytes()
    if needed > available * (1 - SPARE):
        raise UsageError(
            f"workers is {workers}, which takes about {needed / 1e9:.1f} GB of memory for weights, optimizer "
            f"state and gradients, but {available / 1e9:.1f} GB are available; use fewer workers, or engine='inline' "
            "(same answer)"
        )


def _left_by_groups() -> Iterator[int]:
    """Bytes left under the limit of every control group around this process (version 2)."""
    for folder in presence.around("memory"):
        try:
            limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit != "max":
            yield int(limit) - used + int(stat.get("inactive_file", 0))


def _anonymous() -> int:
    """A new descriptor."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            return os.memfd_create("phalanx", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")  # writes are seen as they are made, and reads not swapped
LOCK: Final = threading.Lock()


def order() -> None:
    """Writes before this are seen before writes after it, and reads before it are done before reads after it.

    x86 processors do that by themselves, so this only costs a call there.
    """
    if not ORDERED:
        through_kernel()


def fence() -> None:
    """Writes before this are seen before reads after it are done.

    Two processes that each write a flag and then read the other's need it: without it, both may miss the other's. x86
    does not promise that either, except for atomic instructions, and taking a lock is one.
    """
    if ORDERED:
        with LOCK:
            pass
    else:
        through_kernel()


def through_kernel() -> None:
    """Order memory by a round trip through a pipe of our own: on its way the kernel has to do it."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b".")
        os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
DEFAULT_MAX = 65536  # blocks that glibc maps at most
HIGHEST = 32 << 20  # bytes: where glibc's own threshold for mapping ends up once a block of that size was freed


def keep_freed() -> None:
    """Big blocks that are freed stay with the process, instead of being faulted in again in each step (glibc)."""
    mallopt = _libc("mallopt")
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def give_back() -> None:
    """Return what is free now to the system, once (glibc)."""
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


class FreedMemory:
    """Keeps what is freed while any run of the caller's process is open; afterwards it goes back to the system.

    If environment variables set glibc's allocator, nothing is changed.
    """

    def __init__(self) -> None:
        self._open = 0

    def begin(self) -> None:
        """Note that a run begins."""
        self._open += 1
        if self._open == 1 and not _decided():
            keep_freed()

    def end(self) -> None:
        """Note that it ended."""
        self._open -= 1
        mallopt = _libc("mallopt")
        if self._open == 0 and mallopt is not None and not _decided():
            mallopt(M_MMAP_MAX, DEFAULT_MAX)
            mallopt(M_MMAP_THRESHOLD, HIGHEST)
            mallopt(M_TRIM_THRESHOLD, 2 * HIGHEST)
            give_back()


RUNS = FreedMemory()


def _decided() -> bool:
    return "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") and name.endswith("_") for name in os.environ
    )


def _libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
