"""Starting worker processes: the caller's side of the zygote, and of each worker.

The caller's process is never forked. Zygotes are kept warm between runs; ``close`` ends it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from phalanx.engines import interpreter
from phalanx.errors import RunError, UsageError

MESSAGE_BYTES = 4096
FAREWELL_SECONDS = 3.0


class Zygote:
    """The caller's side of a zygote: a request, an answer, one at a time.

    Its start takes as long as importing the framework, but does not wait for that; the first worker does.

    Parameters
    ----------
    jax : bool
        Whether its workers will need jax. They share what they compile in a folder that is gone afterwards.
    """

    def __init__(self, *, jax: bool) -> None:
        if not sys.executable:
            raise UsageError(
                "worker processes need the Python interpreter, and sys.executable is empty here; set it, or use "
                "engine='inline' (same answer)"
            )
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self.owner = os.getpid()
        self._cache = tempfile.mkdtemp(prefix="phalanx-") if jax else None
        self._process = subprocess.Popen(
            interpreter.command(theirs.fileno(), self.owner, self._cache),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=interpreter.environment(),
        )
        theirs.close()
        self._awake = False

    @property
    def usable(self) -> bool:
        """Whether it runs, and belongs to this process (not to the parent of a fork)."""
        return self.owner == os.getpid() and self._process.poll() is None

    @property
    def awake(self) -> bool:
        """Whether it has imported what it needs, so that workers start at once."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return self._awake or bool(poller.poll(0))

    def spawn(self, number: int, fds: Sequence[int]) -> tuple[int, int | None]:
        """Start a worker with these descriptors; returns its pid and, where there are any, a pidfd."""
        answer, handles = self._ask({"worker": number}, fds)
        return answer["pid"], handles[0] if handles else None

    def end(self, pid: int) -> int:
        """Kill a worker, with what it started, unless it has ended; returns the wait status of its end."""
        return self._ask({"end": pid})[0]["status"]

    def close(self) -> None:
        """End it, and with it every worker that is left."""
        awake = self.owner == os.getpid() and self.awake
        self._socket.close()
        if self.owner == os.getpid():
            try:
                self._process.wait(FAREWELL_SECONDS if awake else 0)  # it ends its workers, and what they started
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._cache is not None:
                shutil.rmtree(self._cache, ignore_errors=True)

    def _ask(self, request: dict[str, int], fds: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            try:
                if not self._awake:
                    self._receive()
                    self._awake = True
                socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds))
                return self._receive()
            except (OSError, ValueError) as error:
                status = self._process.poll()
                raise RunError(
                    f"the process that starts workers has ended (status {status}): {error}; what it wrote to stderr "
                    "says why. Run again, or use engine='inline'"
                ) from error
            except BaseException:  # Ctrl-C between a request and its answer: the two would never match again
                self._process.kill()
                raise

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        message, handles, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
        if not message:
            raise OSError("it closed its socket")
        return json.loads(message), handles


class Hand:
    """The caller's side of one worker: its channel, its output, its life.

    Attributes
    ----------
    pid : int
    pidfd : int or None
        Readable once the worker has ended.
    channel : Connection
    pipes : list of int
        Its standard output and standard error.
    """

    def __init__(self, zygote: Zygote, number: int, memories: Sequence[int]) -> None:
        self.number = number
        self.ended = False
        self._owner = os.getpid()
        self._zygote = zygote
        mine, theirs = socket.socketpair()
        output, errors = os.pipe(), os.pipe()
        self.channel = Connection(mine.detach())
        self.pipes = [output[0], errors[0]]
        self.pidfd: int | None = None
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

    def wake(self) -> None:
        """Tell it that something has been granted."""
        with contextlib.suppress(OSError):  # it has ended, which shows elsewhere
            os.write(self.channel.fileno(), b".")

    def shoot(self) -> None:
        """End it at once, even if it is stopped; its death shows as any other does."""
        with contextlib.suppress(OSError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def dismiss(self) -> None:
        """Let it end by itself: it sees the end of its channel."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.channel.fileno())) as end:
            end.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """End it at once, without asking anybody; the zygote clears away what is left of it."""
        if not self.ended:
            self.ended = True
            with contextlib.suppress(OSError):
                if self.pidfd is not None and self._owner == os.getpid():
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self._close()

    def end(self) -> int | None:
        """Make sure that it has ended, and give back what it took; returns its wait status if that is known."""
        status = None
        if not self.ended:
            self.ended = True
            with contextlib.suppress(RunError):
                status = self._zygote.end(self.pid)
            self._close()
        return status

    def _close(self) -> None:
        self.channel.close()
        for fd in self.pipes:
            os.close(fd)
        if self.pidfd is not None:
            os.close(self.pidfd)


class Warm:
    """What is kept for the next run: a zygote, and one more if jax was imported when there was one without."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygotes: dict[bool, Zygote] = {}

    def zygote(self) -> Zygote:
        """The zygote, started if there is none."""
        with self._lock:
            jax = "jax" in sys.modules
            if jax not in self._zygotes or not self._zygotes[jax].usable:
                self._drop(jax)
                self._zygotes[jax] = Zygote(jax=jax)
                atexit.unregister(self.close)
                atexit.register(self.close)
            return self._zygotes[jax]

    @property
    def awake(self) -> bool:
        """Whether a worker would start at once."""
        zygote = self._zygotes.get("jax" in sys.modules)
        return zygote is not None and zygote.usable and zygote.awake

    def close(self) -> None:
        """End what is kept."""
        with self._lock:
            for jax in list(self._zygotes):
                self._drop(jax)

    def _drop(self, jax: bool) -> None:
        if jax in self._zygotes:
            self._zygotes.pop(jax).close()


WARM = Warm()
