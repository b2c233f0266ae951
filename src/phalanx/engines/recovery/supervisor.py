"""Keeps W workers at work: starts them, grants them steps and tasks, and replaces those that die.

``plan.lifecycle`` decides what to do; this module does it. The results of workers lie in the arena, and in the snapshot
there. A replacement also needs its step, and the options of optimizers and schedules. These follow from the options of
an earlier step and the losses since. Batches that the caller brought cannot be read again, so they are kept as long as
a step may have to be done again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, assert_never

from phalanx.engines.processes.messages import WorkerMessage, first_error, unfit
from phalanx.engines.processes.pool import LONG, WorkerPool
from phalanx.engines.processes.serialization import pack
from phalanx.engines.processes.tasks import Begin, HandOver, Resume, Task
from phalanx.engines.recovery.failures import FailureLog
from phalanx.errors import LostError, safe_str
from phalanx.frameworks.registry import reduced, reduced_sample
from phalanx.plan.fold import Placement
from phalanx.plan.lifecycle import Action, Decision, Repair, Seen, Situation, decide, judge
from phalanx.seams.records import Progress
from phalanx.shared.counters import BATCH, STEPS, TASK
from phalanx.shared.memory import Memory
from phalanx.shared.state import Mirror
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import SLICE_SECONDS

MOST_BATCHES = 1 << 28  # bytes of batches that are kept from one snapshot to the next
EAGER_STEPS = 10  # after a rollback, each of so many steps is followed by a snapshot
NEVER = -1


class Supervisor:
    """W workers over one arena, seen as one that does not fail.

    Parameters
    ----------
    placement : Placement
    pool : WorkerPool
    mirror : Mirror
        The caller's own state, and how it gets into the arena.
    progress : Progress
        The steps that the caller has seen.
    mailbox, orders : Memory
        Hold the task of all workers, and what a new worker has to know.
    failures : FailureLog
    """

    def __init__(
        self,
        placement: Placement,
        pool: WorkerPool,
        mirror: Mirror,
        progress: Progress,
        mailbox: Memory,
        orders: Memory,
        failures: FailureLog,
    ) -> None:
        self._placement = placement
        self._pool = pool
        self._counters = pool.counters
        self._mirror = mirror
        self._progress = progress
        self._mailbox = mailbox
        self._orders = orders
        self._failures = failures
        self._readers = threading.Condition()
        self._first = self._seen  # the first step of the latest grant
        self._home: int | None = self._seen  # the step of the caller's own state; None once that may change
        self._base: tuple[int, Any] = (self._seen, None)  # a step, and the options before it
        self._foreign: Any = None  # state of an optimizer that is not the framework's own, as the caller has it
        self._batches: dict[int, bytes] = {}  # brought by the caller since the last snapshot, by step
        self._repair: Repair | None = None

    def begin(self) -> None:
        """Put the caller's state into the arena and start all workers."""
        self._counters.snapshot_step = self._counters.snapshot_due = NEVER
        self._counters.confirmed = step = self._put()
        self._replace(range(self._placement.workers), step)

    def grant(self, kind: int, thing: Any = None) -> None:
        """Set all workers to work, once they are alive and idle after the last finished step."""
        self.steady()
        done = self._counters.done
        if kind != STEPS:
            size = pack(thing, self._mailbox, reduced_sample if kind == BATCH else reduced)
            if kind == BATCH and self._failures.portable:
                kept = self._counters.snapshot_step  # batches that the snapshot covers may go
                self._batches = {step: batch for step, batch in self._batches.items() if step >= kept}
                self._batches[done] = self._mailbox.read(size)
                if sum(map(len, self._batches.values())) > MOST_BATCHES:
                    self._counters.eager = done + 1  # a snapshot, and they may go
        else:
            self._batches.pop(done, None)  # the batch of a step that failed, and is now done as planned
        self._first = done
        self._pool.grant(kind)

    def wait(self, until: Callable[[], bool], steps: int) -> bool:
        """Wait, and replace workers that die meanwhile. False if the same has to be granted again."""
        self._pool.wait(lambda: until() or bool(self._failures.dead), steps)
        while self._failures.dead:
            if not self._joined():
                self.steady()
                return False
            self._pool.wait(lambda: until() or bool(self._failures.dead), steps)
        self._failures.came_through(self._counters.kind)
        return True

    def steady(self) -> None:
        """Make sure that all workers are alive and idle, with the state after the last finished step.

        Raises
        ------
        LostError
            The state is lost.
        RunError
            Workers die again and again.
        """
        while (decision := decide(self._situation(range(0)))).action is not Action.GO_ON:
            self._counters.trouble = 1  # the others leave the step
            self._carry_out(decision)
        self._counters.generation += self._counters.trouble
        self._counters.trouble = 0

    def take_home(self) -> list[float] | None:
        """Copy to the caller the state that workers left in the arena when they were ended; None if it is not whole.

        Returns the losses with which the caller has to step its schedules.
        """
        verdict = judge(self._counters.progress())
        if self._repair is not None and self._repair.action is Action.GO_BACK:
            return None  # some have gone back to the snapshot, others not
        if verdict.torn or self._placement.copies or not self._failures.portable or verdict.step < self._counters.done:
            return None
        self._counters.confirmed = max(self._counters.confirmed, verdict.step)
        begin = self._begun(verdict.step)
        self._mirror.get([{"foreign": begin.foreign, "options": begin.options}], saved=False)
        return begin.losses

    def repaired(self) -> bool:
        """Go back to the last finished step after an optimizer raised in mid-update; False if that is impossible."""
        if self._failures.portable:
            self.steady()
        return self._failures.portable

    def keep(self, options: Any) -> None:
        """The workers have just saved, which makes the snapshot. The caller's state may have changed.

        ``options``: those of optimizers and schedules now, so that replacements no longer need earlier losses.
        """
        self._counters.snapshot_step = self._counters.snapshot_due = self._counters.done
        self._home, self._base = None, (self._counters.done, options)

    def forget(self) -> None:
        """The workers are about to save. Until they are done, there is no snapshot, and none is needed."""
        self._counters.snapshot_step, self._counters.snapshot_due = NEVER, self._counters.done

    def hold(self, *, reading: bool) -> None:
        """Count a reader of the snapshot that begins, or is done. While there is any, the snapshot does not change."""
        with self._readers:
            self._counters.held += 1 if reading else -1
            self._readers.notify_all()

    def wait_for_readers(self) -> None:
        """Wait until nobody reads the snapshot."""
        with self._readers:
            while self._counters.held:
                self._readers.wait(SLICE_SECONDS)
                interrupts.check()

    def _situation(self, granted: range) -> Situation:
        """The input of the decision table; ``granted``: the steps in which a replacement may join."""
        counters, dead = self._counters, self._failures.dead
        at_work = [not counters.idle(worker) for worker in range(self._placement.workers)]
        progress = counters.progress()  # read after that: an idle worker has not moved since
        return Situation(
            [Seen(position, worker in dead, at_work[worker]) for worker, position in enumerate(progress)],
            granted,
            counters.done,
            counters.snapshot_due,
            counters.snapshot_step,
            self._repair,
            self._failures.portable,
            self._placement.copies,
        )

    def _granted(self) -> range:
        """The steps that workers may do now."""
        if self._counters.kind == TASK or self._counters.trouble or self._placement.copies:
            return range(0)  # copies: connections break with a worker, so nobody can wait for its replacement in a step
        agreed = self._counters.agreed if self._counters.kind == STEPS else 0
        return range(self._first, max(self._first + 1, agreed))

    def _joined(self) -> bool:
        """Let replacements join where the others wait for them; False if that is impossible."""
        decision = decide(self._situation(self._granted()))
        if decision.action is not Action.JOIN:
            return False
        fallen = sorted(self._failures.dead)
        self._failures.check()
        if 0 in fallen:  # it may have died before it confirmed the step before
            self._counters.confirmed = max(self._counters.confirmed, decision.step)
        self._replace(fallen, decision.step, joining=True)
        return True

    def _carry_out(self, decision: Decision) -> None:
        """Carry out a decision, unless the deaths end the run."""
        action, step, fallen = decision.action, decision.step, sorted(self._failures.dead)
        if fallen and (action is not Action.STOP or not self._placement.whole):
            self._failures.check()
        match action:
            case Action.STOP:
                self._stop()
            case Action.RESUME:
                self._resume(step, fallen)
            case Action.TAKE_BACK:
                if fallen:
                    self._failures.note("rollback", fallen[0], step)
                self._counters.eager = self._counters.done + EAGER_STEPS
                self._go_back(decision.back_to, fallen)
            case Action.GO_BACK:
                self._go_back(decision.back_to, fallen)
            case Action.DO_AGAIN:
                self._do_again(step)
            case Action.LOSE if self._placement.copies:
                raise LostError(
                    f"all workers had ended in step {step}, while their state was being copied to host memory, so it "
                    "is lost; run again, with a run_dir from the newest snapshot there"
                )
            case Action.LOSE:
                raise LostError(
                    f"worker {fallen[0]} {self._failures.dead[fallen[0]].why} in step {step}, and the optimizer is not "
                    "one of torch's own, or a step hook keeps or changes something beside weights, buffers and what "
                    "torch keeps in optimizer.state, so that is lost with it; run again"
                )
            case Action.GO_ON | Action.JOIN:  # nothing to do; no worker joins a grant that is being left
                pass
            case _:
                assert_never(action)

    def _stop(self) -> None:
        """Wait until all living workers have left the grant."""
        self._pool.wait(lambda: self._counters.all_idle(self._pool.alive), LONG)

    def _resume(self, step: int, fallen: Sequence[int]) -> None:
        """All go on at ``step``. Some may not know that the step before is done."""
        self._repair = Repair(Action.RESUME, step)
        self._counters.confirmed = max(self._counters.confirmed, step)
        if self._placement.copies and fallen and not self._handed_over():
            return
        self._replace(fallen, step)
        loss = self._loss(step - 1) if step > self._base[0] else 0.0
        if self._done_by_all(Resume(step, loss)):
            self._repair = None

    def _handed_over(self) -> bool:
        """Have a survivor write the whole state to the arena, for replacements; False if another one died meanwhile.

        Raises
        ------
        LostError
            None can: their devices do not answer.
        """
        dead = set(self._failures.dead)
        for source in self._pool.alive:
            self._pool.messages = self._errors()  # what the task that broke off came to is no answer here
            pack(HandOver(source), self._mailbox, reduced)
            self._pool.grant(TASK)
            self._pool.wait(lambda: self._counters.all_idle(self._pool.alive) or set(self._failures.dead) != dead, LONG)
            results = [item for item in self._pool.messages if item.worker == source and item.kind == "result"]
            if set(self._failures.dead) != dead:
                return False
            if results:
                self._pool.messages = self._errors()
                self._foreign = results[0].content["foreign"]
                return True
        raise LostError(f"no worker that is left can hand over the state: {first_error(self._errors())}")

    def _go_back(self, kept: int, fallen: Sequence[int]) -> None:
        """Go back to the state of an earlier step: the caller's own if ``kept`` is negative, else the snapshot.

        If a worker dies on the way, or Ctrl-C comes, this is continued later.
        """
        self._repair = Repair(Action.GO_BACK, kept)
        # A negative `kept` means that no snapshot is whole. Then the caller's own state goes into the arena, and no
        # snapshot is restored. It was asked once whether `kept` is the step of that state. But workers save at that
        # step, too, where Ctrl-C comes between `forget` and `keep` in front of the first step. They went on from a
        # torn arena then. All are told, not only replacements: survivors may have finished what broke off.
        restore = kept >= 0
        if not restore:
            kept = self._put()
        self._replace(fallen, kept)
        if self._done_by_all(self._begun(kept, restore=restore)):
            self._repair = None

    def _do_again(self, step: int) -> None:
        """Do a finished step again, because its result was lost."""
        if again := [
            message for message in self._errors() if message.step is not None and message.step < self._counters.done
        ]:
            raise LostError(
                f"step {again[0].step} was done again after a worker had ended, and raised what it had not raised "
                f"before: {safe_str(again[0].content, repr)}"
            )
        batch = self._batches.get(step)
        if batch is not None:
            self._mailbox.write(batch)
        self._counters.horizon = step + 1
        self._first = step
        self._pool.grant(STEPS if batch is None else BATCH)
        self._wait_for_all()

    def _done_by_all(self, task: Task) -> bool:
        """Have all workers do something about the state; False if one died meanwhile."""
        if not self._failures.dead:
            pack(task, self._mailbox, reduced)
            self._pool.grant(TASK)
            self._wait_for_all()
            self._pool.messages = self._errors()
            if any(isinstance(message.content, LostError) for message in self._pool.messages):
                raise first_error(self._pool.messages)
        return not self._failures.dead

    def _wait_for_all(self) -> None:
        """Wait until all workers are idle, or one dies."""
        self._pool.wait(lambda: self._counters.all_idle() or bool(self._failures.dead), LONG)

    def _errors(self) -> list[WorkerMessage]:
        return [message for message in self._pool.messages if message.kind != "result"]

    def _replace(self, workers: Sequence[int], step: int, *, joining: bool = False) -> None:
        """Start workers at ``step``; returns when they are ready, or have died again."""
        pack((self._begun(step), self._counters.grant, joining), self._orders, reduced)
        self._pool.start(workers)
        self._failures.started(step)
        if any(message.kind == "failed" for message in self._pool.messages):
            raise unfit(first_error(self._pool.messages))

    @property
    def _seen(self) -> int:
        """How many steps the caller has seen."""
        return len(self._progress.loss_history)

    def _put(self) -> int:
        """Put the caller's own state into the arena; returns its step."""
        assert self._home is not None  # it is given up only when there is a snapshot
        state = self._mirror.put()
        self._base = (self._home, state["options"])
        self._foreign = state["foreign"]
        return self._home

    def _loss(self, step: int) -> float:
        """The loss of a finished step."""
        seen = step < self._seen
        return self._progress.loss_history[step] if seen else self._counters.reports.read(step)[0]

    def _begun(self, step: int, *, restore: bool = False) -> Begin:
        """What a worker has to do to begin at ``step``."""
        begun, options = self._base
        return Begin(step, self._foreign, options, [self._loss(earlier) for earlier in range(begun, step)], restore)
