"""Descriptors that are held until somebody lets go of them, and a file of which one holder at a time has the lock."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import weakref

from phalanx.checkpoint import files
from phalanx.surroundings import presence

try:
    import fcntl
except ImportError:  # Windows has another way, and there two runs in one directory are not noticed
    fcntl = None  # type: ignore[assignment]


class Held:
    """Descriptors that are closed when they are let go of, or when nobody has this object any more.

    A process that is forked holds nothing: it closes its copies. A lock is one of all copies, so the child neither
    keeps it when the parent lets go of it, nor lets go of it while the parent works.

    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _let_go, self._descriptors, self._owner)
        self._finalizer.atexit = False  # the end of the process closes them
        presence.own(self)

    def add(self, descriptor: int) -> int:
        """Hold this one too: from here on nobody else closes it."""
        self._descriptors.append(descriptor)
        return descriptor

    @property
    def mine(self) -> bool:
        """Whether this process still holds them."""
        return self._finalizer.alive and self._owner == os.getpid()

    def let_go(self) -> None:
        """Unlock and close them; does nothing the second time."""
        self._finalizer()

    def leave(self) -> None:
        """In a child: close the copies, and leave the lock alone."""
        if self._finalizer.detach() is not None:
            _close(self._descriptors)  # closing a copy keeps the lock, which ends with the last copy; unlocking ends it


def locked(path: pathlib.Path) -> int:
    """A descriptor of the file, which is made if it is not there, with its lock.

    Raises
    ------
    BlockingIOError
        Somebody else has it.
    OSError
        The file cannot be opened.
    """
    descriptor = files.opened(path, os.O_CREAT | os.O_RDWR)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                gc.collect()  # a holder that was dropped may wait for this
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _let_go(descriptors: list[int], owner: int) -> None:
    if os.getpid() != owner:  # forked where Python did not see it
        return
    if fcntl is not None:
        for number in descriptors:
            with contextlib.suppress(OSError):
                fcntl.flock(number, fcntl.LOCK_UN)  # copies that others may have keep no lock
    _close(descriptors)


def _close(descriptors: list[int]) -> None:
    for number in descriptors:
        with contextlib.suppress(OSError):
            os.close(number)
