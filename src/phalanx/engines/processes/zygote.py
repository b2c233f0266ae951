"""The zygote: a fresh interpreter that has imported the framework and forks workers in milliseconds.

It never runs user code, touches no GPU and holds no run's memory. It also imports what else its workers will need. A
package that harms it is left to the workers: it starts again without that package. It serves one parent over an
inherited socket, request by request, and ends with it: at the end of the socket, or when the parent's pidfd says so.
Its workers end with it (``PR_SET_PDEATHSIG``, bound to its only thread). What user code started in a worker is in the
worker's process group. It ends with the worker, unless it has left that group for a session of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import itertools
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from phalanx.engines import reading  # noqa: F401  # all of these are what children need; each would import it
from phalanx.engines.processes import tasks, worker  # noqa: F401
from phalanx.frameworks.registry import prepare_process
from phalanx.shared.memory import Memories, keep_freed
from phalanx.surroundings import sources

PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
MESSAGE_BYTES = 128  # of each message, padded
RECEIVING = getattr(socket, "MSG_CMSG_CLOEXEC", 0) | socket.MSG_WAITALL
TASKS, DESCRIPTORS = pathlib.Path("/proc/self/task"), pathlib.Path("/proc/self/fd")
MOST_RECEIVED = 3 + len(Memories._fields)  # descriptors with a request: channel, output, errors, memories


def main(fd: int, parent: int, folder: str, frameworks: Sequence[str]) -> None:
    """Serve ``parent`` over ``fd`` until it ends; never returns. ``folder``: for what workers compile.

    The arguments of the command are modules to be imported, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    modules, sys.argv[1:] = sys.argv[1:], []
    watched = [fd, *_pidfd(parent)]
    if os.getppid() == parent:
        prepare_process(folder)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # the caller saw it
            with contextlib.suppress(Exception):  # workers will say what is wrong
                prepare_process(folder, frameworks)
            kept = import_all(modules)
        if kept != modules:
            os.execv(sys.executable, [*sys.orig_argv[: -len(modules)], *kept])
        os.set_inheritable(fd, False)
        for number in (signal.SIGINT, signal.SIGTERM):  # a scheduler may send SIGTERM to all; workers end with us
            signal.signal(number, signal.SIG_IGN)
        gc.collect()
        gc.freeze()  # what is shared with workers stays shared, and their own objects are found quickly
        # The signal is bound to a thread that may end, so from here on we watch; if we are stopped it wakes us.
        _control(PR_SET_PDEATHSIG, signal.SIGCONT)
        with socket.socket(fileno=fd) as server:
            ForkServer(server, watched).serve()
    shutil.rmtree(folder, ignore_errors=True)  # the parent may have had no time to
    os._exit(0)


class ForkServer:
    """Forks a worker for each request of the parent, and kills workers and reports how they ended when it asks.

    Workers that are left when the parent has ended are killed.

    Parameters
    ----------
    server : socket.socket
    watched : list of int
        The server's descriptor, and those that tell that the parent has ended.
    """

    def __init__(self, server: socket.socket, watched: list[int]) -> None:
        self._server = server
        self._watched = watched
        self._alive: dict[int, int] = {}  # pid of each worker: its pidfd, or -1
        self._statuses: dict[int, int] = {}  # of workers that ended, until asked for
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
        self._say()
        while True:
            ready = {fd for fd, _ in self._poller.poll()}
            self._clear_away()
            if ready & set(self._watched[1:]):
                break
            if self._server.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(self._server, MESSAGE_BYTES, MOST_RECEIVED, RECEIVING)
                for received in fds:  # programs that user code starts do not inherit them
                    os.set_inheritable(received, False)
                if not message:
                    break
                self._answer(json.loads(message), fds)

    def _answer(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        if "end" in request:
            self._end(request["end"])
            self._say(status=self._statuses.pop(request["end"], None))
            return
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            inherited = [*self._watched, *(fd for fd in self._alive.values() if fd >= 0)]
            _become_worker(zygote, request["lives"], request["worker"], fds, inherited)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(PermissionError):  # the child does the same; who comes first does not matter
            os.setpgid(pid, pid)
        handles = _pidfd(pid)
        for handle in handles:
            self._poller.register(handle, select.POLLIN)
        self._statuses.pop(pid, None)  # of an earlier process that had this number
        self._alive[pid] = handles[0] if handles else -1
        self._say(handles, pid=pid)

    def _say(self, handles: Sequence[int] = (), **facts: Any) -> None:
        """Answer a request. The first answer comes unasked, and says that requests may come."""
        socket.send_fds(self._server, [json.dumps(facts).encode().ljust(MESSAGE_BYTES)], handles)

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
            if handle >= 0:
                self._poller.unregister(handle)
                os.close(handle)


def import_all(modules: list[str]) -> list[str]:
    """Import what workers need; returns the modules, without those of the first package that does harm.

    An import that only makes objects does no harm. An import that starts a thread does: a child would lack the thread,
    and the locks that it held would stay locked. So does one that opens a device, a socket or the like, as parent and
    child would then both use it, or one that fails. Where there is no /proc to show harm, nothing is imported.
    """
    if not TASKS.exists():
        return modules
    before = _unshared()
    for package, names in itertools.groupby(modules, sources.package_of):
        try:
            for name in names:
                importlib.import_module(name)
            harmful = bool(_unshared() - before)
        except BaseException:
            harmful = True
        if harmful:
            return [name for name in modules if sources.package_of(name) != package]
    return modules


def _unshared() -> set[str]:
    """What this process has and its forked children could not share: threads, processes, devices, the user's code."""
    pid = os.fork()  # libraries that know of forks end their threads now, as OpenBLAS does
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    resources = set(sources.note())
    for task in TASKS.iterdir():
        resources.update([task.name, *(task / "children").read_text().split()])
    for each in DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # it was the descriptor of the listing
            mode = os.fstat(int(each.name)).st_mode
            if not stat.S_ISDIR(mode):  # files that are open have one place for all who inherit them
                resources.add(os.readlink(each))
    return resources - {"/dev/null", "/dev/urandom", "/dev/random"}


def _pidfd(pid: int) -> list[int]:
    """A descriptor that is readable once a process has ended; none where there is no such thing."""
    if not hasattr(os, "pidfd_open"):
        return []
    with contextlib.suppress(OSError):
        return [os.pidfd_open(pid)]
    return []


def _become_worker(zygote: int, lives: str, number: int, fds: Sequence[int], inherited: Sequence[int]) -> None:
    """Everything a forked child does; never returns. ``lives``: the module whose ``live`` it calls."""
    code = 1
    try:
        os.setpgid(0, 0)
        _control(PR_SET_PDEATHSIG, signal.SIGKILL)  # whatever it is doing then
        _control(PR_SET_TIMERSLACK, 1000)  # naps end on time
        if os.getppid() != zygote:  # it died before that
            os._exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        keep_freed()
        for fd in inherited:
            os.close(fd)
        channel, output, errors, *memories = fds
        sys.stdout, sys.stderr = _text(output, 1), _text(errors, 2)
        importlib.import_module(lives).live(channel, memories, number)
        code = 0
    except Exception:  # a fault of phalanx, to be seen: errors of user code are sent to the caller
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


def _control(option: int, value: int) -> None:
    """Ask the kernel for something, where it is Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
