"""The zygote: a fresh interpreter that has imported the framework and forks workers in milliseconds.

It never runs user code, touches no GPU and holds no run's memory. It serves one parent over an inherited socket, one
request at a time, and ends with it: at the end of the socket, or when the parent's pidfd says so. Its workers end with
it (``PR_SET_PDEATHSIG``, bound to its only thread). Whatever user code started in a worker ends with the worker: it is
in the worker's process group, or, if it left that, it comes to the zygote as an orphan (on Linux). A worker adopts its
own orphans while it lives, so those of the zygote are what workers left that have ended.
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
from collections.abc import Collection, Sequence

from phalanx.engines.processes import worker
from phalanx.frameworks.registry import prepare_process
from phalanx.shared.heap import keep_freed

PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
MESSAGE_BYTES = 4096
RECEIVING = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
DESCRIPTORS = 8  # channel, output, errors, environment_memory, parcel, arena, mailbox, orders


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
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
            adopt_orphans()
        with socket.socket(fileno=fd) as server:
            Nursery(server, watched).serve()
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
    """

    def __init__(self, server: socket.socket, watched: list[int]) -> None:
        self._server = server
        self._watched = watched
        self._alive: dict[int, int] = {}  # pid of each worker: its pidfd, or -1
        self._statuses: dict[int, int] = {}  # of workers that ended and were not asked for yet
        self._read, self._fds = b"", list[int]()  # of requests that have not come as a whole
        self._poller = select.poll()
        for fd in watched:
            self._poller.register(fd, select.POLLIN)

    def serve(self) -> None:
        """Answer requests until the parent ends; then end all workers."""
        with contextlib.suppress(ConnectionResetError):  # it closed its end before it read an answer
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

    def _answer(self, request: dict[str, int]) -> None:
        if "end" in request:
            self._end(request["end"])
            self._say(request["number"], status=self._statuses.pop(request["end"], None))
            return
        zygote, fds = os.getpid(), self._fds[: request["fds"]]
        self._fds = self._fds[request["fds"] :]
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

    def _say(self, number: int, handles: Sequence[int] = (), **facts: int | None) -> None:
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
        worker.live(channel, memories, number)
        code = 0
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


def _die_with_parent(zygote: int) -> None:
    """The kernel ends this process with its parent, whatever it is doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
