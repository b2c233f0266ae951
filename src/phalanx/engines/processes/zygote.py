"""The zygote: a fresh interpreter that has imported the framework and forks workers in milliseconds.

It never runs user code, touches no GPU and holds no run's memory. What else its workers will import it imports when it
is told which modules those are, before it forks the first of them, or once it has none. It serves one parent over an
inherited socket, one request at a time, and ends with it: at the end of the socket, or when the parent's pidfd says
so. Its workers end with it (``PR_SET_PDEATHSIG``, bound to its only thread). Whatever user code started in a worker
ends with the worker: it is in the worker's process group, or, if it left that, it comes to the zygote as an orphan (on
Linux). A worker adopts its own orphans while it lives, so those of the zygote are what workers left that have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from phalanx.engines.processes import worker
from phalanx.engines.reading import reader
from phalanx.frameworks.registry import prepare_process
from phalanx.shared.memory import keep_freed
from phalanx.surroundings import imports

PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
MESSAGE_BYTES = 4096
RECEIVING = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
DESCRIPTORS = 10  # channel, output, errors, environment_memory, parcel, arena, mailbox, orders, base, inputs


def main(fd: int, parent: int, cache: str | None) -> None:
    """Serve ``parent`` over ``fd`` until it ends; never returns. ``cache``: where jax keeps programs; None: no jax."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    watched = [fd, *_pidfd(parent)]
    if os.getppid() == parent:
        prepare_process(cache)
        gc.collect()
        gc.freeze()  # what is shared with workers stays shared, and their own objects are found quickly
        if sys.platform == "linux":
            # The signal is bound to a thread that may end, so from here on we watch; if we are stopped it wakes us.
            _on_death_of_parent(signal.SIGCONT)
            adopt_orphans()
        with socket.socket(fileno=fd) as server:
            Nursery(server, watched, parent).serve()
    if cache is not None:  # the parent may have had no time to
        shutil.rmtree(cache, ignore_errors=True)
    os._exit(0)


class Nursery:
    """The zygote at work.

    Parameters
    ----------
    server : socket.socket
    watched : list of int
        Its descriptor, and what tells that the parent has ended.
    parent : int
    """

    def __init__(self, server: socket.socket, watched: list[int], parent: int) -> None:
        self._server = server
        self._watched = watched
        self._parent = parent
        self._wanted: dict[str, Any] | None = None  # what is to be imported
        self._alive: dict[int, int] = {}  # pid of each worker: its pidfd, or -1
        self._statuses: dict[int, int] = {}  # of workers that ended and were not asked for yet
        self._read, self._fds = b"", list[int]()  # of requests that have not come as a whole
        self._poller = select.poll()
        for fd in watched:
            self._poller.register(fd, select.POLLIN)

    def serve(self) -> None:
        """Answer requests until the parent ends; then end all workers."""
        with contextlib.suppress(ConnectionError):  # it closed its end before it read an answer
            self._answer_all()
        for pid in list(self._alive):
            self._end(pid)

    def _answer_all(self) -> None:
        self._say(0)
        while True:
            ready = {fd for fd, _ in self._poller.poll()}
            self._clear_away()
            if ready & set(self._watched[1:]):
                break
            if self._server.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(self._server, MESSAGE_BYTES, DESCRIPTORS, RECEIVING)
                for received in fds:  # programs that user code starts do not inherit them
                    os.set_inheritable(received, False)
                if not message:
                    break
                self._fds += fds
                *lines, self._read = (self._read + message).split(b"\n")
                for line in lines:  # several, if the parent did not wait for some of their answers
                    self._answer(json.loads(line))
            if not self._statuses and not self._import():  # else the parent is about to ask for the end of some
                break

    def _import(self) -> bool:
        """Import what is wanted, unless there are workers; False if this process may fork no more after it."""
        if self._wanted is None or self._alive:
            return True
        wanted, self._wanted = self._wanted, None
        _on_death_of_parent(signal.SIGKILL)  # nobody watches now, and nothing would be left
        if os.getppid() != self._parent:
            return False
        os.environ.clear()
        os.environ.update(wanted["environment"])
        sys.path[:] = wanted["path"]
        with _silent():  # what an import prints the caller has seen
            harmful = imports.take(wanted["modules"], wanted["left_out"])
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _on_death_of_parent(signal.SIGCONT)
        if harmful:
            end_orphans(())
            self._say(0, harmful=harmful)
        return not harmful

    def _answer(self, request: dict[str, int]) -> None:
        if "end" in request:
            self._end(request["end"])
            self._say(request["number"], status=self._statuses.pop(request["end"], None))
            return
        zygote, fds = os.getpid(), self._fds[: request["fds"]]
        self._fds = self._fds[request["fds"] :]
        if "import" in request:
            self._wanted = json.loads(os.pread(fds[0], request["import"], 0))
            os.close(fds[0])
        if not self._import():
            raise ConnectionResetError  # ends it
        if "import" in request:
            self._say(request["number"])
            return
        pid = os.fork()
        if pid == 0:
            inherited = [*self._watched, *self._fds, *(fd for fd in self._alive.values() if fd >= 0)]
            _become_worker(zygote, request["worker"], fds, inherited)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(PermissionError):  # the child does the same; who comes first does not matter
            os.setpgid(pid, pid)
        handles = _pidfd(pid)
        for handle in handles:
            self._poller.register(handle, select.POLLIN)
        self._statuses.pop(pid, None)  # of an earlier process that had this number
        self._alive[pid] = handles[0] if handles else -1
        self._say(request["number"], handles, pid=pid)

    def _say(self, number: int, handles: Sequence[int] = (), **facts: Any) -> None:
        """Answer request ``number``; 0 says that there may be some."""
        line = json.dumps({"number": number, "handles": len(handles), **facts}) + "\n"
        socket.send_fds(self._server, [line.encode()], handles)

    def _clear_away(self) -> None:
        """Take in workers that have ended by themselves."""
        for pid in list(self._alive):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._end(pid)

    def _end(self, pid: int) -> None:
        """Kill a worker and what it started, and wait for it. It is our child, so the pid is safe."""
        if pid in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._statuses[pid] = os.waitpid(pid, 0)[1]
            handle = self._alive.pop(pid)
            end_orphans(self._alive)
            if handle >= 0:
                self._poller.unregister(handle)
                os.close(handle)


