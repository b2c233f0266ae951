"""The caller's side of the process that starts workers: how it is started, asked, kept between runs, and ended.

The caller's process is never forked. ``close`` ends what is kept.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.engines.processes.messages import ended
from phalanx.engines.processes.serialization import needed
from phalanx.errors import StartError, UsageError
from phalanx.frameworks.registry import RECORDS, in_use, reduced
from phalanx.surroundings import interrupts, presence, sources

ATTEMPTS = 5  # zygotes that are tried to start a worker
MESSAGE_BYTES = 128  # of each message, padded
WHOLE = getattr(socket, "MSG_CMSG_CLOEXEC", 0) | socket.MSG_WAITALL  # the caller's child programs inherit none
FAREWELL_SECONDS, KILLED_SECONDS = 3.0, 5.0
SLICE_SECONDS = 0.05  # between two looks at Ctrl-C
SILENT_SECONDS = 600.0  # it answers within this time, however slow the machine is
TUNED = "glibc.malloc.hugetlb=1"  # big blocks in huge pages; user code sees its own environment
# Runs before any other import: until the path is set, only ``sys`` is sure to be the right module.
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
    """The caller's side of a zygote, which answers requests in order. Implements ``presence.Owned``.

    Starting it does not wait until it has imported everything; the first worker does.

    Parameters
    ----------
    frameworks, modules : sequence of str
        What workers need. Modules are imported as far as the process can still be forked after that.
    """

    def __init__(self, frameworks: Sequence[str], modules: Sequence[str]) -> None:
        if not sys.executable:
            raise UsageError(
                "worker processes need the Python interpreter, and sys.executable is empty here; set it, or use "
                "engine='inline' (same answer)"
            )
        _fill_standard()
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        # For what workers compile; gone afterwards. Who compiles makes it: while they import, nobody could remove it.
        self._folder = os.path.join(tempfile.gettempdir(), f"phalanx-{secrets.token_hex(8)}")
        self._process = subprocess.Popen(
            [*command(theirs.fileno(), os.getpid(), self._folder, frameworks), *modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_standard(1),
            stderr=_standard(2),
            start_new_session=True,
            env=variables(),
        )
        theirs.close()
        self._due = 1  # answers that are to come; the first says that it can begin
        self._workers: set[int] = set()  # the pids of those that were started, and not ended through it
        self._packages = {"phalanx", *frameworks, *map(sources.package_of, modules)}
        presence.own(self)

    @property
    def usable(self) -> bool:
        """Whether it runs, and belongs to this process (not to the parent of a fork)."""
        return self._process.poll() is None

    def outgrown(self, frameworks: Sequence[str], modules: Sequence[str]) -> bool:
        """Whether another would serve better: it has no workers, and has not imported a package of these."""
        return not self._workers and not self._packages.issuperset([*frameworks, *map(sources.package_of, modules)])

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

    def spawn(self, lives: str, number: int, fds: Sequence[int]) -> tuple[int, int | None]:
        """Start a worker with these descriptors; returns its pid and, where there are any, a pidfd."""
        answer, handles = self._ask({"lives": lives, "worker": number}, fds)
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
        self._socket.close()
        try:
            self._process.send_signal(signal.SIGCONT)  # a stopped one would not see the end of its socket
            self._process.wait(seconds)  # it ends its workers, and what they started
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._kill()
            shutil.rmtree(self._folder, ignore_errors=True)

    def leave(self) -> None:
        self._socket.close()
        self._process.returncode = 0  # not a child of this process, so nobody may wait for it

    def _kill(self) -> None:
        self._process.kill()  # nothing, if it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_SECONDS)

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        """Send a request, and wait for its answer. Ctrl-C meanwhile ends the zygote."""
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

    def _send(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        message = json.dumps(request).encode().ljust(MESSAGE_BYTES)
        socket.send_fds(self._socket, [message], list(fds), socket.MSG_DONTWAIT)
        self._due += 1

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next answer, and descriptors that come with it."""
        deadline = time.monotonic() + SILENT_SECONDS
        while not _readable(self._socket, SLICE_SECONDS):
            interrupts.check()
            self._process.send_signal(signal.SIGCONT)  # nothing happens, unless it was stopped
            if time.monotonic() > deadline:
                raise TimeoutError(f"did not answer for {SILENT_SECONDS:.0f} s and was killed")
        message, handles, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1, WHOLE)
        if not message:
            raise ConnectionResetError("it closed its socket")
        self._due -= 1
        return json.loads(message), handles

    def _lost(self, error: Exception) -> StartError:
        """Make sure that it has ended; returns the error to raise for that."""
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
    """What is kept for the next run: a zygote, and what it imports for workers. Implements ``presence.Owned``."""

    def __init__(self) -> None:
        self.leave()
        presence.own(self)

    def leave(self) -> None:
        self._lock = threading.RLock()
        self._zygote: Zygote | None = None
        self._modules: list[str] = []

    def zygote(self) -> Zygote:
        """The zygote, started if there is none."""
        with self._lock:
            if self._zygote is None or not self._zygote.usable:
                self.close()
                self._zygote = Zygote(in_use(), self._modules)
                atexit.unregister(self.close)
                atexit.register(self.close)
            return self._zygote

    def prepare(self, definition: Definition, functions: Sequence[Any] = (), ours: Sequence[str] = ()) -> None:
        """Start a zygote beside the caller, which imports the packages of the recipe's code, unless there is one.

        ``functions``: what else workers will call, as those of evaluations. ``ours``: modules of phalanx that they
        need beside those of every worker.

        Raises
        ------
        OSError, UsageError
            No process can be started here.
        """
        code = [*(value for value in vars(definition).values() if callable(value)), *functions]
        modules = [*ours, *packaged([*needed(code, reduced), type(definition.data).__module__])]
        with self._lock:
            self._modules = list(dict.fromkeys([*self._modules, *modules]))
            if self._zygote is not None and self._zygote.outgrown(in_use(), modules):
                self.close()
            self.zygote()

    def spawn(self, lives: str, number: int, fds: Sequence[int]) -> tuple[Zygote, int, int | None]:
        """Start a worker; returns its zygote, pid and pidfd. A zygote that has ended is started again, at any moment.

        ``lives``: the module whose ``live`` the worker calls.

        Raises
        ------
        StartError
            No zygote lives long enough.
        """
        for attempt in range(ATTEMPTS):
            try:
                zygote = self.zygote()
                return zygote, *zygote.spawn(lives, number, fds)
            except StartError as error:
                if attempt == ATTEMPTS - 1:
                    raise StartError(f"{ATTEMPTS} times in a row, the last time: {error}") from error
        raise AssertionError

    @property
    def awake(self) -> bool:
        """Whether a worker would start at once."""
        return self._zygote is not None and self._zygote.usable and self._zygote.awake

    def close(self) -> None:
        """End the zygote that is kept."""
        with self._lock:
            zygote, self._zygote = self._zygote, None
            if zygote is not None:
                zygote.close()


