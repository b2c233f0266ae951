"""Messages from workers to the caller's process, and which of several errors is raised there."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle

from phalanx.errors import PhalanxError, RunError, UsageError, WorkerError, safe_str, shortened
from phalanx.plan.lifecycle import Cause

BROKEN_OFF = "stayed in user code after Ctrl-C and was ended"  # a death that the caller caused
NO_TERMINAL = (
    "a debugger found no terminal in a worker process; train with engine='inline', which has the same bits and lets "
    "breakpoint() stop in this process, or use phalanx replay RUN --recipe FILE --step K --replica R --pdb"
)
WHERE = {
    "torn": "the optimizer, so the weights are not those of any step",
    "repaired": "the optimizer; the state is the one before that step",
    "unscheduled": "the scheduler; the step itself was done",
}
FAULTS = frozenset(  # signals that the kernel sends for what a process does itself
    {
        signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP,
        signal.SIGPIPE, signal.SIGXCPU, signal.SIGXFSZ,
    }
)  # fmt: skip


class End(NamedTuple):
    """How a worker ended.

    Attributes
    ----------
    why : str
    cause : Cause
    ready : bool
        Whether it had said that it can begin.
    """

    why: str
    cause: Cause
    ready: bool


@dataclass(frozen=True)
class WorkerMessage:
    """A worker's message: a result, or an error with its cause and traceback."""

    worker: int
    kind: str
    content: Any
    cause: BaseException | None = None
    text: str = ""
    step: int | None = None

    def spelled(self, kind: str) -> str:
        """The error, its step, and where it was raised."""
        return f"{type(self.content).__name__} ({safe_str(self.content)}) at step {self.step} in {WHERE[kind]}"


class Carried:
    """An exception that travels without its constructor, which may want other arguments than ``args``."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _uncarried, (type(self._error), self._error.args, dict(vars(self._error)))


def picklable(error: BaseException) -> Any:
    """``error`` in a form that can be pickled; a stand-in of the same name and text if there is no other."""
    for candidate in (error, Carried(error)):
        try:
            pickle.loads(cloudpickle.dumps(candidate))  # noqa: S301  pickled in the same line
            return candidate
        except Exception:
            continue
    kind = type(error)
    return type(kind.__name__, (RuntimeError,), {"__module__": kind.__module__})(safe_str(error))


def _uncarried(kind: type[BaseException], arguments: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(state)
    return error


def sendable(error: BaseException) -> tuple[Any, Any, str]:
    """An error as it travels: itself, its cause, and where it was raised."""
    text = shortened("".join(traceback.format_exception(error)))
    cause = error.__cause__
    return picklable(error), None if cause is None else picklable(cause), text


def first_error(messages: Sequence[WorkerMessage]) -> BaseException:
    """The error to raise out of several: that of the lowest replica, as one worker alone would have met it."""
    errors = [item for item in messages if item.kind != "result"]
    first = min(errors, key=lambda item: (_replica(item.content) is None, _replica(item.content) or 0, item.worker))
    error = first.content
    error.__cause__ = first.cause
    if type(first.cause).__name__ == "BdbQuit":
        error.args = (f"{error}{NO_TERMINAL}",)
    (first.cause or error).add_note(f"in worker {first.worker}:\n{first.text}")
    return error


def ended(code: int | None) -> tuple[str, Cause]:
    """How a process ended and who may have ended it, from its exit code. None: it ended with its zygote."""
    if code is None:
        return "ended with the process that started it", Cause.ANYBODY
    if code >= 0:
        return f"exited with status {code}", Cause.ITSELF
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was killed by {name}", Cause.ITSELF if -code in FAULTS else Cause.ANYBODY


def unfit(error: BaseException) -> BaseException:
    """The error to raise when a worker cannot begin."""
    if isinstance(error, PhalanxError):
        return error
    failure = UsageError(
        f"a worker process could not make the recipe its own: {type(error).__name__}: {safe_str(error)}; a worker is "
        "a new interpreter with your sys.path and environment: what the recipe needs must be there, or use "
        "engine='inline'"
    )
    return caused(failure, error)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    """``error``, as if it had been raised from ``cause``."""
    error.__cause__ = cause
    return error


def _replica(error: Any) -> int | None:
    return getattr(error, "replica", None)


class DriverChannel:
    """A channel to the caller's process: messages go there, wake-ups and the end of the socket come from there."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)
        self._sending = threading.RLock()  # user code may have threads that warn or import
        self._poller = select.poll()
        self._poller.register(fd, select.POLLIN)

    def tell(self, kind: str, *facts: Any) -> None:
        """Send a message."""
        message = cloudpickle.dumps((kind, *facts))
        with self._sending:
            self._connection.send_bytes(message)

    def send(self, content: bytes) -> None:
        """Send bytes as they are."""
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(self._connection.fileno(), rest) :]

    def received(self) -> bytes:
        """A message from the caller."""
        return self._connection.recv_bytes()

    def wake(self) -> None:
        """Send an empty message."""
        with self._sending:
            self._connection.send_bytes(b"")

    def sleep(self, milliseconds: int) -> None:
        """Wait until woken; SystemExit if the caller is gone or wants this worker to end."""
        if self._poller.poll(milliseconds) and not os.read(self._connection.fileno(), 4096):
            raise SystemExit


def reason(messages: Sequence[WorkerMessage], ended: str, step: int) -> BaseException:
    """The error to raise for a step, from the workers' messages and why the run has ended, if it has."""
    if not messages:
        return RunError(f"step {step} was given up, and no worker said why; run it again", step=step)
    error = first_error(messages)
    if isinstance(error, PhalanxError) or not ended:
        return error
    return caused(WorkerError(ended, step=step), error)
