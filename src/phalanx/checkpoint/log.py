"""A log: a file of whole lines, on a full disk too."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
import threading

from phalanx.checkpoint import files


def opened(path: pathlib.Path) -> int:
    """A descriptor of the file, which is made if it is not there, for a ``Log``.

    Raises
    ------
    OSError
        It cannot be opened, or is no plain file.
    """
    found = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR | files.NOFOLLOW | files.NONBLOCK, files.MODE)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, f"{path.name} is no plain file")
    return found


class Log:
    """Adds lines to a file. What does not fit on the disk is left out, by whole lines.

    A line of which a part was written is ended before the next: by what is missing of it, or, if another process began
    it, by a line feed, so that it can be told from whole ones.

    Parameters
    ----------
    descriptor : int
        Of the file, as ``opened`` gives it. Whoever opened it closes it.
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
