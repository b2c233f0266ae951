"""The zygote: a fresh interpreter that has imported the framework and forks workers in milliseconds.

It never runs user code, touches no GPU and holds no run's memory. What else its workers will import it imports when it
is told which modules those are, before it forks the first of them, or once it has none. It serves one parent over an
inherited socket, request by request, and ends with it: at the end of the socket, or when the parent's pidfd says
so. Its workers end with it (``PR_SET_PDEATHSIG``, bound to its only thread). What user code started in a worker is
in the worker's process group, and ends with the worker, unless it has left that for a session of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
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
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.engines import reading
from phalanx.engines.processes import worker
from phalanx.frameworks.registry import prepare_process
from phalanx.shared.memory import keep_freed
from phalanx.surroundings import sources

PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
MESSAGE_BYTES = 4096
RECEIVING = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
TASKS, DESCRIPTORS = pathlib.Path("/proc/self/task"), pathlib.Path("/proc/self/fd")
MOST_RECEIVED = 10  # channel, output, errors, environment_memory, parcel, arena, mailbox, orders, base, inputs


def main(fd: int, parent: int, folder: str) -> None:
    """Serve ``parent`` over ``fd`` until it ends; never returns. ``folder``: for what workers compile."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    watched = [fd, *_pidfd(parent)]
    if os.getppid() == parent:
        prepare_process(folder)
        gc.collect()
        gc.freeze()  # what is shared with workers stays shared, and their own objects are found quickly
        if sys.platform == "linux":
            # The signal is bound to a thread that may end, so from here on we watch; if we are stopped it wakes us.
            _on_death_of_parent(signal.SIGCONT)
        with socket.socket(fileno=fd) as server:
            Nursery(server, watched, parent, folder).serve()
    shutil.rmtree(folder, ignore_errors=True)  # the parent may have had no time to
    os._exit(0)


class Nursery:
    """The zygote at work.

    Parameters
    ----------
    server : socket.socket
    watched : list of int
        Its descriptor, and what tells that the parent has ended.
    parent : int
    folder : str
    """

    def __init__(self, server: socket.socket, watched: list[int], parent: int, folder: str) -> None:
        self._server = server
        self._watched = watched
        self._parent, self._folder = parent, folder
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
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # the caller saw it
            harmful = import_all(wanted["frameworks"], wanted["modules"], self._folder)
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _on_death_of_parent(signal.SIGCONT)
        if harmful:
            self._say(harmful=harmful)
        return not harmful

    def _answer(self, request: dict[str, int]) -> None:
        if "end" in request:
            self._end(request["end"])
            self._say(status=self._statuses.pop(request["end"], None))
            return
        zygote, fds = os.getpid(), self._fds[: request["fds"]]
        self._fds = self._fds[request["fds"] :]
        if "import" in request:
            self._wanted = json.loads(os.pread(fds[0], request["import"], 0))
            os.close(fds[0])
        if not self._import():
            raise ConnectionResetError  # ends it
        if "import" in request:
            self._say()
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
        self._say(handles, pid=pid)

    def _say(self, handles: Sequence[int] = (), **facts: Any) -> None:
        """Answer the request; the first answer is that there may be some."""
        line = json.dumps({"handles": len(handles), **facts}) + "\n"
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
            if handle >= 0:
                self._poller.unregister(handle)
                os.close(handle)


def import_all(frameworks: Sequence[str], modules: Mapping[str, str], folder: str) -> list[str]:
    """Import what workers need; a package that did harm, so that this process may fork no more, and what came with it.

    An import that only made objects does none. One does that started a thread, as the thread would be missing in a
    child, together with what it holds locked at that moment; or that opened a device, a socket or the like, which
    parent and child would then both use; or that failed, or found another file than in the caller's process. Where
    /proc does not tell of harm, nothing is imported.
    """
    if not TASKS.exists():
        return []
    with contextlib.suppress(Exception):  # workers will say what is wrong
        prepare_process(folder, frameworks)
    before = _unshared()
    packages: dict[str, list[str]] = {}
    for name in [name for name in modules if name not in sys.modules]:  # in the order of their imports
        packages.setdefault(sources.package_of(name), []).append(name)
    for package, names in packages.items():
        known = set(map(sources.package_of, sys.modules))
        if not all(_imported(name, modules[name]) for name in names) or _unshared() - before:
            came = set(map(sources.package_of, sys.modules)) - known - set(sys.stdlib_module_names)
            return sorted({package} | came)
    return []


def _imported(name: str, origin: str) -> bool:
    """Import a module; False if that failed with some of it run, or found another file. One that is missing is left."""
    try:
        return getattr(importlib.import_module(name).__spec__, "origin", None) == origin
    except BaseException as error:
        return isinstance(error, ModuleNotFoundError) and error.name == name


def _unshared() -> set[str]:
    """What this process has and its forked children could not share: threads, processes, devices, the user's code."""
    pid = os.fork()  # libraries that know of forks end their threads now, as OpenBLAS does
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    found = set(sources.note())
    for task in TASKS.iterdir():
        found.update([task.name, *(task / "children").read_text().split()])
    for each in DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # it was that of the listing
            mode = os.fstat(int(each.name)).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                found.add(os.readlink(each))
    return found - {"/dev/null", "/dev/urandom", "/dev/random"}


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
        keep_freed()
        for fd in inherited:
            os.close(fd)
        channel, output, errors, *memories = fds
        sys.stdout, sys.stderr = _text(output, 1), _text(errors, 2)
        if number < 0:
            reading.live(channel, memories, -1 - number)
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
