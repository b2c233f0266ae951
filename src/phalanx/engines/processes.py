"""The processes engine, seen from the caller's process: it makes the arena, starts workers, grants steps, takes reports.

It is not in the loop of a step. Whatever waits here also carries the workers' output and notices their deaths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import select
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.contracts import Exported, Framework
from phalanx.definition import Definition
from phalanx.engines import control as words_of
from phalanx.engines.arena import Plan
from phalanx.engines.control import Control, fence
from phalanx.engines.habitat import described
from phalanx.engines.launch import Hand, Zygote
from phalanx.engines.memory import Memory, available_bytes
from phalanx.engines.output import Output
from phalanx.engines.parcel import pack
from phalanx.errors import PhalanxError, RunError, UsageError, WorkerError
from phalanx.evaluation import averaged
from phalanx.events import StepReport
from phalanx.frameworks.opening import reduced
from phalanx.plan.placement import Placement
from phalanx.surroundings import Interrupts

POLL_MILLISECONDS = 50
FAREWELL_SECONDS = 1.0
SPARE = 0.05  # of the available memory, left to others
WHERE = {
    "torn": "the optimizer, so the weights are not those of any step",
    "unscheduled": "the scheduler; the step itself was done",
}


@dataclass(frozen=True)
class Told:
    """What a worker told: a result, or an error with its cause and traceback."""

    worker: int
    kind: str
    content: Any
    cause: BaseException | None = None
    text: str = ""
    step: int | None = None


class Processes:
    """Takes a recipe's state from step to step in worker processes over one arena.

    Parameters
    ----------
    definition : Definition
    framework : Framework
        This process's own: where the state comes from, and where it goes when somebody looks.
    placement : Placement
    zygote : Zygote
    history : sequence of float
        Losses of the steps that were done before.
    """

    environment = contextlib.nullcontext()

    def __init__(
        self,
        definition: Definition,
        framework: Framework,
        placement: Placement,
        zygote: Zygote,
        history: Sequence[float] = (),
    ) -> None:
        self.loss_history = list(history)
        self.samples = 0
        self.span: tuple[float, float] | None = None
        self.workers = placement.workers
        self._definition = definition
        self._framework = framework
        self._ended = ""
        self._torn = False
        self._closed = False
        self._interrupts = Interrupts()
        self._plan = Plan(framework.sharing, placement)
        _check_room(self._plan, placement)
        self._hands: list[Hand] = []
        self._output = Output()
        self._memories: list[Memory] = []
        self._abandoned = weakref.finalize(self, _abandon, self._hands, self._memories)
        try:
            self._open(placement, zygote)
        except BaseException:
            self._end()
            raise

    def _open(self, placement: Placement, zygote: Zygote) -> None:
        for size in (0, self._plan.size, 0):
            self._memories.append(Memory(size))
        parcel, arena, self._mailbox = self._memories
        self._arena = arena.map()
        self._control = self._plan.control(self._arena)
        self._mirror = self._framework.sharing.mirror(self._plan.layout, self._arena)
        fields = {item.name: getattr(self._definition, item.name) for item in dataclasses.fields(Definition)}
        setup = {
            "habitat": described(),
            "placement": placement,
            "signature": self._plan.layout.signature(),
            "steps": len(self.loss_history),
            "state": self._mirror.put(),
            "fields": fields,
        }
        pack(setup, parcel, reduced)
        self._control.words[words_of.DONE] = len(self.loss_history)
        self._inbox: list[Told] = []
        self._ready = 0
        self._poller = select.poll()
        for number in range(placement.workers):
            hand = Hand(zygote, number, [memory.fd for memory in self._memories])
            self._hands.append(hand)
            self._output.follow(hand.pipes)
            for fd in hand.watched:
                self._poller.register(fd, select.POLLIN)
        self._pump(lambda: self._ready == self.workers or bool(self._inbox))
        if self._inbox:
            raise _error(self._inbox)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """See ``contracts.Engine.worker_pids``."""
        return () if self._closed else tuple(hand.pid for hand in list(self._hands) if not hand.ended)

    def advance(self, batch: Any, horizon: int) -> StepReport:
        """See ``contracts.Engine.advance``."""
        self._check_able()
        t, words = len(self.loss_history), self._control.words
        if batch is not None:
            self._inbox = self._task(words_of.BATCH, batch)
        elif words[words_of.DONE] == t:
            self._grant_steps(t, horizon)
        else:  # there is a report already: only see to it that the workers need not stop
            words[words_of.UNTIL] = max(words[words_of.UNTIL], min(horizon, t + words_of.RING))
        report = self._absorb() if words[words_of.DONE] > t else None
        if report is None or any(told.step == t for told in self._inbox):
            self._fail(t)
        assert report is not None
        return report

    def evaluate(self, metric_fn: Callable[..., Any], data: Any, batch_size: int) -> float:
        """See ``contracts.Engine.evaluate``: each worker measures a block of chunks."""
        self._check_able()
        found = self._ask("evaluate", metric_fn, data, batch_size)
        return averaged([pair for pairs in found for pair in pairs])

    def export(self, *, copy: bool) -> Exported:
        """See ``contracts.Engine.export``."""
        if not self._closed:
            self._fetch()
        if self._torn:
            self._check_able()
        with self._framework.environment:
            return self._framework.export(len(self.loss_history), copy=copy)

    def close(self) -> None:
        """Take the state home and end the workers."""
        if not self._closed:
            try:
                with contextlib.suppress(PhalanxError):
                    self._fetch()
            finally:
                self._closed = True
                self._end()

    def phases(self) -> dict[str, list[float]]:
        """Seconds that each worker has spent in each phase of its steps, for profiles."""
        times = self._control.times.tolist()
        count = len(words_of.PHASES)
        return {name: times[position::count] for position, name in enumerate(words_of.PHASES)}

    def _grant_steps(self, t: int, horizon: int) -> None:
        """Let the workers go on to ``horizon``, as far as reports have room, and wait for one step."""
        words = self._control.words
        while words[words_of.DONE] == t:
            words[words_of.UNTIL] = min(horizon, t + words_of.RING)
            if self._control.all_idle():
                self._grant(words_of.STEPS)
            worth_waking = min(horizon, t + words_of.RING // 2)
            self._wait(lambda: words[words_of.DONE] > t or self._control.all_idle(), worth_waking)
            if self._control.all_idle() and words[words_of.TROUBLE]:
                return

    def _ask(self, *task: Any) -> list[Any]:
        """Have every worker do ``task``; their answers, in the order of workers."""
        told = self._task(words_of.TASK, task)
        if any(item.kind != "result" for item in told):
            raise _error(told)
        return [item.content for item in sorted(told, key=lambda item: item.worker)]

    def _task(self, kind: int, thing: Any) -> list[Told]:
        """Have every worker do something with ``thing``; what they told."""
        self._halt()
        pack(thing, self._mailbox, reduced)
        self._grant(kind)
        self._wait(self._control.all_idle, len(self.loss_history) + 1)
        told, self._inbox = self._inbox, []
        return told

    def _grant(self, kind: int) -> None:
        words = self._control.words
        words[words_of.KIND], words[words_of.PAUSE], words[words_of.TROUBLE] = kind, 0, 0
        words[words_of.GRANT] += 1
        fence()
        for hand in self._hands:
            if words[self._control.place(hand.number, words_of.SLEEPING)]:
                hand.wake()

    def _halt(self) -> None:
        """Stop at a step boundary, and count what was done on the way there."""
        words = self._control.words
        if not self._control.all_idle():
            words[words_of.PAUSE] = 1
            for hand in self._hands:
                hand.interrupt()
            try:
                self._wait(self._control.all_idle, 1 << 62)
            except KeyboardInterrupt:
                self._give_up("it was interrupted again before it had come to a stop")
                raise
            self._inbox.clear()
        while words[words_of.DONE] > len(self.loss_history):
            self._absorb()

    def _fetch(self) -> None:
        """Copy the state out of the arena, at a step boundary."""
        if not self._torn:
            self._halt()
            self._mirror.get(self._ask("state"))

    def _absorb(self) -> StepReport:
        """The next report."""
        t = len(self.loss_history)
        loss, norm, lr, samples, started, ended = self._control.report(t)
        self.loss_history.append(loss)
        self.samples += int(samples)
        self.span = (started if self.span is None else self.span[0], ended)
        epoch = None if self._definition.data is None else self._definition.plan.epoch(t)
        return StepReport(t, epoch, loss, norm, lr, int(samples), ended - started)

    def _wait(self, until: Callable[[], bool], steps: int) -> None:
        """Wait for the workers; ``steps``: how many finished ones are worth waking up for."""
        words = self._control.words
        words[words_of.AWAITED] = steps
        self._pump(until)

    def _pump(self, until: Callable[[], bool]) -> None:
        """Carry messages and output, until ``until()``; a death ends the run."""
        words = self._control.words
        with self._interrupts:
            while True:
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
                if done:
                    return

    def _handle(self, readable: set[int]) -> None:
        for fd in self._output.carry(readable):
            self._poller.unregister(fd)
        for hand in self._hands:
            if hand.channel.fileno() in readable:
                self._read(hand)
            elif hand.pidfd in readable:
                self._died(hand)

    def _read(self, hand: Hand) -> None:
        try:
            messages = [hand.channel.recv_bytes()]
            while hand.channel.poll():
                messages.append(hand.channel.recv_bytes())
        except (EOFError, OSError):
            self._died(hand)
            return
        for message in filter(None, messages):
            self._take(hand, *pickle.loads(message))  # noqa: S301  from a child of this process

    def _take(self, hand: Hand, kind: str, *facts: Any) -> None:
        """A message of a worker."""
        if kind == "ready":
            self._ready += 1
        elif kind == "warning":
            self._output.warn(*facts)
        else:
            self._torn = self._torn or kind == "torn"
            self._inbox.append(Told(hand.number, kind, *facts))

    def _died(self, hand: Hand) -> None:
        """A worker ended by itself: this version stops the run there."""
        self._control.words[words_of.ABORT] = 1
        pid, status = hand.pid, hand.end()
        how = _spelled(status)
        self._give_up(f"worker {hand.number} (process {pid}) {how} in step {len(self.loss_history)}")
        raise RunError(
            f"{self._ended}; what it printed last may say why, and the system's log if memory ran out. The state is "
            "lost with it: run again",
            step=len(self.loss_history),
        )

    def _give_up(self, why: str) -> None:
        """The state cannot be taken home any more."""
        self._torn, self._ended = True, why

    def _fail(self, t: int) -> None:
        """Raise what the workers told of step ``t``."""
        told, self._inbox = self._inbox, []
        if not told:
            raise RunError(f"step {t} was given up, and no worker said why", step=t)
        error, first = _error(told), told[0]
        if first.kind in WHERE:
            cause = error
            self._ended = f"{type(cause).__name__} ({cause}) at step {t} in {WHERE[first.kind]}"
            if not isinstance(cause, PhalanxError):
                raise WorkerError(self._ended, step=t) from cause
        raise error

    def _check_able(self) -> None:
        if self._ended:
            raise RunError(f"this run cannot go on: {self._ended}; start another")

    def _end(self) -> None:
        """End the workers, print what they still have to say, give everything back."""
        if self._abandoned.detach() is None:
            return
        for hand in self._hands:
            hand.dismiss()
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self._output.open and time.monotonic() < deadline:
            ready = select.poll()
            for hand in self._hands:
                for fd in hand.pipes if not hand.ended else ():
                    ready.register(fd, select.POLLIN)
            self._output.carry([fd for fd, _ in ready.poll(POLL_MILLISECONDS)])
        for hand in self._hands:
            hand.end()
        for memory in self._memories:
            memory.close()


def _abandon(hands: Sequence[Hand], memories: Sequence[Memory]) -> None:
    """A run that nobody closed is gone, or the interpreter ends."""
    for hand in hands:
        hand.kill()
    for memory in memories:
        memory.close()


def _check_room(plan: Plan, placement: Placement) -> None:
    needed, available = plan.layout.touched, available_bytes()
    if needed > available * (1 - SPARE):
        raise UsageError(
            f"workers is {placement.workers}, which takes about {needed / 1e9:.1f} GB of memory for weights, optimizer "
            f"state and gradients, but {available / 1e9:.1f} GB are available; use fewer workers, or engine='inline' "
            "(same answer)"
        )


def _error(told: Sequence[Told]) -> BaseException:
    """The error to raise out of several: that of the lowest replica, as one worker alone would have met it."""
    errors = [item for item in told if item.kind != "result"]
    first = min(errors, key=lambda item: (_replica(item.content) is None, _replica(item.content), item.worker))
    error, cause = first.content, first.cause
    error.__cause__ = cause
    (cause or error).add_note(f"in worker {first.worker}:\n{first.text}")
    return error


def _replica(error: Any) -> int | None:
    return getattr(error, "replica", None)


def _spelled(status: int | None) -> str:
    """How a process ended, out of its wait status."""
    if status is None:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
