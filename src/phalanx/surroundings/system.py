"""What only some systems have: locks of files, names that are synced, forks, worker processes.

Workers need Linux: shared memory without a name, processes that end with their parent, and forks of a process without
threads. On macOS and Windows a run computes in its own process, to the same bits. Its files are the same, too.
"""

from __future__ import annotations

import errno
import os
import pathlib
import sys
from collections.abc import Callable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
BEYOND = 1 << 30  # the byte that is locked where a lock keeps others from reading


def has_workers() -> bool:
    """Whether worker processes can be had."""
    return sys.platform == "linux"


def after_fork(function: Callable[[], object]) -> None:
    """Have ``function`` called in every child that this process forks, where there are forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def lock(descriptor: int, *, shared: bool = False) -> None:
    """Lock a file; ``shared``: together with others that share it, where there is such a thing.

    Raises
    ------
    BlockingIOError
        Somebody else has the lock.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return
    try:
        _msvcrt(descriptor, "LK_NBLCK")
    except OSError as error:
        raise BlockingIOError(errno.EWOULDBLOCK, "somebody else has the lock") from error


def unlock(descriptor: int) -> None:
    """Let go of a lock."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    else:
        _msvcrt(descriptor, "LK_UNLCK")


def _msvcrt(descriptor: int, operation: str) -> None:
    import msvcrt

    os.lseek(descriptor, BEYOND, os.SEEK_SET)
    msvcrt.locking(descriptor, getattr(msvcrt, operation), 1)  # type: ignore[attr-defined]


def sync_folder(path: pathlib.Path) -> None:
    """Sync the names in a folder to the disk. Windows opens no folders, and notes names before it returns."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Bytes of a file; where the file stands after that is not said."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, size)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write bytes into a file; where the file stands after that is not said."""
    if hasattr(os, "pwrite"):
        os.pwrite(descriptor, data, offset)
        return
    os.lseek(descriptor, offset, os.SEEK_SET)
    os.write(descriptor, data)
