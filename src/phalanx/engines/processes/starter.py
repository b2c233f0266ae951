"""The caller's side of the process that starts workers: what is asked of it, what it answers, its end."""

from __future__ import annotations

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
from typing import Any

from phalanx.engines.processes import environment
from phalanx.engines.processes.messages import ended
from phalanx.engines.recovery.deadline import Stillness
from phalanx.errors import StartError, UsageError
from phalanx.plan.lifecycle import Cause
from phalanx.shared.memory import Memory
from phalanx.surroundings import forks, interrupts

MESSAGE_BYTES = 4096
CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # programs that the caller starts do not inherit what was received
FAREWELL_SECONDS, IDLE_SECONDS, KILLED_SECONDS = 3.0, 0.2, 5.0  # with workers; without, it may import something
SLICE_SECONDS = 0.05  # between two looks at Ctrl-C
STOPPED_SECONDS = 2.0  # that a zygote may be stopped; it is woken before
SILENT_SECONDS, MOST_SECONDS = 60.0, 600.0  # that it may take: without processor time, and in all


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
        _fill_standard()
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self.owner = os.getpid()
        self._cache = tempfile.mkdtemp(prefix="phalanx-") if jax else None
        self._process = subprocess.Popen(
            environment.command(theirs.fileno(), self.owner, self._cache),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_standard(1),
            stderr=_standard(2),
            start_new_session=True,
            env=environment.variables(),
        )
        theirs.close()
        self._stopped = False
        self._number, self._importing = 0, 0  # of the latest request, and of the latest that has it import something
        self._answered = -1  # the latest; 0 is said when it can begin
        self._workers: set[int] = set()  # the pids of those that were started, and not ended through it
        self.harmful: list[str] = []  # packages that it imported, so that it ended
        self._read, self._handles = b"", list[int]()  # answers, and descriptors that came with them
        forks.own(self)

    @property
    def usable(self) -> bool:
        """Whether it runs, and belongs to this process (not to the parent of a fork)."""
        return self.owner == os.getpid() and self._process.poll() is None

    @property
    def awake(self) -> bool:
        """Whether it has imported what it needs, so that workers start at once."""
        self._hear()
        return self._answered >= self._importing

    def want(self, facts: dict[str, Any]) -> None:
        """Have it import modules before it starts the next worker; does not wait for that."""
        content = json.dumps(facts).encode()
        memory = Memory(len(content))
        try:
            memory.write(content)
            with self._lock:
                self._send({"import": len(content)}, [memory.fd])
                self._importing = self._number
        except OSError as error:
            raise self._lost(error) from error
        finally:
            memory.close()

    def spawn(self, number: int, fds: Sequence[int]) -> tuple[int, int | None]:
        """Start a worker with these descriptors; returns its pid and, where there are any, a pidfd."""
        answer, handles = self._ask({"worker": number}, fds)
        self._workers.add(answer["pid"])
        return answer["pid"], handles[0] if handles else None

    def end(self, pid: int) -> int | None:
        """Kill a worker, with what it started, unless it has ended; its wait status, None if it is not known."""
        status = self._ask({"end": pid})[0]["status"]
        self._workers.discard(pid)
        return status

    def close(self) -> None:
        """End it, and with it every worker that is left; takes some seconds at most, whatever it does."""
        if self.owner != os.getpid():
            self.leave()
            return
        seconds = FAREWELL_SECONDS if self._workers else IDLE_SECONDS if self.awake else 0
        self._let_go()
        try:
            self._process.send_signal(signal.SIGCONT)  # a stopped one would not see the end of its socket
            self._process.wait(seconds)  # it ends its workers, and what they started
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._kill()
            if self._cache is not None:
                shutil.rmtree(self._cache, ignore_errors=True)

    def leave(self) -> None:
        """See ``forks.Owned``."""
        self._let_go()
        self._process.returncode = 0  # not a child of this process, so nobody may wait for it

    def _let_go(self) -> None:
        self._socket.close()
        for handle in self._handles:  # of an answer that did not come as a whole
            os.close(handle)
        self._handles.clear()

    def _kill(self) -> None:
        self._process.kill()  # nothing, if it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_SECONDS)

    def _ask(self, request: dict[str, int], fds: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        """Send a request, and wait for its answer. Ctrl-C may come between: the answer is then dropped by the next."""
        while not self._lock.acquire(timeout=SLICE_SECONDS):
            interrupts.check()
        try:
            self._send(request, fds)
            while True:
                answer, handles = self._receive()
                if answer["number"] == self._number:
                    return answer, handles
                self._drop(handles)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        finally:
            self._lock.release()

    def _send(self, request: dict[str, int], fds: Sequence[int]) -> None:
        self._number += 1
        line = json.dumps({**request, "number": self._number, "fds": len(fds)}) + "\n"
        socket.send_fds(self._socket, [line.encode()], list(fds), socket.MSG_DONTWAIT)

    def _hear(self) -> None:
        """Take in what it has said meanwhile, unless somebody waits for an answer."""
        if self._lock.acquire(blocking=False):
            try:
                while _readable(self._socket, 0):
                    self._drop(self._receive()[1])
            except (OSError, ValueError):  # it has ended, or this process let go of it
                pass
            finally:
                self._lock.release()

    def _drop(self, handles: Sequence[int]) -> None:
        """End workers that nobody waits for any more."""
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next answer. Each is a line; a descriptor comes with the bytes of its answer or of one before it."""
        while b"\n" not in self._read:
            self._await()
            message, handles, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1, CLOEXEC)
            self._handles += handles
            if not message:
                raise ConnectionResetError("it closed its socket")
            self._read += message
        line, _, self._read = self._read.partition(b"\n")
        answer = json.loads(line)
        count = answer.get("handles", 0)
        handles, self._handles = self._handles[:count], self._handles[count:]
        self._answered = max(self._answered, answer["number"])
        self.harmful = answer.get("harmful", self.harmful)
        return answer, handles

    def _await(self) -> None:
        """Wait until there is something to read, as long as it does anything at all."""
        stillness = Stillness(self._process.pid)
        while not _readable(self._socket, SLICE_SECONDS):
            interrupts.check()
            seconds = stillness.seconds()
            if stillness.stopped and seconds > STOPPED_SECONDS / 2:
                self._process.send_signal(signal.SIGCONT)
            if seconds > (STOPPED_SECONDS if stillness.stopped else SILENT_SECONDS) or stillness.total > MOST_SECONDS:
                self._stopped = stillness.stopped
                raise TimeoutError(f"did nothing for {seconds:.0f} s and was killed")

    def _lost(self, error: Exception) -> StartError:
        """The error to raise when it is of no use any more; it has ended then."""
        if isinstance(error, ConnectionError):  # it ends by itself, and its status says why
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(FAREWELL_SECONDS)
        self._kill()
        silent = isinstance(error, TimeoutError)
        why, cause = ended(self._process.returncode)
        outside = bool(self.harmful) or (self._stopped if silent else cause is Cause.ANYBODY)
        why = str(error) if silent else f"{why} ({error})"
        return StartError(
            f"the process that starts workers {why}; what it wrote to stderr says why. Run again, or use "
            "engine='inline'",
            outside=outside,
        )


def _fill_standard() -> None:
    """Lead standard streams that are closed nowhere, so that nothing takes their numbers and is printed to."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _standard(fd: int) -> int:
    """What a child has for a standard stream: nothing if this process had opened something else in its place."""
    return fd if os.get_inheritable(fd) else subprocess.DEVNULL


def _readable(end: socket.socket, seconds: float) -> bool:
    poller = select.poll()
    poller.register(end, select.POLLIN)
    return bool(poller.poll(1000 * seconds))
