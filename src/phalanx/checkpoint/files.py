"""Opens, writes, holds and removes the files and folders of a run. A symbolic link in place of one is not followed.

A file is whole or not there: it is written beside its place, made durable, and renamed. A log is the exception: a file
of whole lines, on a full disk too. Only their owner may read files and folders. Descriptors are held until somebody
lets go of them, and one holder at a time has the lock of a file.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import gc
import os
import pathlib
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from phalanx.definition import checks
from phalanx.errors import VALUE_CHARACTERS, SnapshotError, shortened
from phalanx.surroundings import presence, system

TEMPORARY = ".tmp-"
MODE, FOLDER_MODE = 0o600, 0o700
A_LINK = "it is a symbolic link"
# What odd JSON and CSV raise.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error)


@contextlib.contextmanager
def used(path: pathlib.Path) -> Iterator[None]:
    """What goes wrong inside is an error that names the file."""
    try:
        yield
    except (OSError, MemoryError, *MALFORMED) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SnapshotError(f"{path} cannot be used: {shortened(why, VALUE_CHARACTERS)}") from error


def opened(path: pathlib.Path, flags: int) -> int:
    """Open a plain file, and create it if the flags say so; returns its descriptor.

    Raises
    ------
    OSError
        It cannot be opened, or is a link, a pipe, or anything else.
    """
    if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():
        raise OSError(errno.ELOOP, A_LINK, str(path))
    try:
        descriptor = os.open(path, flags | system.PLAIN, MODE)
    except OSError as error:
        if path.is_symlink():
            raise OSError(errno.ELOOP, A_LINK, str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return descriptor


def make_folder(path: pathlib.Path) -> None:
    """Make a folder that only its owner may read, unless it is there; those above it are as usual.

    Raises
    ------
    OSError
        It cannot be made, or is a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, A_LINK, str(path))
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def whole_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to be filled; it appears as ``target``, durably, when the block ends well, else not at all."""
    draft = _beside(target)
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
    """Make a new file, let ``fill`` write it, and sync it to the disk; returns what ``fill`` returns."""
    with os.fdopen(opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "wb", buffering=1 << 20) as file:
        result = fill(file)
        file.flush()
        os.fsync(file.fileno())
    return result


def replace(path: pathlib.Path, fill: Callable[[BinaryIO], Any]) -> None:
    """Let ``fill`` write a file that then takes the place of ``path``, be that a file, a link or nothing."""
    draft = _beside(path)
    try:
        write(draft, fill)
        os.replace(draft, path)
        sync_folder(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read(path: pathlib.Path) -> bytes:
    """All of a plain file.

    Raises
    ------
    OSError
        It cannot be read, is a link or no plain file, or does not fit into memory.
    """
    with os.fdopen(opened(path, os.O_RDONLY), "rb") as file:
        try:
            return file.read()
        except MemoryError as error:
            raise OSError(errno.EFBIG, "it does not fit into memory", str(path)) from error


def sync_folder(path: pathlib.Path) -> None:
    """Sync the names in a folder to the disk."""
    system.sync_folder(path)


def remove(path: pathlib.Path) -> None:
    """Remove a file, link or folder if it is there, never what a link leads to; a folder goes at once or not at all."""
    if is_folder(path):
        gone = _beside(path)
        os.rename(path, gone)
        shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)


def is_folder(path: pathlib.Path) -> bool:
    """Whether it is there and a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def is_there(path: pathlib.Path) -> bool:
    """Whether something has this name, be it a link that leads nowhere.

    Raises
    ------
    SnapshotError
        It cannot be told: what may not be looked at is not absent.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
    return True


def of_others(paths: Iterable[pathlib.Path]) -> str:
    """Which of these somebody else may have written, in words; "" where only this user, its group or root could.

    A shared group is meant (umask 002, volumes of containers). Root goes on with anybody's, as containers do,
    but not with what everybody may write.
    """
    for path in paths if hasattr(os, "geteuid") else ():  # elsewhere modes say nothing
        with contextlib.suppress(OSError):
            facts = os.lstat(path)
            sticky = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX
            if facts.st_mode & stat.S_IWOTH and not sticky and not stat.S_ISLNK(facts.st_mode):
                return f"{str(path)!r} may be written by everybody (mode {stat.S_IMODE(facts.st_mode):o})"
            if os.geteuid() and facts.st_uid not in (0, os.geteuid()):
                return f"{str(path)!r} belongs to another user (uid {facts.st_uid})"
    return ""


def clear_away(folder: pathlib.Path) -> None:
    """Remove what an interrupted writer left."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            remove(path)


