"""The zygote: a fresh interpreter that has imported the framework and forks workers in milliseconds.

It never runs user code, touches no GPU and holds no run's memory. It serves one parent over an inherited socket, one
request at a time, and ends with it: at the end of the socket, or when the parent's pidfd says so. Its workers end with
it (``PR_SET_PDEATHSIG``, bound to its only thread). Each worker leads a process group of its own, and whatever user
code started there ends with the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from phalanx.engines import worker
from phalanx.engines.heap import keep_freed
from phalanx.frameworks.opening import prepare_process

PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
MESSAGE_BYTES = 4096
DESCRIPTORS = 6  # channel, output, errors, parcel, arena, mailbox


def main(fd: int, parent: int) -> None:
    """Serve ``parent`` over ``fd`` until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = socket.socket(fileno=fd)
    watched = [server.fileno()]
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(ProcessLookupError):
            watched.append(os.pidfd_open(parent))
    if os.getppid() != parent:
        return
    prepare_process()
    gc.collect()
    gc.freeze()  # what is shared with workers stays shared, and their own objects are found quickly
    server.send(b"{}")
    poller = select.poll()
    for item in watched:
        poller.register(item, select.POLLIN)
    while [item for item, _ in poller.poll()] == [server.fileno()]:
        message, fds, _, _ = socket.recv_fds(server, MESSAGE_BYTES, DESCRIPTORS)
        if not message:
            return
        _serve(server, json.loads(message), fds, watched)


ENDED: dict[int, int] = {}  # wait status of workers that ended and were not asked for yet


def _clear_away() -> None:
    """Take in workers that have ended by themselves, and end what they had started."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        ENDED[found.si_pid] = _end(found.si_pid)


def _serve(server: socket.socket, request: dict[str, int], fds: Sequence[int], watched: Sequence[int]) -> None:
    _clear_away()
    if "end" in request:
        pid = request["end"]
        status = ENDED.pop(pid) if pid in ENDED else _end(pid)
        server.send(json.dumps({"status": status}).encode())
        return
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_worker(zygote, request["worker"], fds, watched)
    with contextlib.suppress(PermissionError):  # the child does the same; who comes first does not matter
        os.setpgid(pid, pid)
    ENDED.pop(pid, None)  # of an earlier process that had this number
    for fd in fds:
        os.close(fd)
    handle = [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else []
    socket.send_fds(server, [json.dumps({"pid": pid}).encode()], handle)
    for fd in handle:
        os.close(fd)


def _end(pid: int) -> int:
    """Kill a worker and what it started, and wait for it; returns the wait status. It is ours, so the pid is safe."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _become_worker(zygote: int, number: int, fds: Sequence[int], watched: Sequence[int]) -> None:
    """Everything a forked child does; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        _die_with_parent(zygote)
        keep_freed()
        for fd in watched:
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
