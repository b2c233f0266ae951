"""What workers say to all others in texts of any length: each writes its own part of a memory, and all read it."""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Sequence

from phalanx.errors import UsageError

STRIDE = 1 << 36  # bytes from one part to the next; those that nobody writes cost nothing
WORD = 8


class Posts:
    """The memory, as every worker sees it. It is read and written as a file, so it needs no map and no size.

    Whoever reads has met the writer since it wrote, and meets it again before it writes anew.

    Parameters
    ----------
    fd : int
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def put(self, part: int, texts: Sequence[bytes]) -> None:
        """Write a part.

        Raises
        ------
        UsageError
            It finds no room.
        """
        content = memoryview(b"".join([array("q", map(len, texts)).tobytes(), *texts]))
        begin, done = part * STRIDE, 0
        try:
            while done < min(len(content), STRIDE):
                done += os.pwrite(self._fd, content[done:], begin + done)
        except OSError as error:
            if error.errno not in (errno.EFBIG, errno.ENOSPC, errno.ENOMEM):
                raise
            raise UsageError(
                f"{len(content):,} bytes of outputs and targets, which loss_over='batch' shows to all workers, find no "
                f"room in shared memory ({error}); raise the limit on files (ulimit -f), pass a target_fn that returns "
                "less, or use engine='inline' (same answer)"
            ) from error

    def read(self, part: int, count: int) -> list[bytes]:
        """The ``count`` texts of a part."""
        at = part * STRIDE
        lengths = array("q", self._read(at, WORD * count))
        texts, at = list[bytes](), at + WORD * count
        for length in lengths:
            texts.append(self._read(at, length))
            at += length
        return texts

    def _read(self, at: int, size: int) -> bytes:
        pieces, left = list[bytes](), size
        while left:
            pieces.append(os.pread(self._fd, left, at + size - left))
            left -= len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