def open_log(path: pathlib.Path) -> int:
    """A descriptor of the file, which is made if it is not there, for a ``LineFile``. Raises as ``opened`` does."""
    return opened(path, os.O_CREAT | os.O_APPEND | os.O_RDWR)


def _beside(path: pathlib.Path) -> pathlib.Path:
    """A new temporary name beside ``path``."""
    return path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")


class LineFile:
    """Adds lines to a file. What does not fit on the disk is left out, by whole lines, with a warning, once.

    If only a part of a line was written, the rest comes before the next line. If another process began the line, a line
    feed ends it, so that it can be told from whole ones.

    Parameters
    ----------
    descriptor : int
        Of the file, as ``open_log`` gives it. Whoever opened it closes it.
    path : pathlib.Path
        Its name, for the warning.
    """

    def __init__(self, descriptor: int, path: pathlib.Path) -> None:
        self._descriptor, self._path, self._told = descriptor, path, False
        self._lock = threading.Lock()
        size = os.fstat(descriptor).st_size
        self._owed = b"\n" if size and system.read_at(descriptor, 1, size - 1) != b"\n" else b""

    def add(self, line: bytes) -> None:
        """Write what is owed, then ``line``, which ends with a line feed; a disk that is full stops nothing."""
        with self._lock:
            data, done, failed = self._owed + line, 0, None
            try:
                while done < len(data):
                    done += os.write(self._descriptor, data[done:])
            except OSError as error:
                failed = error
            begun = done > len(self._owed)
            self._owed = data[done:] if begun else self._owed[done:]
        if failed and not self._told:
            self._told = True
            checks.warn(f"lines of {str(self._path)!r} are lost: {failed.strerror}; the run goes on")


class Held:
    """Descriptors that are closed when they are let go of, or when nobody has this object any more.

    A forked process holds nothing: it closes its copies. All copies share one lock, so the child neither keeps it when
    the parent lets go of it, nor lets go of it while the parent works.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._owner = os.getpid()
        presence.own(self)

    def add(self, descriptor: int) -> int:
        """Hold this one too: from here on nobody else closes it."""
        self._descriptors.append(descriptor)
        return descriptor

    @property
    def mine(self) -> bool:
        """Whether this process still holds them."""
        return bool(self._descriptors) and self._owner == os.getpid()

    def let_go(self) -> None:
        """Unlock and close them; does nothing the second time."""
        if self._owner == os.getpid():  # else it was forked where Python did not see it
            for number in self._descriptors:
                with contextlib.suppress(OSError):
                    system.unlock(number)  # copies that others may have keep no lock
            self.leave()

    def __del__(self) -> None:
        try:  # noqa: SIM105  when Python ends, contextlib is empty, as all modules are
            self.let_go()
        except (AttributeError, TypeError):
            pass

    def leave(self) -> None:
        """In a child: close the copies, and leave the lock alone, which ends with the last copy."""
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.pop())


def locked(path: pathlib.Path, *, seize: bool = False) -> int:
    """A descriptor of the file, which is made if it is not there, with its lock; ``seize``: or without.

    Raises
    ------
    BlockingIOError
        Somebody else has it.
    OSError
        The file cannot be opened.
    """
    descriptor = opened(path, os.O_CREAT | os.O_RDWR)
    try:
        try:
            system.lock(descriptor)
        except BlockingIOError:
            gc.collect()  # a holder that was dropped may wait for this
            time.sleep(0.1)  # who lists runs has it for a moment
            if not seize:
                system.lock(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
