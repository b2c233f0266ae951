"""The workers of a run, seen from the caller's process: it starts them, waits, reads their messages and ends them.

Every wait here also carries the workers' output, notices deaths and ends workers that hang. No worker outlives the
pool.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from phalanx.definition import checks
from phalanx.engines.hosts.beacon import state
from phalanx.engines.processes.messages import BROKEN_OFF, End, WorkerMessage, ended
from phalanx.engines.processes.starter import WARM
from phalanx.engines.recovery.failures import Deadline, FailureLog, HangWatch
from phalanx.errors import LostError, StartError
from phalanx.plan.lifecycle import Cause, Stage, judge
from phalanx.shared.counters import GO_ON, LEAVE, TASK, Counters
from phalanx.shared.memory import Memories, fence, order
from phalanx.surroundings import interrupts, presence

WORKER = "phalanx.engines.processes.worker"
POLL_MILLISECONDS = 50
# Polls in a row without progress, from one look for stopped workers to the next: three seconds of this process's own
# time. Slurm's suspend stops some processes by SIGTSTP two seconds before it stops all; none of these is woken.
QUIET_POLLS = 60
FAREWELL_SECONDS = 1.0
PATIENCE_SECONDS = 1.0  # that workers have to leave user code after Ctrl-C
LEAVING_SECONDS = 10.0  # more, if they have accelerators: they wait for them, and for what others do not send any more
LONG = 1 << 62
LARGE = 1 << 26  # bytes of what is frozen, from which on workers copy it one after another
CHUNK_BYTES = 1 << 16
BEGINNING = "<string>"  # the file name of a worker's warnings that come from no line of the caller's code


class WorkerHandle:
    """The caller's side of one worker. Implements ``presence.Owned``.

    Parameters
    ----------
    number : int
        Among those that live the same life.
    memories : sequence of int
        Descriptors that it inherits.
    lives : str
        The module whose ``live(channel, memories, number)`` is what it does.

    Attributes
    ----------
    pid : int
    pidfd : int or None
        Readable once the worker has ended.
    channel : Connection
    pipes : list of int
        Its standard output and standard error.
    born : float
        When it was started, on the clock of ``time.monotonic``.
    ready : bool
        Whether it has said that it can begin.
    woken : bool
        Whether it was stopped, and was made to go on.
    """

    def __init__(self, number: int, memories: Sequence[int], lives: str = WORKER) -> None:
        self.number = number
        self.ended = self.ready = self.woken = False
        self.born = time.monotonic()
        mine, theirs = socket.socketpair()
        output, errors = os.pipe(), os.pipe()
        self.channel = Connection(mine.detach())
        self.pipes = [output[0], errors[0]]
        self.pidfd: int | None = None
        presence.own(self)
        try:
            fds = [theirs.fileno(), output[1], errors[1], *memories]
            self._zygote, self.pid, self.pidfd = WARM.spawn(lives, number, fds)
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(output[1])
            os.close(errors[1])

    @property
    def watched(self) -> list[int]:
        """Descriptors that are readable when the worker needs attention."""
        return [fd for fd in (self.channel.fileno(), *self.pipes, self.pidfd) if fd is not None]

    def heard(self) -> tuple[list[Any], bool]:
        """The messages that have come, and whether there may be more."""
        messages, more = list[bytes](), True
        try:
            while not messages or self.channel.poll():
                messages.append(self.channel.recv_bytes())
        except (EOFError, OSError):
            more = False
        return [pickle.loads(message) for message in filter(None, messages)], more  # noqa: S301  from a child

    def wake(self) -> None:
        """Tell it that something has been granted."""
        with contextlib.suppress(OSError):  # it has ended, which shows elsewhere
            os.write(self.channel.fileno(), b".")

    def dismiss(self) -> None:
        """Let it end by itself: it sees the end of its channel."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.channel.fileno())) as end:
            end.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kill it at once, without asking the zygote, which clears away the rest of it."""
        if not self.ended:
            self.ended = True
            self.send(signal.SIGKILL)
            self._close()

    def end(self) -> int | None:
        """Make sure that it has ended, and give back what it took; returns its wait status if that is known."""
        if self.ended:
            return None
        self.ended = True
        try:
            return self._zygote.end(self.pid)
        except StartError:  # the kernel ends workers with their zygote; what one started is in a process group
            self.send(signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            return None
        finally:
            self._close()

    def leave(self) -> None:
        self.ended = True
        self._close()

    def send(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(OSError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)

    def _close(self) -> None:
        self.channel.close()
        for fd in self.pipes:
            os.close(fd)
        if self.pidfd is not None:
            os.close(self.pidfd)
        self.pipes, self.pidfd = [], None


class Output:
    """Standard output and standard error of all workers, read from pipes and written line by line."""

    def __init__(self) -> None:
        self._pending: dict[int, bytes] = {}
        self._errors: set[int] = set()
        self._warned: set[tuple[Any, ...]] = set()
        self._lost = False  # something that workers printed

    def follow(self, pipes: Sequence[int]) -> None:
        """Carry what comes through these pipes: standard output, standard error."""
        for fd in pipes:
            os.set_blocking(fd, False)
            self._pending[fd] = b""
        self._errors.add(pipes[1])

    @property
    def open(self) -> bool:
        """Whether more may come."""
        return bool(self._pending)

    def carry(self, fds: Iterable[int]) -> list[int]:
        """Write the whole lines that have come through ``fds``; returns those of them that have ended."""
        return [fd for fd in fds if fd in self._pending and not self._carry(fd)]

    def carry_waiting(self, milliseconds: int) -> None:
        """Carry what comes within this time, if anything does."""
        poller = select.poll()
        for fd in self._pending:
            poller.register(fd, select.POLLIN)
        self.carry([fd for fd, _ in poller.poll(milliseconds)])

    def forget(self, pipes: Sequence[int]) -> None:
        """Carry the rest of these pipes, and follow them no more."""
        self.carry(pipes)
        for fd in pipes:
            self._pending.pop(fd, None)
            self._errors.discard(fd)

    def warn(self, message: str, category: type[Warning], filename: str, line: int) -> None:
        """Show a warning of a worker, once for all of them, as this process shows its own.

        A warning from no line of the caller's code is shown with the line at which the caller waits for workers.
        """
        seen = (message, category, filename, line)
        if seen in self._warned:
            return
        self._warned.add(seen)
        if filename == BEGINNING:
            warnings.warn(message, category, stacklevel=checks.callers_level())
        else:
            warnings.warn_explicit(message, category, filename, line)

    def _carry(self, fd: int) -> bool:
        """Carry what has come through ``fd``; returns whether more may come."""
        while True:
            try:
                chunk = os.read(fd, CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                self._write(fd, self._pending.pop(fd))
                return False
            lines, newline, rest = (self._pending[fd] + chunk).rpartition(b"\n")
            self._write(fd, lines + newline)
            self._pending[fd] = rest

    def _write(self, fd: int, text: bytes) -> None:
        """Write what workers printed, as far as it can be: a stream that nobody reads, or a full disk, ends no run."""
        stream = sys.stderr if fd in self._errors else sys.stdout
        if text and stream is not None:
            encoding = getattr(stream, "encoding", None) or "utf-8"  # ascii, say
            printable = text.decode("utf-8", "backslashreplace").encode(encoding, "backslashreplace").decode(encoding)
            try:
                stream.write(printable)
                stream.flush()
            except (OSError, ValueError) as error:
                if not self._lost:
                    presence.say(f"what workers print cannot be written: {error}; the run goes on without it")
                self._lost = True


class WorkerPool:
    """W workers over some shared memories. Implements ``presence.Owned``.

    Parameters
    ----------
    memories : Memories
        What workers inherit; closed when the pool ends.
    counters : Counters
    deadline : Deadline
    failures : FailureLog
        Records which workers have died.

    Attributes
    ----------
    messages : list of WorkerMessage
        The workers' messages, in the order in which they were read.
    interrupted : bool
        Whether Ctrl-C ended a wait, and the workers were asked to stop; they may not have stopped yet.
    alarm : callable
        Returns why nothing is worth waiting for any more, as another host is lost; "" if nothing is wrong.
    patience : float
        Seconds that workers have to leave what they do.
    """

    def __init__(
        self,
        memories: Memories,
        counters: Counters,
        deadline: Deadline,
        failures: FailureLog,
    ) -> None:
        self.messages: list[WorkerMessage] = []
        self.interrupted = False
        self.alarm: Callable[[], str] = str
        self.patience = PATIENCE_SECONDS
        self._memories = memories
        self.counters = counters
        self._deadline = deadline
        self._failures = failures
        self._handles: dict[int, WorkerHandle] = {}
        self._starting: set[int] = set()
        self._owner = os.getpid()
        self._output = Output()
        self._poller = select.poll()
        self._abandoned = weakref.finalize(self, _abandon, self._handles, memories)
        presence.own(self)

    @property
    def pids(self) -> tuple[int, ...]:
        """The pids of the workers that are alive."""
        return tuple(handle.pid for handle in self._living())

    @property
    def alive(self) -> list[int]:
        """The workers that can be waited for."""
        return [handle.number for handle in self._living()]

    def start(self, numbers: Iterable[int]) -> None:
        """Start workers, or replace dead ones; returns when each is ready, has said why it is not, or has died."""
        for number in numbers:
            handle = WorkerHandle(number, [memory.fd for memory in self._memories])
            self._failures.fill(number)
            self._handles[number] = handle
            self._starting.add(number)
            self._output.follow(handle.pipes)
            for fd in handle.watched:
                self._poller.register(fd, select.POLLIN)
            if self._memories.base.size >= LARGE:  # each makes a copy of what is frozen, and then gives it back
                self._wait_for_start()
        self._wait_for_start()

    def over(self) -> bool:
        """Whether nothing is to be waited for: workers are idle, or the alarm rings."""
        return self.counters.all_idle() or bool(self.alarm())

    def grant(self, kind: int) -> None:
        """Set idle workers to work."""
        counters = self.counters
        counters.generation += counters.trouble  # whoever failed may have broken off an exchange
        counters.kind, counters.pause, counters.trouble = kind, GO_ON, 0
        order()  # a worker that sees the grant sees what is granted
        counters.grant += 1
        fence()  # either a worker sees the grant before it sleeps, or it is seen here that it sleeps
        for handle in self._living():
            if counters.workers[handle.number].sleeping:
                handle.wake()

    def halt(self, *, replaceable: bool) -> None:
        """Have all workers stop where they hold nothing: between two replicas, chunks of an evaluation, or steps.

        Those that stay in user code for a second (``patience``) are ended, and count as dead. If they cannot be
        replaced, the state would be lost with them, so they are waited for. Two more Ctrl-C end that wait.
        """
        end = time.monotonic() + (self.patience if replaceable else math.inf)
        self.counters.pause = LEAVE

        def idle() -> bool:
            if self._failures.dead:  # so that no worker waits for a dead one
                self.counters.trouble = 1
            return self.counters.all_idle(self.alive)

        with interrupts.held():
            self.wait(lambda: idle() or time.monotonic() > end, LONG)
            for handle in self._living() if not idle() else ():
                if self._in_user_code(handle.number):
                    self._died(handle, (BROKEN_OFF, Cause.CALLER))
            self.wait(idle, LONG)  # those that waited for them, and those that were updating
        self.interrupted = False

    def break_off(self, seconds: float) -> bool:
        """Have workers leave what they do, or kill them after some seconds; returns whether there is a whole state."""
        end = time.monotonic() + seconds
        self.counters.pause, self.counters.trouble = LEAVE, 1
        with interrupts.held():
            self.wait(lambda: self.counters.all_idle(self.alive) or time.monotonic() > end, LONG)
            # Who came last to a barrier passes it, though the others have left there: it may have updated its part.
            torn = judge(self.counters.progress()).torn and not self._failures.portable
            whole = self.counters.all_idle(self.alive) and not self._failures.dead and not torn
            for handle in () if whole else self._living():
                self._died(handle, ("was broken off", Cause.CALLER))
        return whole

    def wait(self, until: Callable[[], bool], steps: int) -> None:
        """Wait until ``until()``; ``steps``: how many finished steps are worth waking up for."""
        counters, done = self.counters, False
        counters.awaited = steps
        watch = HangWatch(self._patience)
        while not done:
            self._check_interrupted()
            counters.asleep = 1
            fence()  # either a worker sees that it has to wake this process, or what it did is seen now
            done = until()  # messages that were sent before are read now
            events = self._poller.poll(0 if done else POLL_MILLISECONDS)
            counters.asleep = 0
            self._handle({fd for fd, _ in events})
            if watch.expired(counters.activity(), starting=bool(self._starting)):
                self._kill_hung()
            elif watch.quiet >= QUIET_POLLS:
                watch.quiet = 0
                self._wake_stopped()

    def _wait_for_start(self) -> None:
        self.wait(lambda: not self._starting or bool(self.alarm()), 0)

    def _in_user_code(self, number: int) -> bool:
        """Whether a worker may be in the user's code: it computes, and waits for nobody."""
        computing = self.counters.progress()[number].stage <= Stage.COMPUTING or self._failures.computes(number)
        return (self.counters.kind == TASK or computing) and not self.counters.idle(number)

    def _check_interrupted(self) -> None:
        """Deliver Ctrl-C; the workers stop as soon as they can, whether or not the run goes on."""
        try:
            interrupts.check()
        except BaseException:
            self.interrupted = True
            self.counters.pause = LEAVE
            raise

    def _kill_hung(self) -> None:
        """End the workers that hang while all others wait for them; they count as dead."""
        late = self._starting or self.counters.hindmost(self.alive)
        why = f"hung for {self._patience():.0f} s, its deadline_seconds, and was killed"
        for handle in self._living():
            if handle.number in late:
                self._died(handle, (why, Cause.ITSELF))
        self._deadline.doubted = True

    def _wake_stopped(self) -> None:
        """Have workers that somebody stopped go on, once each; those that are stopped again count as dead.

        Not those that a debugger stopped. All others wait for a stopped worker, and so do ``result()`` and Ctrl-C.
        """
        for handle in self._living():
            if state(handle.pid) == b"T" and handle.woken:
                self._died(handle, ("was stopped again after it had been woken, and was killed", Cause.ANYBODY))
            elif state(handle.pid) == b"T":
                presence.say(f"worker {handle.number} was stopped, as by SIGSTOP, so it is sent SIGCONT")
                handle.woken = True
                handle.send(signal.SIGCONT)

    def _patience(self) -> float:
        return self._deadline.seconds(task=self.counters.kind == TASK, once=not self._failures.replaceable)

    def _living(self) -> list[WorkerHandle]:
        return [handle for handle in list(self._handles.values()) if not handle.ended]

    def end(self) -> None:
        """End the workers, carry the rest of their output, and release all resources."""
        if self._abandoned.detach() is None:
            return
        with interrupts.held():
            for handle in self._handles.values():
                handle.dismiss()
            deadline = time.monotonic() + FAREWELL_SECONDS
            try:
                while self._output.open and time.monotonic() < deadline:
                    self._output.carry_waiting(POLL_MILLISECONDS)
            finally:
                for handle in self._handles.values():
                    handle.end()
                for memory in self._memories:
                    memory.close()

    def _handle(self, readable: set[int]) -> None:
        for fd in self._output.carry(readable):
            self._poller.unregister(fd)
        for handle in self._living():
            if handle.channel.fileno() in readable:
                self._read(handle)
            elif handle.pidfd in readable:
                self._died(handle)

    def _read(self, handle: WorkerHandle) -> None:
        messages, goes_on = handle.heard()
        for message in messages:
            self._take(handle, *message)
        if not goes_on:
            self._died(handle)

    def _take(self, handle: WorkerHandle, kind: str, *facts: Any) -> None:
        if kind == "result" and facts[0] != self.counters.grant:
            return  # of a task that was broken off
        if kind == "ready":
            handle.ready = True
            self._starting.discard(handle.number)
        elif kind == "warning":
            self._output.warn(*facts)
        else:
            self.messages.append(WorkerMessage(handle.number, kind, *(facts[1:] if kind == "result" else facts)))
            if kind == "failed":
                self._starting.discard(handle.number)

    def _died(self, handle: WorkerHandle, known: tuple[str, Cause] | None = None) -> None:
        """Record a worker's death, or end it for a ``known`` reason. Its end is confirmed before it is replaced."""
        for fd in handle.watched:
            try:
                self._poller.unregister(fd)
            except KeyError:  # its output had ended before
                continue
        self._output.forget(handle.pipes)
        self._starting.discard(handle.number)
        with interrupts.held():
            status = handle.end()
        why, cause = known or ended(None if status is None else os.waitstatus_to_exitcode(status))
        self._failures.fell(handle.number, End(why, cause, handle.ready))

    def leave(self) -> None:
        self._abandoned.detach()

    def check_owner(self) -> None:
        """Refuse, by a LostError, to touch the workers of the process that this one was forked from."""
        if self._owner != os.getpid():
            raise LostError(
                f"it belongs to process {self._owner}, from which this one ({os.getpid()}) was forked; its workers go "
                "on there. Start a run of your own here"
            )


def _abandon(handles: Mapping[int, WorkerHandle], memories: Memories) -> None:
    """Kill the workers of a run that was never closed, once it is collected or the interpreter ends."""
    for handle in handles.values():
        handle.kill()
    for memory in memories:
        memory.close()
