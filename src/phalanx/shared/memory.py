"""Anonymous shared memory: no name, no leftover. A memfd; where there is none, an unlinked temporary file."""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
import resource
import shutil
import tempfile
from collections.abc import Iterator

from phalanx.errors import UsageError
from phalanx.surroundings import forks

ALIGNMENT = 64
CGROUPS = pathlib.Path("/sys/fs/cgroup")
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
        self._on_disk = False
        self.size = 0
        if fd is None:
            self.fd, self._on_disk = _anonymous()
        else:
            self.fd, self.size = fd, os.fstat(fd).st_size
        self.grow(size)
        forks.own(self)

    def grow(self, size: int) -> None:
        """Make it at least ``size`` bytes; never smaller. Maps made before see the part that they had."""
        if size > self.size:
            if self._on_disk:
                _check_disk(size)
            size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            _check_limit(size)
            os.ftruncate(self.fd, size)
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
        with self.map() as place:
            place[: len(content)] = content

    def close(self) -> None:
        """Give the descriptor back. Maps stay as long as somebody holds them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def leave(self) -> None:
        """See ``forks.Owned``."""
        self.close()


class Carver:
    """Hands out places in a stretch of memory, one after another, each at a multiple of 64 bytes."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, size: int) -> int:
        """The offset of the next ``size`` bytes."""
        offset = self.size
        self.size += -(-size // ALIGNMENT) * ALIGNMENT
        return offset


def aligned(content: bytes | memoryview) -> memoryview:
    """A copy that begins where frameworks let arrays begin: how a sum over one is computed may depend on that."""
    room = bytearray(len(content) + ALIGNMENT)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    begin = -address % ALIGNMENT
    found = memoryview(room)[begin : begin + len(content)]
    found[:] = content
    return found


def available_bytes() -> int:
    """Memory that processes may still take: what the machine has, or what control groups leave; huge if unknown."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return UNLIMITED
    machine = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), UNLIMITED)
    return min([machine, *_left_by_groups()])


def check_room(needed: int, workers: int) -> None:
    """Refuse what does not fit, before anything starts: afterwards the kernel would end somebody."""
    available = available_bytes()
    if needed > available * (1 - SPARE):
        raise UsageError(
            f"workers is {workers}, which takes about {needed / 1e9:.1f} GB of memory for weights, optimizer "
            f"state and gradients, but {available / 1e9:.1f} GB are available; use fewer workers, or engine='inline' "
            "(same answer)"
        )


def _left_by_groups() -> Iterator[int]:
    """Bytes left under the limit of every control group around this process (version 2)."""
    try:
        lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    group = CGROUPS / own.lstrip("/")
    for place in [group, *group.parents]:
        try:
            limit, used = (place / "memory.max").read_text().strip(), int((place / "memory.current").read_text())
            stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit != "max":
            yield int(limit) - used + int(stat.get("inactive_file", 0))


def _anonymous() -> tuple[int, bool]:
    """A new descriptor, and whether its pages lie on a disk."""
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("phalanx", os.MFD_CLOEXEC), False
        except OSError:
            pass  # a sandbox may forbid it
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno()), True


def _check_limit(size: int) -> None:
    """Shared memory counts as a file, and one that is longer than the limit may end the process (SIGXFSZ)."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and size > limit:
        raise UsageError(
            f"the workers' shared memory may take {size / 1e9:.4g} GB, but files of this process may take "
            f"{limit / 1e9:.4g} GB; raise that limit (ulimit -f), or use engine='inline' (same answer)"
        )


def _check_disk(size: int) -> None:
    """A file can be made larger than its disk; touching it would then end in SIGBUS."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if size > free:
        raise UsageError(
            f"the workers' shared memory may take {size / 1e9:.1f} GB, but {tempfile.gettempdir()} has "
            f"{free / 1e9:.1f} GB free; set TMPDIR to a larger disk, or use engine='inline'"
        )
