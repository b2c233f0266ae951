"""The processes engine, seen from the caller's process: it makes the arena, grants steps, takes reports."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from phalanx.definition import checks
from phalanx.definition.data import Samples
from phalanx.definition.fields import Definition
from phalanx.definition.metrics import Metrics
from phalanx.engines.gradients import named
from phalanx.engines.processes.messages import WHERE, WorkerMessage, first_error, reason
from phalanx.engines.processes.pool import LEAVING_SECONDS, LONG, WorkerPool
from phalanx.engines.processes.serialization import pack_recipe
from phalanx.engines.processes.tasks import Describe, Evaluate, HandGradients, HandOver, Peek, Task
from phalanx.engines.readers import Readers
from phalanx.engines.recovery.failures import Deadline, FailureLog
from phalanx.engines.recovery.supervisor import Supervisor
from phalanx.errors import LostError, PhalanxError, RunError, SeveredError, safe_str
from phalanx.plan.fold import Placement
from phalanx.seams import Framework
from phalanx.seams.records import Captured, Exported, Records, StepReport, Training, Weights
from phalanx.shared.counters import BATCH, BEGIN_NO_STEP, PARENT, RING, STEPS, TASK
from phalanx.shared.inputs import MOST, Inputs
from phalanx.shared.layout import ArenaPlan
from phalanx.shared.memory import Memories, Memory, check_room
from phalanx.shared.state import Mirror
from phalanx.surroundings import interrupts

BREAK_SECONDS = 0.2  # that workers have to leave a step that is broken off; their state is in the arena
CONNECTING = 30.0  # seconds: workers meet when all have computed, so that none is late


def beside(readers: int | None, workers: int, cores: int) -> int:
    """The number of readers. If it is not given, one for each worker, as far as cores are free."""
    return max(0, min(workers, cores - workers, MOST)) if readers is None else readers


class Processes:
    """Implements ``seams.Engine`` with worker processes over one arena.

    ``framework`` is the caller's own: the state comes from it, and is copied back when it is read. ``ended`` says why
    the run cannot go on, "" if it can. ``closed`` says whether the workers are gone, ``lost`` whether the state is.
    """

    environment: AbstractContextManager[None] = contextlib.nullcontext()
    averaged: Any = None

    def __init__(
        self,
        definition: Definition,
        framework: Framework,
        placement: Placement,
        records: Records,
        deadline: Deadline,
        rendezvous: Any = None,
        readers: int = 0,
        alarm: Callable[[], str] = str,
    ) -> None:
        self.options, self.progress, self.seen = records.options, records.progress, records.seen
        self.workers = placement.workers
        self.reading, self.framework = framework.environment, framework.name
        self.ended = ""
        self.closed = self.lost = False
        self._copies = placement.copies
        self._definition = definition
        self._framework = framework
        self._deadline = deadline
        self._rendezvous = rendezvous
        self._fetched = -1
        readers = readers if isinstance(definition.source, Samples) and definition.source.random else 0
        self._keep_average()
        plan = ArenaPlan(framework.sharing, placement)
        check_room(plan.layout.touched, placement.workers)
        memories = Memories(*(Memory(0) for _ in Memories._fields))
        with contextlib.ExitStack() as undo:
            for memory in memories:
                undo.callback(memory.close)
            self._begin(plan, placement, memories, readers, records, alarm)
            undo.pop_all()

    def _keep_average(self) -> None:
        """Have workers with devices keep the average that a callback asked for."""
        if not (self._copies and self.options.averaging):
            return
        decay, name = self.options.averaging
        earlier, sharing = self.seen.waiting.get(name), self._framework.sharing
        averaged = earlier["averaged"] if isinstance(earlier, dict) else None
        if sharing.averages:  # an engine before this one kept it, unless a state has come since
            self.seen.take(name)
            averaged = averaged or sharing.averages.named()
        sharing.keep_average(self._definition.rounds, decay, averaged)
        self.averaged = self._average

    def _average(self) -> Weights | None:
        """The average after the last finished step. A snapshot of that step has fetched it already."""
        if not self.closed and self._fetched != self._steps:
            self.fetch(save=True)
        if self.lost:
            self.check_able()
        return self._framework.sharing.averages.named()

    def _begin(
        self, plan: ArenaPlan, placement: Placement, memories: Memories, readers: int, records: Records,
        alarm: Callable[[], str],
    ) -> None:  # fmt: skip
        memories.arena.grow(plan.size)
        memories.base.grow(plan.layout.base)
        mapped = memories.arena.map()
        self.counters = plan.counters(mapped, PARENT)
        self._mirror = Mirror(self._framework.sharing, plan.layout, mapped, memories.base)
        facts = {
            "options": self.options, "hosts": self._rendezvous, "ahead": readers != 0, "placement": placement,
            "signature": plan.layout.signature(), "contents": plan.layout.contents,
            "devices": self._framework.sharing.devices, "seconds": min(self._deadline.seconds(), CONNECTING),
            "began": None if self._rendezvous else self._steps,
        }  # fmt: skip
        pack_recipe(self._definition, self._framework.name, memories.environment, memories.recipe, facts)
        self._failures = FailureLog(self._definition, self._framework, placement, self.counters, records)
        self._pool = WorkerPool(memories, self.counters, self._deadline, self._failures)
        self._pool.alarm = alarm
        if any(not device.startswith("cpu") for device in self._framework.sharing.devices):
            self._pool.patience += LEAVING_SECONDS
        self.supervisor = Supervisor(
            placement, self._pool, self._mirror, self.progress, memories.mailbox, memories.orders, self._failures
        )
        try:
            self.supervisor.begin()
            self._check_alarm()
        except BaseException:
            self._pool.end()
            raise
        ring = memories.environment, memories.recipe, memories.inputs
        ended = Readers(ring, Inputs(memories.inputs, placement.replicas), readers).close if readers else bool
        self._close_readers = weakref.finalize(self, ended)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._pool.pids

    def advance(self, batch: Any, horizon: int) -> StepReport:
        self.check_able()
        with self._watching():
            if self._pool.interrupted:
                self._halt()
            t, counters = self._steps, self.counters
            self._failures.batch = batch
            if batch is not None:
                self._task(BATCH, {"batch": batch})
            elif counters.done == t:
                self._go_on(t, horizon)
            else:  # there is a report already: only see to it that the workers need not stop
                counters.horizon = max(counters.horizon, min(horizon, t + RING))
                if counters.trouble or self._failures.dead:
                    self.supervisor.wait(lambda: True, t)
        report = self._absorb() if counters.done > t else None
        if report is None or any(message.step == t for message in self._pool.messages):
            raise self._failure(t)
        if self.options.gradients and (moment := self._definition.rounds.at(t)).last:
            report = report._replace(gradients=self._gradients(moment.step))
        return report if batch is None else report._replace(epoch=None)

    def pause(self) -> bool:
        self.counters.pause = BEGIN_NO_STEP
        if self.counters.done == self._steps:
            with self._watching():
                self.supervisor.wait(self.counters.all_idle, LONG)
        return self.counters.done == self._steps

    def evaluate(self, metrics: Metrics, data: Any, batch_size: int, weights: Weights | None = None) -> list[Any]:
        """Each worker measures a block of chunks."""
        self.check_able()
        task, began = Evaluate(metrics, data, batch_size, weights), time.perf_counter()
        measured = [reading for readings in self.ask(task) for reading in readings]
        self._deadline.note((time.perf_counter() - began) * self.workers / len(measured), task=True)
        return measured

    def eval_point(self) -> Weights | None:
        """The optimizer's state is copied home before, if that has two modes."""
        if self._framework.has_modes and not self.closed and self._fetched != self._steps:
            self.fetch()
        return self._framework.eval_point()

    def schedule(self, value: float | Training, epoch: int) -> None:
        """A snapshot is taken at once, since neither evaluated values nor what is frozen follow from the losses."""
        self.check_able()
        self.fetch(save=True, change=(value, epoch))  # one task: replacements after it find the options saved

    def export(self, *, copy: bool, digest: bool = True) -> Exported:
        """Without a copy and a digest, the arrays are those in the arena."""
        if not (copy or digest or self.closed or self.lost or self._copies):
            with self._watching():
                self._halt()
                return self._mirror.look()
        if not self.closed:
            self.fetch(save=True)
        if self.lost:
            self.check_able()
        with self._framework.environment:
            return self._framework.export(self.progress.steps, copy=copy, digest=digest)

    def peek(self) -> dict[str, Any] | None:
        """The worker that has the first replica computes it."""
        self.check_able()
        return self.ask(Peek())[0]

    def capture(self) -> Captured:
        """The workers copy what they own, and go on at once."""
        self.fetch(save=True)
        self.check_able()
        self.supervisor.hold(reading=True)
        with contextlib.ExitStack() as reading:
            reading.callback(self.supervisor.hold, reading=False)
            with self._framework.environment:
                captured = self._framework.capture(copy=False)
            return dataclasses.replace(captured, release=reading.pop_all().close)

    def close(self) -> None:
        """Copy the state to the caller and end the workers."""
        if not self.closed:
            try:
                with interrupts.held():
                    self.fetch(save=False)
            except BaseException as error:
                self.lost = True
                self.ended = self.ended or f"its state could not be taken home: {safe_str(error, repr)}"
                if not isinstance(error, PhalanxError):
                    raise
            finally:
                self.closed = True
                self._close_readers()
                self._pool.end()

    def break_off(self) -> None:
        """End the workers wherever they are, and copy the state of the last whole step to the caller.

        ``lost`` says whether there is none: a worker ended in its update, or kept a part of the state to itself.
        """
        if self.closed:
            return None
        self.ended, self.lost = "", False
        with interrupts.held():
            patience = BREAK_SECONDS if self._failures.portable and not self._copies else self._deadline.seconds()
            whole = self._pool.break_off(patience)
            self.supervisor.wait_for_readers()
            if whole:
                with contextlib.suppress(PhalanxError):  # what is raised says that the state is lost, and so does lost
                    return self.close()
            losses = self.supervisor.take_home()
            self.lost, self.closed = losses is None, True
            for loss in losses or ():
                self._framework.schedule(loss)
            if not self.lost:
                self._count()
            self._close_readers()
            self._pool.end()
        return None

    @property
    def _steps(self) -> int:
        return len(self.progress.loss_history)

    def _go_on(self, t: int, horizon: int) -> None:
        """Let the workers go on to ``horizon``, as far as reports have room, and wait for one step."""
        counters, idle = self.counters, self.counters.all_idle
        while counters.done == t:
            counters.horizon = min(horizon, t + RING)
            if idle() and counters.done == t:  # read after that: workers may just have done the step, and come to rest
                if self._pool.messages or counters.trouble:  # met just now, or while running ahead
                    self.supervisor.wait(idle, t)  # reads the messages
                    return
                self.supervisor.grant(STEPS)
                counters.horizon = min(horizon, t + RING)  # lost steps may have been done again meanwhile
            self.supervisor.wait(lambda: counters.done > t or self._pool.over(), min(horizon, t + RING // 2))
            if counters.done == t:
                self._check_alarm()

    def ask(self, task: Task) -> list[Any]:
        """Have every worker do its part of a task; returns their answers."""
        with self._watching():
            messages = self._task(TASK, task)
        if any(item.kind != "result" for item in messages):
            raise first_error(messages)
        return [item.content for item in sorted(messages, key=lambda item: item.worker)]

    def _gradients(self, step: int) -> dict[str, Any]:
        """The gradients of a step that callbacks asked for. What a dead worker had of them is lost."""
        kept = self.ask(HandGradients(step))
        if None in kept:
            checks.warn(f"gradients of step {step} are incomplete: a worker ended before it could hand over its part")
        return named({at: pair for part in kept if part for at, pair in part.items()})

    def _task(self, kind: int, thing: Any) -> list[WorkerMessage]:
        """Have every worker do something with ``thing``; returns their messages. Those of a step stay in the pool."""
        self._halt()
        t = self._steps
        while True:
            self._settle()
            self.supervisor.grant(kind, thing)
            again = kind == BATCH or isinstance(thing, Evaluate)  # can be done again
            whole = self.supervisor.wait(self._pool.over if again else self.counters.all_idle, t + 1)
            if again and not (self.counters.done > t if kind == BATCH else self.counters.all_idle()):
                self._check_alarm()
            failed = any(message.kind != "result" for message in self._pool.messages)
            if whole or failed or (kind == BATCH and self.counters.done > t):
                break
        return [] if kind == BATCH else self._settle()

    def _check_alarm(self) -> None:
        if why := self._pool.alarm():
            raise SeveredError(why, step=self._steps)

    def _settle(self) -> list[WorkerMessage]:
        """Take the workers' messages, and note whether the run can go on."""
        messages, self._pool.messages = self._pool.messages, []
        for item in messages:
            if item.kind in WHERE:
                kind = "repaired" if item.kind == "torn" and self.supervisor.repaired() else item.kind
                self.lost = self.lost or kind == "torn"
                self.ended = item.spelled(kind)
        return messages

    def _halt(self) -> None:
        """Stop at a step boundary, and count the steps that were done on the way there."""
        if self._pool.interrupted or not self.counters.all_idle():
            self._pool.halt(replaceable=self._failures.replaceable)
            self._settle()
        self.supervisor.steady()
        self._count()

    def _count(self) -> None:
        """Count the steps that nobody has asked for."""
        while self.counters.done > self._steps:
            self.progress.unseen.append(self._absorb())

    def fetch(self, *, save: bool = True, change: tuple[float | Training, int] | None = None) -> None:
        """Copy the state out of the arena, at a step boundary; ``save``: the workers will go on from there.

        A snapshot may still be written to disk from the memory that it is copied to. This waits for that.
        """
        if self.lost:
            return
        with self._watching():
            self.supervisor.wait_for_readers()
            self._halt()
        if save:
            self.supervisor.forget()
        try:
            states = self.ask(Describe(save, change))
        except Exception as error:
            if change is not None or not self._copies:
                raise
            states, save = [self._of_a_survivor(error)], False
            self.ended = self.ended or str(error)
        if save:
            self.supervisor.keep(states[0]["options"])
        self._mirror.get(states, saved=save)
        self._fetched = self._steps

    def _of_a_survivor(self, error: Exception) -> dict[str, Any]:
        """Have a worker whose device still answers write the whole state to the arena; returns what describes it.

        Without any, ``error`` is raised.
        """
        for worker in range(self.workers):
            for message in self._task(TASK, HandOver(worker)):
                if message.kind == "result" and message.content is not None:
                    return message.content
        raise error

    def _absorb(self) -> StepReport:
        """Count the next report, and return it."""
        t, reports = self._steps, self.counters.reports
        loss, norm, lr, samples, started, ended, losses = reports.read(t)
        self.progress.add(loss, int(samples), self.options.audit)
        self.progress.time(started, ended)
        self._deadline.note(ended - started)
        parts, epoch = reports.parts(t), self._definition.epoch_of(t)
        return StepReport(t, epoch, loss, norm, lr, int(samples), ended - started, parts=parts, losses=losses)

    @contextlib.contextmanager
    def _watching(self) -> Any:
        """The supervisor handles dead workers; if it gives up inside, the run ends."""
        try:
            self._pool.check_owner()
            yield
        except RunError as error:
            self.ended = str(error)
            self.lost = self.lost or isinstance(error, LostError)
            raise

    def _failure(self, t: int) -> BaseException:
        """The error to raise for step ``t``, from the workers' messages."""
        with self._watching():
            self.supervisor.wait(self.counters.all_idle, LONG)  # some may not have stopped yet
        self.counters.generation += self.counters.trouble  # an exchange may have been broken off
        self.counters.trouble = 0
        return reason(self._settle(), self.ended, t)

    def check_able(self) -> None:
        """Raise a RunError if the run has ended."""
        if self.ended:
            raise RunError(f"this run cannot go on: {self.ended}; start another")
