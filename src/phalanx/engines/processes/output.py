"""What workers print and warn, brought to the caller's own streams: whole lines, nothing lost, warnings once."""

from __future__ import annotations

import os
import select
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from phalanx.definition import checks

CHUNK_BYTES = 1 << 16
BEGINNING = "<string>"  # of a worker: the place of warnings that are of no line of the caller's


class Output:
    """Standard output and standard error of all workers, read from pipes and written line by line."""

    def __init__(self) -> None:
        self._pending: dict[int, bytes] = {}
        self._errors: set[int] = set()
        self._warned: set[tuple[Any, ...]] = set()

    def follow(self, pipes: Sequence[int]) -> None:
        """Carry what comes through these pipes: standard output, standard error."""
        for fd in pipes:
            os.set_blocking(fd, False)
            self._pending[fd] = b""
        self._errors.add(pipes[1])

    @property
    def open(self) -> bool:
        """Whether more may come."""
        return bool(self._pending)

    def carry(self, fds: Iterable[int]) -> list[int]:
        """Write the whole lines that have come through ``fds``; returns those of them that have ended."""
        return [fd for fd in fds if fd in self._pending and not self._carry(fd)]

    def carry_waiting(self, milliseconds: int) -> None:
        """Carry what comes within this time, if anything does."""
        poller = select.poll()
        for fd in self._pending:
            poller.register(fd, select.POLLIN)
        self.carry([fd for fd, _ in poller.poll(milliseconds)])

    def forget(self, pipes: Sequence[int]) -> None:
        """Carry what is left in these pipes, and leave them."""
        self.carry(pipes)
        for fd in pipes:
            self._pending.pop(fd, None)
            self._errors.discard(fd)

    def warn(self, message: str, category: type[Warning], filename: str, line: int) -> None:
        """Show a warning of a worker, once for all of them, as this process shows its own.

        One that is of no line of the caller's code is shown with the line at which the caller waits for workers.
        """
        seen = (message, category, filename, line)
        if seen in self._warned:
            return
        self._warned.add(seen)
        if filename == BEGINNING:
            warnings.warn(message, category, stacklevel=checks.callers_level())
        else:
            warnings.warn_explicit(message, category, filename, line)

    def _carry(self, fd: int) -> bool:
        """Whether more may come."""
        while True:
            try:
                chunk = os.read(fd, CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                self._write(fd, self._pending.pop(fd))
                return False
            lines, newline, rest = (self._pending[fd] + chunk).rpartition(b"\n")
            self._write(fd, lines + newline)
            self._pending[fd] = rest

    def _write(self, fd: int, text: bytes) -> None:
        stream = sys.stderr if fd in self._errors else sys.stdout
        if text and stream is not None:
            stream.write(text.decode("utf-8", "backslashreplace"))
            stream.flush()
