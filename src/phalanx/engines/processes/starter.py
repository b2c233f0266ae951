"""The caller's side of the process that starts workers: how it is started, asked, kept between runs, and ended.

The caller's process is never forked. ``close`` ends what is kept.
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
import time
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.engines.processes.handle import WorkerHandle
from phalanx.engines.processes.messages import ended
from phalanx.engines.processes.serialization import needed
from phalanx.errors import StartError, UsageError
from phalanx.frameworks.registry import in_use, reduced
from phalanx.shared.memory import Memory
from phalanx.surroundings import interrupts, presence, sources

CAPABLE = hasattr(select, "poll")  # of having other processes work for a run
ATTEMPTS = 5  # zygotes to start a worker with
MESSAGE_BYTES = 4096
CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # programs that the caller starts do not inherit what was received
FAREWELL_SECONDS, KILLED_SECONDS = 3.0, 5.0
SLICE_SECONDS = 0.05  # between two looks at Ctrl-C
SILENT_SECONDS = 600.0  # in which it answers, as slow as the machine may be
TUNED = "glibc.malloc.hugetlb=1"  # big blocks in huge pages; user code sees its own environment
# Runs before any other import: until the path is set, ``sys`` alone comes from where it should.
START = """
import sys
sys.path[:] = {path!r}
import ctypes
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: until everything is imported
from phalanx.engines.processes.zygote import main
main({arguments})
"""


class Zygote:
    """The caller's side of a zygote: it answers requests in their order.

    Its start takes as long as importing the framework, but does not wait for that; the first worker does.

    Attributes
    ----------
    wanted : dict
        What it was told to import.
    harmful : list of str
        Packages that it imported, so that it could not be forked any more, and ended.
    """

    def __init__(self) -> None:
        if not sys.executable:
            raise UsageError(
                "worker processes need the Python interpreter, and sys.executable is empty here; set it, or use "
                "engine='inline' (same answer)"
            )
        _fill_standard()
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._folder = tempfile.mkdtemp(prefix="phalanx-")  # for what workers compile; gone afterwards
        self._process = subprocess.Popen(
            command(theirs.fileno(), os.getpid(), self._folder),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_standard(1),
            stderr=_standard(2),
            start_new_session=True,
            env=variables(),
        )
        theirs.close()
        self._due = 1  # answers that are to come; the first is that it can begin
        self._workers: set[int] = set()  # the pids of those that were started, and not ended through it
        self.wanted: dict[str, Any] = {}
        self.harmful: list[str] = []
        self._read, self._handles = b"", list[int]()  # answers, and descriptors that came with them
        presence.own(self)

    @property
    def usable(self) -> bool:
        """Whether it runs, and belongs to this process (not to the parent of a fork)."""
        return self._process.poll() is None

    @property
    def awake(self) -> bool:
        """Whether it has imported what it needs, so that workers start at once."""
        if self._lock.acquire(blocking=False):  # else somebody waits for an answer
            try:
                while _readable(self._socket, 0):
                    self._receive()
            except (OSError, ValueError):  # it has ended, or this process let go of it
                return False
            finally:
                self._lock.release()
        return not self._due

    def want(self, wanted: dict[str, Any]) -> None:
        """Have it import what is wanted before it starts the next worker; does not wait for that."""
        self.wanted = wanted
        content = json.dumps({"environment": dict(os.environ), "path": _path(), **wanted}).encode()
        memory = Memory(len(content))
        try:
            memory.write(content)
            with self._lock:
                self._send({"import": len(content)}, [memory.fd])
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
        seconds = FAREWELL_SECONDS if self.awake or self._workers else 0  # else it is importing
        self._let_go()
        try:
            self._process.send_signal(signal.SIGCONT)  # a stopped one would not see the end of its socket
            self._process.wait(seconds)  # it ends its workers, and what they started
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._kill()
            shutil.rmtree(self._folder, ignore_errors=True)

    def leave(self) -> None:
        """See ``presence.Owned``."""
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
        """Send a request, and wait for its answer. Who breaks that off, by Ctrl-C, ends the zygote."""
        while not self._lock.acquire(timeout=SLICE_SECONDS):
            interrupts.check()
        answer, handles = dict[str, Any](), list[int]()
        try:
            self._send(request, fds)
            while self._due:
                answer, handles = self._receive()
            return answer, handles
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        except BaseException:  # the answer that comes now would be taken for that of the next request
            self._kill()
            raise
        finally:
            self._lock.release()

    def _send(self, request: dict[str, int], fds: Sequence[int]) -> None:
        line = json.dumps({**request, "fds": len(fds)}) + "\n"
        socket.send_fds(self._socket, [line.encode()], list(fds), socket.MSG_DONTWAIT)
        self._due += 1

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next answer. Each is a line; a descriptor comes with the bytes of its answer or of one before it."""
        deadline = time.monotonic() + SILENT_SECONDS
        while b"\n" not in self._read:
            while not _readable(self._socket, SLICE_SECONDS):
                interrupts.check()
                self._process.send_signal(signal.SIGCONT)  # nothing happens, unless it was stopped
                if time.monotonic() > deadline:
                    raise TimeoutError(f"did not answer for {SILENT_SECONDS:.0f} s and was killed")
            message, handles, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1, CLOEXEC)
            self._handles += handles
            if not message:
                raise ConnectionResetError("it closed its socket")
            self._read += message
        line, _, self._read = self._read.partition(b"\n")
        answer = json.loads(line)
        count = answer.get("handles", 0)
        handles, self._handles = self._handles[:count], self._handles[count:]
        self.harmful = answer.get("harmful", self.harmful)
        self._due -= 1
        return answer, handles

    def _lost(self, error: Exception) -> StartError:
        """The error to raise when it is of no use any more; it has ended then."""
        if isinstance(error, ConnectionError):  # it ends by itself, and its status says why
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(FAREWELL_SECONDS)
        self._kill()
        why = str(error) if isinstance(error, TimeoutError) else f"{ended(self._process.returncode)[0]} ({error})"
        return StartError(
            f"the process that starts workers {why}; what it wrote to stderr says why. Run again, or use "
            "engine='inline'"
        )


