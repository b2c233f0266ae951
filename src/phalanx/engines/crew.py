"""The workers of a run as the caller's process sees them: started, waited for, listened to, ended.

Whatever waits here carries the workers' output and notices their deaths. Nothing outlives it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.engines import control as words_of
from phalanx.engines.control import Control, fence, order
from phalanx.engines.launch import Hand, Zygote
from phalanx.engines.memory import Memory
from phalanx.engines.output import Output
from phalanx.engines.told import Told
from phalanx.errors import RunError
from phalanx.surroundings import Interrupts

POLL_MILLISECONDS = 50
FAREWELL_SECONDS = 1.0


class Crew:
    """W workers over some shared memories.

    Parameters
    ----------
    workers : int
        W.
    memories : sequence of Memory
        What workers inherit; closed when the crew ends.

    Attributes
    ----------
    told : list of Told
        What the workers told, in the order in which it was read.
    interrupted : bool
        Whether Ctrl-C ended a wait, and the workers were asked to stop; they may not have come to it yet.
    """

    def __init__(self, workers: int, memories: Sequence[Memory]) -> None:
        self.told: list[Told] = []
        self.interrupted = False
        self._workers = workers
        self._memories = memories
        self._hands: list[Hand] = []
        self._ready = 0
        self._output = Output()
        self._poller = select.poll()
        self._interrupts = Interrupts()
        self._abandoned = weakref.finalize(self, _abandon, self._hands, memories)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that are alive."""
        return tuple(hand.pid for hand in list(self._hands) if not hand.ended)

    def start(self, control: Control, zygote: Zygote) -> None:
        """Start all workers, and wait until they are ready or one of them tells why it is not."""
        self._control = control
        for number in range(self._workers):
            with self._uninterrupted():
                hand = Hand(zygote, number, [memory.fd for memory in self._memories])
                self._hands.append(hand)
                self._output.follow(hand.pipes)
                for fd in hand.watched:
                    self._poller.register(fd, select.POLLIN)
        self.wait(lambda: self._ready == len(self._hands) or bool(self.told), 0)

    def grant(self, kind: int) -> None:
        """Set idle workers to work."""
        words = self._control.words
        words[words_of.KIND], words[words_of.PAUSE], words[words_of.TROUBLE] = kind, 0, 0
        order()
        words[words_of.GRANT] += 1
        fence()
        for hand in self._hands:
            if words[self._control.place(hand.number, words_of.SLEEPING)]:
                hand.wake()

    def interrupt(self) -> None:
        """Stop at a step boundary; user code that is running is broken off."""
        self._control.words[words_of.PAUSE] = 1
        for hand in self._hands:
            hand.interrupt()

    def wait(self, until: Callable[[], bool], steps: int) -> None:
        """Wait until ``until()``; ``steps``: how many finished ones are worth waking up for.

        Raises
        ------
        RunError
            A worker has ended by itself.
        """
        self._control.words[words_of.AWAITED] = steps
        try:
            self._wait(until)
        except KeyboardInterrupt:
            self.interrupted = True
            self.interrupt()
            raise

    def _wait(self, until: Callable[[], bool]) -> None:
        words, done = self._control.words, False
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
                finally:
                    self._interrupts.release()

    def end(self) -> None:
        """End the workers, print what they still have to say, give everything back."""
        if self._abandoned.detach() is None:
            return
        with self._uninterrupted():
            for hand in self._hands:
                hand.dismiss()
            deadline = time.monotonic() + FAREWELL_SECONDS
            try:
                while self._output.open and time.monotonic() < deadline:
                    self._output.carry_waiting(POLL_MILLISECONDS)
            finally:
                for hand in self._hands:
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
        for hand in [hand for hand in self._hands if not hand.ended]:
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
            self._ready += 1
        elif kind == "warning":
            self._output.warn(*facts)
        else:
            self.told.append(Told(hand.number, kind, *facts))

    def _died(self, hand: Hand) -> None:
        """A worker ended by itself: this version stops the run there."""
        if any(told.worker == hand.number and told.kind == "failed" for told in self.told):
            return  # it never began, and has told why
        self._control.words[words_of.ABORT] = 1
        for fd in hand.watched:
            try:
                self._poller.unregister(fd)
            except KeyError:  # its output had ended before
                continue
        self._output.forget(hand.pipes)
        pid, status = hand.pid, hand.end()
        raise RunError(f"worker {hand.number} (process {pid}) {_spelled(status)}")


def _abandon(hands: Sequence[Hand], memories: Sequence[Memory]) -> None:
    """A run that nobody closed is gone, or the interpreter ends."""
    for hand in hands:
        hand.kill()
    for memory in memories:
        memory.close()


def _spelled(status: int | None) -> str:
    """How a process ended, out of its wait status."""
    if status is None:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
