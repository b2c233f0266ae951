"""One process that was started for the caller, and what such processes print, as the caller's process sees them."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from phalanx.definition import checks
from phalanx.engines.processes.starter import WARM
from phalanx.errors import StartError
from phalanx.surroundings import presence

WORKER = "phalanx.engines.processes.worker"
CHUNK_BYTES = 1 << 18
BEGINNING = "<string>"  # the file name of a worker's warnings that come from no line of the caller's code


class WorkerHandle:
    """The caller's side of one worker. Implements ``presence.Owned``.

    Parameters
    ----------
    number : int
        Among those that live the same life.
    memories : sequence of int
        Descriptors that it inherits.
    lives : str
        The module whose ``live(channel, memories, number)`` is what it does.

    Attributes
    ----------
    pid : int
    pidfd : int or None
        Readable once the worker has ended.
    channel : Connection
    pipes : list of int
        Its standard output and standard error.
    born : float
        When it was started, on the clock of ``time.monotonic``.
    ready : bool
        Whether it has said that it can begin.
    woken : bool
        Whether it was stopped, and was made to go on.
    """

    def __init__(self, number: int, memories: Sequence[int], lives: str = WORKER) -> None:
        self.number = number
        self.ended = self.ready = self.woken = False
        self.born = time.monotonic()
        mine, theirs = socket.socketpair()
        output, errors = os.pipe(), os.pipe()
        self.channel = Connection(mine.detach())
        self.pipes = [output[0], errors[0]]
        self.pidfd: int | None = None
        self._came = bytearray()  # of messages that are not whole yet
        presence.own(self)
        try:
            fds = [theirs.fileno(), output[1], errors[1], *memories]
            self._zygote, self.pid, self.pidfd = WARM.spawn(lives, number, fds)
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(output[1])
            os.close(errors[1])

    @property
    def watched(self) -> list[int]:
        """Descriptors that are readable when the worker needs attention."""
        return [fd for fd in (self.channel.fileno(), *self.pipes, self.pidfd) if fd is not None]

    def heard(self) -> tuple[list[Any], bool]:
        """The messages that have come, and whether there may be more. Of one that is stopped in the middle, a part."""
        more = True
        try:
            while more and self.channel.poll():
                chunk = os.read(self.channel.fileno(), CHUNK_BYTES)
                self._came += chunk
                more = bool(chunk)
        except OSError:
            more = False
        return [pickle.loads(message) for message in filter(None, self._whole())], more  # noqa: S301  from a child

    def _whole(self) -> Iterator[bytes]:
        """The messages that have come whole, in the form in which ``Connection`` sends them."""
        begin = 0
        while (head := struct.Struct("!i")).size <= len(self._came) - begin:
            (size,) = head.unpack_from(self._came, begin)
            if size < 0:  # a long one says so, and then how long it is
                head = struct.Struct("!iQ")
                if len(self._came) - begin < head.size:
                    break
                _, size = head.unpack_from(self._came, begin)
            end = begin + head.size + size
            if len(self._came) < end:
                break
            yield bytes(memoryview(self._came)[begin + head.size : end])
            begin = end
        del self._came[:begin]

    def wake(self) -> None:
        """Tell it that something has been granted."""
        with contextlib.suppress(OSError):  # it has ended, which shows elsewhere
            os.write(self.channel.fileno(), b".")

    def dismiss(self) -> None:
        """Let it end by itself: it sees the end of its channel."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.channel.fileno())) as end:
            end.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kill it at once, without asking the zygote, which clears away the rest of it."""
        if not self.ended:
            self.ended = True
            self.send(signal.SIGKILL)
            self._close()

    def end(self) -> int | None:
        """Make sure that it has ended, and give back what it took; returns its wait status if that is known."""
        if self.ended:
            return None
        self.ended = True
        try:
            return self._zygote.end(self.pid)
        except StartError:  # the kernel ends workers with their zygote; what one started is in a process group
            self.send(signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            return None
        finally:
            self._close()

    def leave(self) -> None:
        self.ended = True
        self._close()

    def send(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(OSError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)

    def _close(self) -> None:
        self.channel.close()
        for fd in self.pipes:
            os.close(fd)
        if self.pidfd is not None:
            os.close(self.pidfd)
        self.pipes, self.pidfd = [], None


class Output:
    """Standard output and standard error of all workers, read from pipes and written line by line."""

    def __init__(self) -> None:
        self._pending: dict[int, bytes] = {}
        self._errors: set[int] = set()
        self._warned: set[tuple[Any, ...]] = set()
        self._lost = False  # something that workers printed

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
        """Carry the rest of these pipes, and follow them no more."""
        self.carry(pipes)
        for fd in pipes:
            self._pending.pop(fd, None)
            self._errors.discard(fd)

    def warn(self, message: str, category: type[Warning], filename: str, line: int) -> None:
        """Show a warning of a worker, once for all of them, as this process shows its own.

        A warning from no line of the caller's code is shown with the line at which the caller waits for workers.
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
        """Carry what has come through ``fd``; returns whether more may come."""
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
        """Write what workers printed, as far as it can be: a stream that nobody reads, or a full disk, ends no run."""
        stream = sys.stderr if fd in self._errors else sys.stdout
        if text and stream is not None:
            encoding = getattr(stream, "encoding", None) or "utf-8"  # ascii, say
            printable = text.decode("utf-8", "backslashreplace").encode(encoding, "backslashreplace").decode(encoding)
            try:
                stream.write(printable)
                stream.flush()
            except (OSError, ValueError) as error:
                if not self._lost:
                    presence.say(f"what workers print cannot be written: {error}; the run goes on without it")
                self._lost = True
