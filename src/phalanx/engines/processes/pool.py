"""The workers of a run as the caller's process sees them: started, waited for, listened to, ended.

Whatever waits here carries the workers' output, notices their deaths and ends those that hang. Nothing outlives it.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from phalanx.engines.processes.deadline import Deadline, Watch
from phalanx.engines.processes.environment import Imported
from phalanx.engines.processes.handle import WorkerHandle
from phalanx.engines.processes.launch import Warm
from phalanx.engines.processes.messages import BROKEN_OFF, End, LostError, WorkerMessage, ended
from phalanx.engines.processes.output import Output
from phalanx.plan.lifecycle import Phase
from phalanx.plan.tally import Cause
from phalanx.shared import control as words_of
from phalanx.shared.control import Control, fence, order
from phalanx.shared.memory import Memory
from phalanx.surroundings import forks, interrupts

POLL_MILLISECONDS = 50
FAREWELL_SECONDS = 1.0
PATIENCE_SECONDS = 1.0  # that workers have to leave user code after Ctrl-C
LONG = 1 << 62


class WorkerPool:
    """W workers over some shared memories.

    Parameters
    ----------
    memories : sequence of Memory
        What workers inherit; closed when the pool ends.
    control : Control
    deadline : Deadline

    Attributes
    ----------
    told : list of WorkerMessage
        What the workers told, in the order in which it was read.
    scheduled : list of (step, options)
        What schedulers had come to before a step, where that cannot be done again; since the last snapshot.
    deaths : dict
        Worker to its end, of those that are to be replaced.
    started : int
        How many were ready so far.
    interrupted : bool
        Whether Ctrl-C ended a wait, and the workers were asked to stop; they may not have come to it yet.
    """

    def __init__(self, memories: Sequence[Memory], control: Control, deadline: Deadline) -> None:
        self.told: list[WorkerMessage] = []
        self.scheduled: list[tuple[int, Any]] = []
        self.deaths: dict[int, End] = {}
        self.started = 0
        self.interrupted = False
        self._memories = memories
        self.control = control
        self._deadline = deadline
        self._handles: dict[int, WorkerHandle] = {}
        self._starting: set[int] = set()
        self._owner = os.getpid()
        self._lives = 0
        self._lived = 0.0  # seconds, of those that have ended
        self._output = Output()
        self._poller = select.poll()
        self._imported = Imported(memories[0])
        self._abandoned = weakref.finalize(self, _abandon, self._handles, memories)
        forks.own(self)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that are alive."""
        return tuple(handle.pid for handle in list(self._handles.values()) if not handle.ended)

    @property
    def alive(self) -> list[int]:
        """The workers that can be waited for."""
        return [number for number, handle in self._handles.items() if not handle.ended]

    def options_at(self, step: int, begun: tuple[int, Any]) -> tuple[int, Any]:
        """The newest (step, options) up to ``step``; ``begun`` was known before workers told any."""
        return max([begun, *(item for item in self.scheduled if item[0] <= step)], key=lambda item: item[0])

    @property
    def lived(self) -> float:
        """Seconds that all workers together have lived so far."""
        now = time.monotonic()
        return self._lived + sum(now - handle.born for handle in self._living())

    def start(self, numbers: Iterable[int], warm: Warm) -> None:
        """Start workers, in place of those that ended; returns when all are ready, or told why not, or ended."""
        if not self._starting:
            self._imported.publish()
        for number in numbers:
            handle = warm.handle(number, [memory.fd for memory in self._memories])
            self.deaths.pop(number, None)
            self._handles[number] = handle
            self._starting.add(number)
            self._output.follow(handle.pipes)
            for fd in handle.watched:
                self._poller.register(fd, select.POLLIN)
        self.wait(lambda: not self._starting, 0)

    def grant(self, kind: int) -> None:
        """Set idle workers to work."""
        words = self.control.words
        words[words_of.KIND], words[words_of.PAUSE], words[words_of.TROUBLE] = kind, 0, 0
        order()
        words[words_of.GRANT] += 1
        fence()
        for handle in self._living():
            handle.since = time.monotonic()
            if words[self.control.place(handle.number, words_of.SLEEPING)]:
                handle.wake()

    def halt(self, *, replaceable: bool) -> None:
        """Have all workers stop where nothing is held: between two replicas, chunks of an evaluation, or steps.

        Those that stay in user code for a second are ended, and count as dead; so they are if Ctrl-C is pressed again.
        If nobody can take their places, the state would be lost with them, so only two more Ctrl-C end them. Ctrl-C is
        not delivered meanwhile.
        """
        words, end = self.control.words, time.monotonic() + (PATIENCE_SECONDS if replaceable else math.inf)
        words[words_of.PAUSE] = words_of.LEAVE

        def idle() -> bool:
            if self.deaths:  # nobody waits for those that ended
                words[words_of.TROUBLE] = 1
            return self.control.all_idle(self.alive)

        def late() -> bool:
            return time.monotonic() > end or interrupts.pressed() >= (1 if replaceable else 2)

        with interrupts.shielded():
            self.wait(lambda: idle() or late(), LONG)
            for handle in self._living() if not idle() else ():
                if self._in_user_code(handle.number):
                    self.deaths[handle.number] = self._end_of(handle, BROKEN_OFF, Cause.CALLER)
                    self._died(handle)
            self.wait(idle, LONG)  # those that waited for them, and those that were updating
        self.interrupted = False

    def wait(self, until: Callable[[], bool], steps: int) -> None:
        """Wait until ``until()``; ``steps``: how many finished ones are worth waking up for."""
        words, done = self.control.words, False
        words[words_of.AWAITED] = steps
        watch = Watch(self._deadline)
        while not done:
            self._check_interrupted()
            words[words_of.ASLEEP] = 1
            fence()
            done = until()  # what was told before that is read now
            found = self._poller.poll(0 if done else POLL_MILLISECONDS)
            words[words_of.ASLEEP] = 0
            self._handle({fd for fd, _ in found})
            if watch.expired(self.control.progress(), starting=bool(self._starting)):
                self._kill_hung()

    def _in_user_code(self, number: int) -> bool:
        """Whether a worker may be in the user's code: it computes, and waits for nobody."""
        task = self.control.words[words_of.KIND] == words_of.TASK
        computing = self.control.places()[number].phase <= Phase.COMPUTING
        return (task or computing) and not self.control.idle(number)

    def _check_interrupted(self) -> None:
        """Deliver Ctrl-C; the workers stop as soon as they can, whether or not the run goes on."""
        try:
            interrupts.check()
        except BaseException:
            self.interrupted = True
            self.control.words[words_of.PAUSE] = words_of.LEAVE
            raise

    def _kill_hung(self) -> None:
        """Workers that all others wait for do nothing any more: they are ended, and count as dead."""
        late = self._starting or self.control.hindmost(self.alive)
        for handle in self._living():
            if handle.number in late:
                why = f"hung for {self._deadline.seconds:.0f} s and was killed"
                self.deaths[handle.number] = self._end_of(handle, why, Cause.ITSELF)
                self._died(handle)

    def _living(self) -> list[WorkerHandle]:
        return [handle for handle in self._handles.values() if not handle.ended]

    def end(self) -> None:
        """End the workers, print what they still have to say, give everything back."""
        if self._abandoned.detach() is None:
            return
        with interrupts.shielded():
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
        messages: list[bytes] = []
        ended = False
        try:
            while not messages or handle.channel.poll():
                messages.append(handle.channel.recv_bytes())
        except (EOFError, OSError):
            ended = True
        for message in filter(None, messages):
            self._take(handle, *pickle.loads(message))  # noqa: S301  from a child of this process
        if ended:
            self._died(handle)

    def _take(self, handle: WorkerHandle, kind: str, *facts: Any) -> None:
        if kind == "result" and facts[0] != self.control.words[words_of.GRANT]:
            return  # of a task that was broken off
        if kind == "ready":
            handle.ready, handle.since = True, time.monotonic()
            self._starting.discard(handle.number)
            self.started += 1
        elif kind == "scheduled":
            step, kept = facts[0], self.control.words[words_of.SNAPSHOT_STEP]
            since = kept if kept >= 0 else step - 1
            self.scheduled = [item for item in self.scheduled if since <= item[0] != step] + [facts]
        elif kind == "warning":
            self._output.warn(*facts)
        elif kind == "imported":
            self._imported.add(*facts)
        else:
            self.told.append(WorkerMessage(handle.number, kind, *(facts[1:] if kind == "result" else facts)))
            if kind == "failed":
                self._starting.discard(handle.number)

    def _died(self, handle: WorkerHandle) -> None:
        """A worker ended by itself; its end is confirmed before anybody takes its place."""
        for fd in handle.watched:
            try:
                self._poller.unregister(fd)
            except KeyError:  # its output had ended before
                continue
        self._output.forget(handle.pipes)
        self._starting.discard(handle.number)
        self._lived += time.monotonic() - handle.born
        with interrupts.shielded():
            status = handle.end()
        why, cause = ended(None if status is None else os.waitstatus_to_exitcode(status))
        self.deaths.setdefault(handle.number, self._end_of(handle, why, cause))

    def _end_of(self, handle: WorkerHandle, why: str, cause: Cause) -> End:
        self._lives += 1
        return End(why, cause, handle.ready, handle.since, time.monotonic(), self._lives)

    def leave(self) -> None:
        """See ``forks.Owned``."""
        self._abandoned.detach()

    def check_owner(self) -> None:
        """Refuse, by a LostError, to touch the workers of the process that this one was forked from."""
        if self._owner != os.getpid():
            raise LostError(
                f"it belongs to process {self._owner}, from which this one ({os.getpid()}) was forked; its workers go "
                "on there. Start a run of your own here"
            )


def _abandon(handles: Mapping[int, WorkerHandle], memories: Sequence[Memory]) -> None:
    """A run that nobody closed is gone, or the interpreter ends."""
    for handle in handles.values():
        handle.kill()
    for memory in memories:
        memory.close()
