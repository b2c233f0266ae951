"""The workers of a run as the caller's process sees them: started, waited for, listened to, ended.

Whatever waits here carries the workers' output, notices their deaths and ends those that hang. Nothing outlives it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from phalanx.engines import control as words_of
from phalanx.engines.control import Control, fence, order
from phalanx.engines.deadline import Deadline, Watch
from phalanx.engines.habitat import Imported
from phalanx.engines.launch import Hand, Zygote
from phalanx.engines.memory import Memory
from phalanx.engines.output import Output
from phalanx.engines.told import Told
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
        Worker to what ended it, of those that are to be replaced.
    started : int
        How many were ready so far.
    interrupted : bool
        Whether Ctrl-C ended a wait, and the workers were asked to stop; they may not have come to it yet.
    """

    def __init__(self, memories: Sequence[Memory], control: Control, deadline: Deadline) -> None:
        self.told: list[Told] = []
        self.housed: list[tuple[int, Any]] = []
        self.deaths: dict[int, str] = {}
        self.started = 0
        self.interrupted = False
        self._memories = memories
        self.control = control
        self._deadline = deadline
        self._hands: dict[int, Hand] = {}
        self._starting: set[int] = set()
        self._output = Output()
        self._poller = select.poll()
        self._interrupts = Interrupts()
        self._imported = Imported(memories[0])
        self._abandoned = weakref.finalize(self, _abandon, self._hands, memories)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that are alive."""
        return tuple(hand.pid for hand in list(self._hands.values()) if not hand.ended)

    @property
    def alive(self) -> list[int]:
        """The workers that can be waited for."""
        return [number for number, hand in self._hands.items() if not hand.ended]

    def start(self, numbers: Iterable[int], zygote: Zygote) -> None:
        """Start workers, in place of those that ended; returns when all are ready, or told why not, or ended."""
        if not self._starting:
            self._imported.publish()
        for number in numbers:
            with self._uninterrupted():
                hand = Hand(zygote, number, [memory.fd for memory in self._memories])
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
                self.deaths[hand.number] = f"hung for {self._deadline.seconds:.0f} s and was killed"
                hand.shoot()

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
            self._starting.discard(hand.number)
            self.started += 1
        elif kind == "housed":
            self.housed.append(facts)
        elif kind == "warning":
            self._output.warn(*facts)
        elif kind == "imported":
            self._imported.add(*facts)
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
        why = _spelled(hand.end())
        self.deaths.setdefault(hand.number, why)


def _abandon(hands: Mapping[int, Hand], memories: Sequence[Memory]) -> None:
    """A run that nobody closed is gone, or the interpreter ends."""
    for hand in hands.values():
        hand.kill()
    for memory in memories:
        memory.close()


def _spelled(status: int | None) -> str:
    """How a process ended, out of its wait status."""
    if status is None:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