def _pidfd(pid: int) -> list[int]:
    """A descriptor that is readable once a process has ended; none where there is no such thing."""
    if not hasattr(os, "pidfd_open"):
        return []
    with contextlib.suppress(OSError):
        return [os.pidfd_open(pid)]
    return []


def _become_worker(zygote: int, number: int, fds: Sequence[int], inherited: Sequence[int]) -> None:
    """Everything a forked child does; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        _die_with_parent(zygote)
        adopt_orphans()
        keep_freed()
        for fd in inherited:
            os.close(fd)
        channel, output, errors, *memories = fds
        sys.stdout, sys.stderr = _text(output, 1), _text(errors, 2)
        if number < 0:
            reader.live(channel, memories, -1 - number)
        else:
            worker.live(channel, memories, number)
        code = 0
    except Exception:  # none of user code, which is told: a fault of phalanx, to be seen
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _text(fd: int, standard: int) -> io.TextIOWrapper:
    """Make ``fd`` a standard stream of this process, written line by line."""
    os.dup2(fd, standard)
    os.close(fd)
    return io.TextIOWrapper(
        os.fdopen(standard, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True, write_through=False
    )


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What is written to the standard streams' descriptors is dropped."""
    sys.stdout.flush()
    kept, nothing = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    try:
        for standard in (1, 2):
            os.dup2(nothing, standard)
        yield
        sys.stdout.flush()
    finally:
        for standard, fd in zip((1, 2), kept, strict=True):
            os.dup2(fd, standard)
            os.close(fd)
        os.close(nothing)


def _on_death_of_parent(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _die_with_parent(zygote: int) -> None:
    """The kernel ends this process with its parent, whatever it is doing then."""
    _on_death_of_parent(signal.SIGKILL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000)  # naps end on time
    if os.getppid() != zygote:  # it died before that
        os._exit(1)


PR_SET_CHILD_SUBREAPER = 36
MOST_SECONDS = 2.0  # that a process may take to be gone once it was killed; some wait for hardware
NAP_SECONDS = 0.001


def adopt_orphans() -> None:
    """From here on, processes below this one become its children when their parents end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_orphans(spared: Collection[int]) -> None:
    """Kill all children but those that are ``spared``, and what comes here because they end, in turn."""
    deadline = time.monotonic() + MOST_SECONDS
    while (left := children().difference(spared)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(PermissionError):  # a program that runs as somebody else
                os.kill(pid, signal.SIGKILL)  # our child, and not waited for: the pid is safe
        waiting = [os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in left]
        if any(waiting):
            time.sleep(NAP_SECONDS)


def children() -> set[int]:
    """The children of this process, those that ended included; none where /proc does not tell."""
    found = set[int]()
    for file in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found.update(map(int, file.read_text().split()))
    return found
