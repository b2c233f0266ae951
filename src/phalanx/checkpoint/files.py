"""Files that are whole or not there: written beside, made durable, renamed. Read without following links.

A log is the exception: a file of whole lines, on a full disk too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

TEMPORARY = ".tmp-"
MODE, FOLDER_MODE = 0o600, 0o700
NOFOLLOW, NONBLOCK = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)


def make_folder(path: pathlib.Path) -> None:
    """Make a folder that only its owner may read, unless it is there; those above it are as usual."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def whole_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to be filled; it appears as ``target``, durably, when the block ends well, else not at all."""
    draft = target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    os.mkdir(draft, FOLDER_MODE)
    try:
        yield draft
        sync_folder(draft)
        os.rename(draft, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def write(path: pathlib.Path, fill: Callable[[BinaryIO], Any]) -> Any:
    """Make a new file, let ``fill`` write it, and see it onto the disk; returns what ``fill`` returns."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | NOFOLLOW, MODE)
    with os.fdopen(fd, "wb", buffering=1 << 20) as file:
        result = fill(file)
        file.flush()
        os.fsync(file.fileno())
    return result


def read(path: pathlib.Path, most: int) -> bytes:
    """All of a plain file of at most ``most`` bytes.

    Raises
    ------
    ValueError
        It is a link, no plain file, or larger.
    OSError
        It cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | NOFOLLOW | getattr(os, "O_CLOEXEC", 0) | NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise ValueError("it is a symbolic link") from error
        raise
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is no plain file")
        if facts.st_size > most:
            raise ValueError(f"it has {facts.st_size} bytes")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def sync_folder(path: pathlib.Path) -> None:
    """See the names in a folder onto the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: pathlib.Path) -> None:
    """Remove a file, a link or a folder, never what a link leads to; a folder is at once gone, or all there."""
    if is_folder(path):
        gone = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        os.rename(path, gone)
        shutil.rmtree(gone)
    else:
        path.unlink()


def is_folder(path: pathlib.Path) -> bool:
    """Whether it is there and a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def clear_away(folder: pathlib.Path) -> None:
    """Remove what an interrupted writer left."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def open_log(path: pathlib.Path) -> int:
    """A descriptor of the file, which is made if it is not there, for a ``Log``.

    Raises
    ------
    OSError
        It cannot be opened, or is no plain file.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR | NOFOLLOW | NONBLOCK, MODE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is no plain file")
    return descriptor


class Log:
    """Adds lines to a file. What does not fit on the disk is left out, by whole lines.

    A line of which a part was written is ended before the next: by what is missing of it, or, if another process began
    it, by a line feed, so that it can be told from whole ones.

    Parameters
    ----------
    descriptor : int
        Of the file, as ``open_log`` gives it. Whoever opened it closes it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        size = os.fstat(descriptor).st_size
        self._owed = b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""

    def add(self, line: bytes) -> None:
        """Write what is owed, then ``line``, which ends with a line feed; a disk that is full stops nothing."""
        with self._lock:
            data, done = self._owed + line, 0
            with contextlib.suppress(OSError):
                while done < len(data):
                    done += os.write(self._descriptor, data[done:])
            begun = done > len(self._owed)
            self._owed = data[done:] if begun else self._owed[done:]
