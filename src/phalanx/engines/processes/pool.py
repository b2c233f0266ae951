"""The workers of a run, seen from the caller's process: it starts them, waits, reads their messages and ends them.

Every wait here also carries the workers' output, notices deaths and ends workers that hang. No worker outlives the
pool.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from phalanx.engines.hosts.beacon import state
from phalanx.engines.processes.handle import Output, WorkerHandle
from phalanx.engines.processes.messages import BROKEN_OFF, End, WorkerMessage, ended
from phalanx.engines.recovery.failures import Deadline, FailureLog, HangWatch
from phalanx.errors import LostError
from phalanx.plan.lifecycle import Cause, Stage, judge
from phalanx.shared.counters import GO_ON, LEAVE, TASK, Counters
from phalanx.shared.memory import Memories, fence, order
from phalanx.surroundings import interrupts, presence

POLL_MILLISECONDS = 50
# Polls in a row without progress, from one look for stopped workers to the next: three seconds of this process's own
# time. Slurm's suspend stops some processes by SIGTSTP two seconds before it stops all; none of these is woken.
QUIET_POLLS = 60
FAREWELL_SECONDS = 1.0
PATIENCE_SECONDS = 1.0  # that workers have to leave user code after Ctrl-C
LEAVING_SECONDS = 10.0  # more, if they have accelerators: they wait for them, and for what others do not send any more
LONG = 1 << 62
LARGE = 1 << 26  # bytes of what is frozen, from which on workers copy it one after another


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
