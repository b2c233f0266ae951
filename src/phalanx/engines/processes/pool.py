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
from phalanx.engines.processes.handle import Hand
from phalanx.engines.processes.launch import Warm
from phalanx.engines.processes.messages import BROKEN_OFF, End, LostError, Told, ended
from phalanx.engines.processes.output import Output
from phalanx.plan.lifecycle import Point
from phalanx.plan.tally import Cause
from phalanx.shared import control as words_of
from phalanx.shared.control import Control, fence, order
from phalanx.shared.memory import Memory
from phalanx.surroundings import forks, interrupts

POLL_MILLISECONDS = 50
FAREWELL_SECONDS = 1.0
PATIENCE_SECONDS = 1.0  # that workers have to leave user code after Ctrl-C
LONG = 1 << 62


class Crew:
    """W workers over some shared memories.

    Parameters
    ----------
    memories : sequence of Memory
        What workers inherit; closed when the crew ends.
    control : Control
    deadline : Deadline

    Attributes
    ----------
    told : list of Told
        What the workers told, in the order in which it was read.
    housed : list of (step, description)
        Where optimizer state lies from a step on, as its owners told.
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
        self.told: list[Told] = []
        self.housed: list[tuple[int, Any]] = []
        self.scheduled: list[tuple[int, Any]] = []
        self.deaths: dict[int, End] = {}
        self.started = 0
        self.interrupted = False
        self._memories = memories
        self.control = control
        self._deadline = deadline
        self._hands: dict[int, Hand] = {}
        self._starting: set[int] = set()
        self._owner = os.getpid()
        self._lives = 0
        self._lived = 0.0  # seconds, of those that have ended
        self._output = Output()
        self._poller = select.poll()
        self._imported = Imported(memories[0])
        self._abandoned = weakref.finalize(self, _abandon, self._hands, memories)
        forks.own(self)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that are alive."""
        return tuple(hand.pid for hand in list(self._hands.values()) if not hand.ended)

    @property
    def alive(self) -> list[int]:
        """The workers that can be waited for."""
        return [number for number, hand in self._hands.items() if not hand.ended]

    def options_at(self, step: int, begun: tuple[int, Any]) -> tuple[int, Any]:
        """The newest (step, options) up to ``step``; ``begun`` was known before workers told any."""
        return max([begun, *(item for item in self.scheduled if item[0] <= step)], key=lambda item: item[0])

    @property
    def lived(self) -> float:
        """Seconds that all workers together have lived so far."""
        now = time.monotonic()
        return self._lived + sum(now - hand.born for hand in self._living())

    def start(self, numbers: Iterable[int], warm: Warm) -> None:
        """Start workers, in place of those that ended; returns when all are ready, or told why not, or ended."""
        if not self._starting:
            self._imported.publish()
        for number in numbers:
            hand = warm.hand(number, [memory.fd for memory in self._memories])
            self.deaths.pop(number, None)
            self._hands[number] = hand
            self._starting.add(number)
            self._output.follow(hand.pipes)
            for fd in hand.watched:
                self._poller.register(fd, select.POLLIN)
        self.wait(lambda: not self._starting, 0)

    def grant(self, kind: int) -> None:
        """Set idle workers to work."""
        words = self.control.words
        words[words_of.KIND], words[words_of.PAUSE], words[words_of.TROUBLE] = kind, 0, 0
        order()
        words[words_of.GRANT] += 1
        fence()
        for hand in self._living():
            hand.since = time.monotonic()
            if words[self.control.place(hand.number, words_of.SLEEPING)]:
                hand.wake()

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
            for hand in self._living() if not idle() else ():
                if self._in_user_code(hand.number):
                    self.deaths[hand.number] = self._end_of(hand, BROKEN_OFF, Cause.CALLER)
                    self._died(hand)
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
        computing = self.control.places()[number].point <= Point.COMPUTING
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
        for hand in self._living():
            if hand.number in late:
                why = f"hung for {self._deadline.seconds:.0f} s and was killed"
                self.deaths[hand.number] = self._end_of(hand, why, Cause.ITSELF)
                self._died(hand)

    def _living(self) -> list[Hand]:
        return [hand for hand in self._hands.values() if not hand.ended]

    def end(self) -> None:
        """End the workers, print what they still have to say, give everything back."""
        if self._abandoned.detach() is None:
            return
        with interrupts.shielded():
            for hand in self._hands.values():
                hand.dismiss()
            deadline = time.monotonic() + FAREWELL_SECONDS
            try:
                while self._output.open and time.monotonic() < deadline:
                    self._output.carry_waiting(POLL_MILLISECONDS)
            finally:
                for hand in self._hands.values():
                    hand.end()
                for memory in self._memories:
                    memory.close()

    def _handle(self, readable: set[int]) -> None:
        for fd in self._output.carry(readable):
            self._poller.unregister(fd)
        for hand in self._living():
            if hand.channel.fileno() in readable:
                self._read(hand)
            elif hand.pidfd in readable:
                self._died(hand)

    def _read(self, hand: Hand) -> None:
        messages: list[bytes] = []
        ended = False
        try:
            while not messages or hand.channel.poll():
                messages.append(hand.channel.recv_bytes())
        except (EOFError, OSError):
            ended = True
        for message in filter(None, messages):
            self._take(hand, *pickle.loads(message))  # noqa: S301  from a child of this process
        if ended:
            self._died(hand)

    def _take(self, hand: Hand, kind: str, *facts: Any) -> None:
        if kind == "result" and facts[0] != self.control.words[words_of.GRANT]:
            return  # of a task that was broken off
        if kind == "ready":
            hand.ready, hand.since = True, time.monotonic()
            self._starting.discard(hand.number)
            self.started += 1
        elif kind == "housed":
            self.housed.append(facts)
        elif kind == "scheduled":
            step, kept = facts[0], self.control.words[words_of.KEPT]
            since = kept if kept >= 0 else step - 1
            self.scheduled = [item for item in self.scheduled if since <= item[0] != step] + [facts]
        elif kind == "warning":
            self._output.warn(*facts)
        elif kind == "imported":
            self._imported.add(*facts)
        else:
            self.told.append(Told(hand.number, kind, *(facts[1:] if kind == "result" else facts)))
            if kind == "failed":
                self._starting.discard(hand.number)

    def _died(self, hand: Hand) -> None:
        """A worker ended by itself; its end is confirmed before anybody takes its place."""
        for fd in hand.watched:
            try:
                self._poller.unregister(fd)
            except KeyError:  # its output had ended before
                continue
        self._output.forget(hand.pipes)
        self._starting.discard(hand.number)
        self._lived += time.monotonic() - hand.born
        with interrupts.shielded():
            status = hand.end()
        why, cause = ended(None if status is None else os.waitstatus_to_exitcode(status))
        self.deaths.setdefault(hand.number, self._end_of(hand, why, cause))

    def _end_of(self, hand: Hand, why: str, cause: Cause) -> End:
        self._lives += 1
        return End(why, cause, hand.ready, hand.since, time.monotonic(), self._lives)

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


def _abandon(hands: Mapping[int, Hand], memories: Sequence[Memory]) -> None:
    """A run that nobody closed is gone, or the interpreter ends."""
    for hand in hands.values():
        hand.kill()
    for memory in memories:
        memory.close()