WARM = Warm()


def command(*arguments: object) -> list[str]:
    """The command that starts a zygote: its ``main`` gets these arguments."""
    code = START.format(path=_path(), arguments=", ".join(map(repr, arguments)))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-c", code]


def packaged(names: Iterable[str]) -> list[str]:
    """Those of these modules that belong to installed packages which not every process has, in order of import."""
    known = {"numpy", *sys.stdlib_module_names, *(record.module for record in RECORDS.values())}
    wanted = {name for name in names if sources.package_of(name) not in known}
    files = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()) if name in wanted]
    return [name for name, file in files if file and sources.is_installed(file)]


def variables() -> dict[str, str]:
    """The environment of a zygote."""
    tunables = filter(None, [os.environ.get("GLIBC_TUNABLES"), TUNED])
    return {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}


def _path() -> list[str]:
    """The import path without relative entries: the standard library, phalanx, installed packages, the rest.

    So a user's file that has the name of a library is not imported in its place.
    """
    home = os.path.dirname(os.__file__)
    first = (home, os.path.join(home, "lib-dynload"), os.path.dirname(os.path.dirname(sources.OURS)))
    entries = [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]
    return [*first, *sorted(entries, key=lambda entry: not sources.is_installed(os.path.join(entry, "")))]


def _fill_standard() -> None:
    """Open closed standard streams on the null device, so that no other file takes their numbers and is printed to."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _standard(fd: int) -> int:
    """What a child gets as a standard stream: nothing if this process has opened something else in its place."""
    return fd if os.get_inheritable(fd) else subprocess.DEVNULL


def _readable(end: socket.socket, seconds: float) -> bool:
    poller = select.poll()
    poller.register(end, select.POLLIN)
    return bool(poller.poll(1000 * seconds))
