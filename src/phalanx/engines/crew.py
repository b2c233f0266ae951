"""The workers of a run as the caller's process sees them: started, waited for, listened to, ended.

Whatever waits here carries the workers' output, notices their deaths and ends those that hang. Nothing outlives it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from phalanx import forks
from phalanx.engines import control as words_of
from phalanx.engines.control import Control, fence, order
from phalanx.engines.deadline import Deadline, Watch
from phalanx.engines.hand import Hand
from phalanx.engines.launch import Warm
from phalanx.engines.memory import Memory
from phalanx.engines.output import Output
from phalanx.engines.told import End, LostError, Told, ended
from phalanx.recovery.tally import Cause
from phalanx.surroundings import Interrupts

POLL_MILLISECONDS = 50
FAREWELL_SECONDS = 1.0


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
        self._interrupts = Interrupts()
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

    @property
    def lived(self) -> float:
        """Seconds that all workers together have lived so far."""
        now = time.monotonic()
        return self._lived + sum(now - hand.born for hand in self._living())

    def start(self, numbers: Iterable[int], warm: Warm) -> None:
        """Start workers, in place of those that ended; returns when all are ready, or told why not, or ended."""
        for number in numbers:
            hand = warm.hand(number, [memory.fd for memory in self._memories])
            with self._uninterrupted():
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

    def interrupt(self) -> None:
        """Stop at a step boundary; user code that is running is broken off."""
        self.control.words[words_of.PAUSE] = 1
        for hand in self._living():
            hand.interrupt()

    def wait(self, until: Callable[[], bool], steps: int) -> None:
        """Wait until ``until()``; ``steps``: how many finished ones are worth waking up for."""
        self.control.words[words_of.AWAITED] = steps
        try:
            self._wait(until)
        except KeyboardInterrupt:
            self.interrupted = True
            self.interrupt()
            raise

    def _wait(self, until: Callable[[], bool]) -> None:
        words, done = self.control.words, False
        watch = Watch(self._deadline)
        with self._interrupts:
            while not done:
                words[words_of.ASLEEP] = 1
                fence()
                done = until()  # what was told before that is read now
                found = self._poller.poll(0 if done else POLL_MILLISECONDS)
                words[words_of.ASLEEP] = 0
                self._interrupts.hold()
                try:
                    self._handle({fd for fd, _ in found})
                    if watch.expired(self.control.progress(), starting=bool(self._starting)):
                        self._kill_hung()
                finally:
                    self._interrupts.release()

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
        with self._uninterrupted():
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

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Ctrl-C waits: requests and answers of the zygote must not be torn apart."""
        with self._interrupts:
            self._interrupts.hold()
            try:
                yield
            finally:
                self._interrupts.release()

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
        if kind == "ready":
            hand.ready, hand.since = True, time.monotonic()
            self._starting.discard(hand.number)
            self.started += 1
        elif kind == "housed":
            self.housed.append(facts)
        elif kind == "warning":
            self._output.warn(*facts)
        else:
            self.told.append(Told(hand.number, kind, *facts))
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
        """Refuse to touch the workers of another process.

        Raises
        ------
        LostError
            This process was forked from the one that they belong to.
        """
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
