"""Keeps W workers at work: starts them, grants what they are to do, and puts others in the place of those that end.

Decisions are made in ``plan.lifecycle``; here they are carried out. What workers did lies in the arena, so a
replacement finds weights, gradients and optimizer state as the plan says; schedules are done again with the losses that
were reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.engines.processes.failures import FailureLog
from phalanx.engines.processes.launch import WARM
from phalanx.engines.processes.messages import LostError, WorkerMessage, first_error, unfit
from phalanx.engines.processes.pool import LONG, WorkerPool
from phalanx.engines.processes.serialization import pack
from phalanx.frameworks.registry import reduced
from phalanx.plan.lifecycle import joinable, judge, newest_whole
from phalanx.plan.placement import Placement
from phalanx.seams import RunState
from phalanx.shared import control as words_of
from phalanx.shared.memory import Memory
from phalanx.shared.state import Mirror

MOST_BATCHES = 1 << 28  # bytes of batches that are kept from one snapshot to the next
EAGER_STEPS = 10  # after a state was taken back, each of as many steps is followed by a snapshot
NEVER = -1


class Supervisor:
    """W workers over one arena, seen as one that does not fail.

    Parameters
    ----------
    placement : Placement
    pool : WorkerPool
    mirror : Mirror
        The caller's own state, and the way into the arena.
    mailbox, orders : Memory
        For what all workers are to do, and for what a new one has to know.
    run_state : RunState
        The steps that the caller has seen.
    failures : FailureLog
    """

    def __init__(
        self,
        placement: Placement,
        pool: WorkerPool,
        mirror: Mirror,
        mailbox: Memory,
        orders: Memory,
        run_state: RunState,
        failures: FailureLog,
    ) -> None:
        self._placement = placement
        self._pool = pool
        self._control = pool.control
        self._mirror = mirror
        self._mailbox = mailbox
        self._orders = orders
        self._course = run_state
        self._failures = failures
        self._portable = failures.portable
        self._home: int | None = self._seen  # the step at which the caller's own state is
        self._first = self._seen  # the first step of the latest grant
        self._unfinished: tuple[Callable[[int, Sequence[int]], None], int] | None = None  # a repair, and its step
        self._batches: dict[int, bytes] = {}  # that the caller brought, since the last snapshot

    def begin(self) -> None:
        """Put the caller's state into the arena and start all workers."""
        words = self._control.words
        words[words_of.DONE], words[words_of.SNAPSHOT_STEP], words[words_of.SNAPSHOT_DUE] = self._seen, NEVER, NEVER
        self._put()
        self._replace(range(self._placement.workers), self._seen)

    def grant(self, kind: int, thing: Any = None) -> None:
        """Set all workers to work; they are alive and idle, at the step after the last one that was finished."""
        self.steady()
        if kind != words_of.STEPS:
            size = pack(thing, self._mailbox, reduced)
            if kind == words_of.BATCH and self._portable:
                kept = self._control.words[words_of.SNAPSHOT_STEP]
                self._batches = {step: batch for step, batch in self._batches.items() if step >= kept}
                self._batches[self._done] = self._mailbox.read(size)
                if sum(map(len, self._batches.values())) > MOST_BATCHES:
                    self._control.words[words_of.EAGER] = self._done + 1  # a snapshot, and they may go
        else:
            self._batches.pop(self._done, None)  # of a step that failed, and is now done as planned
        self._first = self._done
        self._pool.grant(kind)

    def wait(self, until: Callable[[], bool], steps: int) -> bool:
        """Wait; whoever falls meanwhile is replaced. False if what was granted has to be granted again."""
        self._pool.wait(lambda: until() or bool(self._pool.deaths), steps)
        while self._pool.deaths:
            if not self._joined():
                self.steady()
                return False
            self._pool.wait(lambda: until() or bool(self._pool.deaths), steps)
        self._failures.came_through(self._control.words[words_of.KIND])
        return True

    def steady(self) -> None:
        """See to it that all workers are alive and idle, with the state after the last finished step.

        Raises
        ------
        LostError
            The state is lost.
        RunError
            Workers end again and again.
        """
        while not self._whole():
            self._control.words[words_of.TROUBLE] = 1  # the others leave the step
            if not self._placement.whole and self._pool.deaths:
                self._failures.fell(self._pool.deaths, self._pool.started, self._pool.lived)  # raises
            self._pool.wait(lambda: self._control.all_idle(self._pool.alive), LONG)
            if not self._placement.whole and self._errors():
                raise self._errors()[0].content  # no step can be done again without the other hosts
            if self._pool.deaths:
                self._failures.fell(self._pool.deaths, self._pool.started, self._pool.lived)
                self._mend()
            elif self._unfinished is not None:  # broken off by Ctrl-C
                self._unfinished[0](self._unfinished[1], ())
            elif again := [told for told in self._errors() if told.step is not None and told.step < self._done]:
                raise LostError(
                    f"step {again[0].step} was done again after a worker had ended, and raised what it had not raised "
                    f"before: {again[0].content!r}"
                )
            else:
                self._do_again(judge(self._control.places()).step)
        self._control.words[words_of.TROUBLE] = 0

    def repaired(self) -> bool:
        """An optimizer raised, and tore the state: take it back to the last finished step; False if that cannot be."""
        step, torn = judge(self._control.places())
        if torn and self._portable:
            self._take_back(step, ())
            self.steady()
        return self._portable

    def keep(self, options: Any) -> None:
        """The workers have just saved: that is the snapshot now. The caller's state may have changed.

        ``options``: those of optimizers and schedules now, so that earlier losses need not be told any more.
        """
        self._control.words[words_of.SNAPSHOT_STEP] = self._control.words[words_of.SNAPSHOT_DUE] = self._done
        self._home = None
        self._options, self._begun = options, self._done

    def forget(self) -> None:
        """The workers are about to save: until they have, there is no snapshot, and none is needed."""
        self._control.words[words_of.SNAPSHOT_STEP], self._control.words[words_of.SNAPSHOT_DUE] = NEVER, self._done

    def hold(self, *, reading: bool) -> None:
        """While somebody reads the snapshot it stays as it is."""
        self._control.words[words_of.HOLD] = reading

    @property
    def held(self) -> bool:
        """Whether somebody reads the snapshot."""
        return bool(self._control.words[words_of.HOLD])

    @property
    def _seen(self) -> int:
        return len(self._course.loss_history)

    @property
    def _done(self) -> int:
        return self._control.words[words_of.DONE]

    def _whole(self) -> bool:
        whole = not self._pool.deaths and self._control.all_idle() and self._unfinished is None
        return whole and judge(self._control.places()).step >= self._done

    def _errors(self) -> list[WorkerMessage]:
        return [told for told in self._pool.told if told.kind != "result"]

    def _joined(self) -> bool:
        """Let replacements step in where the others wait for them, if that is possible."""
        words, fallen = self._control.words, sorted(self._pool.deaths)
        places = self._control.places()
        step = places[fallen[0]].step
        running = words[words_of.KIND] != words_of.TASK and not words[words_of.TROUBLE]
        due = step == self._first or (words[words_of.KIND] == words_of.STEPS and words[words_of.AGREED] > step)
        lost = 0 in fallen and not self._portable
        if not (running and due and joinable(places, fallen)) or lost or any(map(self._control.idle, fallen)):
            return False
        self._failures.fell(self._pool.deaths, self._pool.started, self._pool.lived)
        if 0 in fallen:  # it may have ended before it said that the step before is finished
            words[words_of.DONE] = max(words[words_of.DONE], step)
        self._replace(fallen, step, joining=True)
        return True

    def _mend(self) -> None:
        """All that live are idle: take the state back if it is torn, replace those that ended, tell the others."""
        fallen = sorted(self._pool.deaths)
        step, torn = judge(self._control.places())
        if not self._portable and (torn or 0 in fallen):
            raise LostError(
                f"worker {fallen[0]} {self._pool.deaths[fallen[0]].why} in step {step}, and the optimizer is not one "
                "of torch's own, so its state is lost with it; run again"
            )
        if self._unfinished is not None and self._unfinished[0] == self._go_back:
            self._go_back(self._unfinished[1], fallen)
        elif torn:
            self._failures.note("rollback", fallen[0], step)
            self._take_back(step, fallen)
        else:
            self._resume(step, fallen)

    def _resume(self, step: int, fallen: Sequence[int]) -> None:
        """All go on at ``step``; some may not have been told that the one before is done."""
        self._unfinished = self._resume, step
        words = self._control.words
        words[words_of.DONE] = max(words[words_of.DONE], step)
        self._replace(fallen, step)
        if self._told("resume", {"step": step, "loss": self._loss(step - 1) if step > self._begun else 0.0}):
            self._unfinished = None

    def _take_back(self, torn: int, fallen: Sequence[int]) -> None:
        """Step ``torn`` left no state of its own: take that of the newest snapshot, and save more often for a while."""
        words = self._control.words
        words[words_of.EAGER] = self._done + EAGER_STEPS
        self._go_back(newest_whole(words[words_of.SNAPSHOT_DUE], words[words_of.SNAPSHOT_STEP], torn), fallen)

    def _go_back(self, kept: int, fallen: Sequence[int]) -> None:
        """Take the state of an earlier step: the caller's own, or the snapshot. Goes on next time if somebody falls."""
        self._unfinished = self._go_back, kept
        if kept < 0:
            assert self._home is not None  # it is given up only when there is a snapshot
            kept = self._home
            self._put()
        restore = kept != self._home
        self._replace(fallen, kept)
        if self._told("take", {"orders": {**self._described(kept), "restore": restore}}):
            self._unfinished = None

    def _do_again(self, step: int) -> None:
        """Do a finished step again, as it was lost."""
        words = self._control.words
        batch = self._batches.get(step)
        if batch is not None:
            self._mailbox.write(batch)
        words[words_of.UNTIL] = step + 1
        self._first = step
        self._pool.grant(words_of.STEPS if batch is None else words_of.BATCH)
        self._pool.wait(lambda: self._control.all_idle() or bool(self._pool.deaths), LONG)

    def _told(self, task: str, facts: Mapping[str, Any]) -> bool:
        """Have all workers do something about the state; False if one fell meanwhile."""
        if not self._pool.deaths:
            pack({**facts, "task": task}, self._mailbox, reduced)
            self._pool.grant(words_of.TASK)
            self._pool.wait(lambda: self._control.all_idle() or bool(self._pool.deaths), LONG)
            self._pool.told = self._errors()
            if any(isinstance(told.content, LostError) for told in self._pool.told):
                raise first_error(self._pool.told)
        return not self._pool.deaths

    def _put(self) -> None:
        """Put the caller's own state into the arena."""
        state = self._mirror.put()
        self._options = state["options"]
        self._begun = self._seen if self._home is None else self._home
        self._foreign = state["foreign"]

    def _described(self, step: int) -> dict[str, Any]:
        """What a worker has to know of the state before ``step``, apart from what lies in the arena."""
        begun, options = self._pool.options_at(step, (self._begun, self._options))
        return {
            "step": step,
            "foreign": self._foreign,
            "options": options,
            "losses": [self._loss(earlier) for earlier in range(begun, step)],
            "restore": False,
        }

    def _loss(self, step: int) -> float:
        return self._course.loss_history[step] if step < self._seen else self._control.reports.read(step)[0]

    def _replace(self, workers: Sequence[int], step: int, *, joining: bool = False) -> None:
        """Start workers at ``step``; returns when they are ready, or have ended again."""
        grant = self._control.words[words_of.GRANT]
        pack({**self._described(step), "grant": grant, "joining": joining}, self._orders, reduced)
        for worker in workers:
            self._control.words[self._control.place(worker, words_of.COUNT)] = 0
        self._failures.start()
        self._pool.start(workers, WARM)
        self._failures.started(self._pool.deaths, step)
        if any(told.kind == "failed" for told in self._pool.told):
            raise unfit(first_error(self._pool.told))