class Warm:
    """What is kept for the next run: a zygote, and what zygotes import for workers.

    Attributes
    ----------
    left_out : set of str
        The packages that each worker imports by itself, as a zygote could not be forked after that.
    """

    def __init__(self) -> None:
        self.leave()
        presence.own(self)

    def leave(self) -> None:
        """See ``presence.Owned``."""
        self._lock = threading.RLock()
        self._zygote: Zygote | None = None
        self._modules: dict[str, str] = {}  # what workers import, and from where
        self.left_out: set[str] = set()

    def zygote(self) -> Zygote:
        """The zygote, started if there is none."""
        with self._lock:
            zygote = self._zygote
            if zygote is None or not zygote.usable:
                self.close()
                zygote = self._zygote = Zygote()
                atexit.unregister(self.close)
                atexit.register(self.close)
            self._tell(zygote)
            return zygote

    def _tell(self, zygote: Zygote) -> None:
        kept = {name: file for name, file in self._modules.items() if sources.package_of(name) not in self.left_out}
        wanted = {"frameworks": in_use(), "modules": kept}
        if wanted != zygote.wanted and any(wanted.values()):
            with contextlib.suppress(StartError):  # it has ended, which shows elsewhere
                zygote.want(wanted)

    def prepare(self, definition: Definition) -> None:
        """Start the zygote if there is none, and have it import what the recipe's code comes from, beside the caller.

        Raises
        ------
        OSError, UsageError
            No process can be started here.
        """
        self.zygote()
        code = [value for value in vars(definition).values() if callable(value)]
        self.need(sources.installed([*needed(code, reduced), type(definition.data).__module__]))

    def need(self, modules: Mapping[str, str]) -> None:
        """Have zygotes import these modules, which lie in these files, before their next workers."""
        with self._lock:
            self._modules |= modules
            if self._zygote is not None and self._zygote.usable:
                self._tell(self._zygote)

    def handle(self, number: int, memories: Sequence[int]) -> WorkerHandle:
        """A new worker; its zygote is started again if it has ended, at whatever moment.

        Raises
        ------
        StartError
            No zygote lives long enough.
        """
        for attempt in range(ATTEMPTS):
            try:
                return WorkerHandle(self.zygote(), number, memories)
            except StartError as error:
                if attempt == ATTEMPTS - 1:
                    raise StartError(f"{ATTEMPTS} times in a row, the last time: {error}") from error
        raise AssertionError

    @property
    def awake(self) -> bool:
        """Whether a worker would start at once."""
        return self._zygote is not None and self._zygote.usable and self._zygote.awake

    def close(self) -> None:
        """End what is kept."""
        with self._lock:
            zygote, self._zygote = self._zygote, None
            if zygote is not None:
                zygote.close()
                self.left_out.update(zygote.harmful)


WARM = Warm()


def command(*arguments: object) -> list[str]:
    """The command that starts a zygote: its ``main`` gets these arguments."""
    code = START.format(path=_path(), arguments=", ".join(map(repr, arguments)))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-c", code]


def variables() -> dict[str, str]:
    """The environment of a zygote."""
    tunables = filter(None, [os.environ.get("GLIBC_TUNABLES"), TUNED])
    return {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}


def _path() -> list[str]:
    """The path of this process without what is relative: the standard library, phalanx, installed packages, the rest.

    So a file of the user's that has the name of a library is not taken for it.
    """
    home = os.path.dirname(os.__file__)
    first = (home, os.path.join(home, "lib-dynload"), os.path.dirname(os.path.dirname(sources.OURS)))
    entries = [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]
    return [*first, *sorted(entries, key=lambda entry: not sources.is_installed(os.path.join(entry, "")))]


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
