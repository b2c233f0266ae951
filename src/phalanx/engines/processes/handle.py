"""The caller's side of one worker: its channel, its output, its life."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from phalanx.engines.processes.starter import Zygote
from phalanx.errors import StartError
from phalanx.surroundings import forks

GONE_MILLISECONDS = 5000  # that a process which was killed may take to be gone


class WorkerHandle:
    """The caller's side of one worker.

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
    """

    def __init__(self, zygote: Zygote, number: int, memories: Sequence[int]) -> None:
        self.number = number
        self.ended = self.ready = False
        self.born = time.monotonic()
        self._owner = os.getpid()
        self._zygote = zygote
        mine, theirs = socket.socketpair()
        output, errors = os.pipe(), os.pipe()
        self.channel = Connection(mine.detach())
        self.pipes = [output[0], errors[0]]
        self.pidfd: int | None = None
        forks.own(self)
        try:
            self.pid, self.pidfd = zygote.spawn(number, [theirs.fileno(), output[1], errors[1], *memories])
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(output[1])
            os.close(errors[1])

    @property
    def watched(self) -> list[int]:
        """What is readable when there is something to do for it."""
        return [fd for fd in (self.channel.fileno(), *self.pipes, self.pidfd) if fd is not None]

    def heard(self) -> tuple[list[Any], bool]:
        """The messages that have come, and whether there may be more."""
        messages: list[bytes] = []
        try:
            while not messages or self.channel.poll():
                messages.append(self.channel.recv_bytes())
        except (EOFError, OSError):
            return [pickle.loads(message) for message in filter(None, messages)], False  # noqa: S301  from a child
        return [pickle.loads(message) for message in filter(None, messages)], True  # noqa: S301  of this process

    def message(self) -> tuple[Any, ...]:
        """The next message, which is waited for; EOFError or OSError if none will come."""
        found: tuple[Any, ...] = pickle.loads(self.channel.recv_bytes())  # noqa: S301  from a child of this process
        return found

    def wake(self) -> None:
        """Tell it that something has been granted."""
        with contextlib.suppress(OSError):  # it has ended, which shows elsewhere
            os.write(self.channel.fileno(), b".")

    def shoot(self) -> None:
        """End it at once, even if it is stopped; its death shows as any other does."""
        self._send(signal.SIGKILL)

    def dismiss(self) -> None:
        """Let it end by itself: it sees the end of its channel."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.channel.fileno())) as end:
            end.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """End it at once, without asking anybody; the zygote clears away what is left of it."""
        if not self.ended:
            self.ended = True
            self._send(signal.SIGKILL)
            self._close()

    def end(self) -> int | None:
        """Make sure that it has ended, and give back what it took; returns its wait status if that is known."""
        if self.ended:
            return None
        self.ended = True
        try:
            return self._zygote.end(self.pid)
        except StartError:  # the kernel ends workers with their zygote
            self._clear_away()
            return None
        finally:
            self._close()

    def leave(self) -> None:
        """See ``forks.Owned``."""
        self.ended = True
        self._close()

    def _send(self, number: int) -> None:
        with contextlib.suppress(OSError):
            if self.pidfd is not None and self._owner == os.getpid():
                signal.pidfd_send_signal(self.pidfd, number)

    def _clear_away(self) -> None:
        """Nobody else does: wait for its end, and end what it started, which is in a process group of its number."""
        if self.pidfd is None or self._owner != os.getpid():
            return
        self.shoot()
        gone = select.poll()
        gone.register(self.pidfd, select.POLLIN)
        gone.poll(GONE_MILLISECONDS)
        try:
            signal.pidfd_send_signal(self.pidfd, 0)  # its number is still its own, until somebody has waited for it
        except OSError:
            if os.path.exists(f"/proc/{self.pid}"):  # of another process by now
                return
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def _close(self) -> None:
        self.channel.close()
        for fd in self.pipes:
            os.close(fd)
        if self.pidfd is not None:
            os.close(self.pidfd)
        self.pipes, self.pidfd = [], None
