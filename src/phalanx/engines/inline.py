"""The inline engine: this process is the only worker, and computes all replicas one after another.

It is the reference, so it is simple rather than fast. On one device its link reaches no other worker: it hosts every
replica and owns everything. On several devices one link still hosts all replicas, and moves partial sums between them.
"""

from __future__ import annotations

import functools
import time
import weakref
from typing import Any

from phalanx.definition.batches import BatchShares
from phalanx.definition.fields import Definition
from phalanx.definition.metrics import Metrics
from phalanx.engines.alone import alone
from phalanx.engines.gradients import Gradients, named
from phalanx.engines.twice import Twice
from phalanx.errors import PhalanxError, RunError, WorkerError, safe_str
from phalanx.seams import Framework
from phalanx.seams.records import Captured, Exported, Records, StepReport, Training, Weights
from phalanx.shared.memory import RUNS
from phalanx.step import Proposal, commit, following
from phalanx.surroundings import interrupts


class Inline:
    """Implements ``seams.Engine`` in the calling process.

    Parameters
    ----------
    definition : Definition
    framework : Framework
        Holds the state.
    records : Records
        With the steps that were done before, in another engine.
    ahead : Readers, optional
        Readers in other processes, from which shares come; closed with the engine.

    Attributes
    ----------
    environment : context manager
        Re-entrant. Inside, generators, threads and modes are the run's; outside, the caller's.
    """

    workers = 1
    averaged = None
    worker_pids: tuple[int, ...] = ()

    def __init__(
        self,
        definition: Definition,
        framework: Framework,
        records: Records,
        ahead: Any = None,
    ) -> None:
        self.options, self.progress, self.seen = records.options, records.progress, records.seen
        self._definition = definition
        self._framework = framework
        self._lanes = framework.lanes
        self._link = alone(framework, definition.replicas)
        self._close_readers = weakref.finalize(self, ahead.close if ahead else bool)
        self._dealer = BatchShares(definition, framework.opened, None if ahead is None else ahead.taken)
        self._torn = False
        self.ended = ""
        self.closed = False
        self._twice = Twice(definition, framework, allow=self.options.allow, audit=self.options.audit)
        self._twice.begin(len(self.progress.loss_history))
        self._gradients = Gradients(framework, names) if (names := self.options.gradients) else None
        RUNS.begin()
        self._memory = weakref.finalize(self, RUNS.end)
        self.environment = self.reading = framework.environment
        self.framework = framework.name

    def advance(self, batch: Any, horizon: int) -> StepReport:
        """Do one step, on a batch that the caller brought or on the next planned one. No step runs ahead.

        Either the whole step is done, or (after an error or Ctrl-C) none of it is.
        """
        self.check_able()
        started = time.perf_counter()
        t, lr = len(self.progress.loss_history), self._framework.lr
        with self.environment:
            shares = self._dealer.planned(t) if batch is None else self._dealer.brought(batch)
            if batch is None:
                next_one = self._definition, self._link.hosted, self._dealer.planned, t + 1, horizon
                self._framework.following = functools.partial(following, *next_one)
            samples = sum([len(share.samples) for share in shares])
            self._link.begin(t, shares)
            proposal = self._twice.propose(self._link, t, shares)
            if self._gradients is not None:
                self._gradients.keep(self._definition.rounds.at(t), proposal.gradient)
            self._commit(t, proposal, samples)
        epoch = self._definition.epoch_of(t) if batch is None else None
        ended = time.perf_counter()
        self.progress.time(started, ended)
        parts, losses, seconds = tuple(proposal.parts), proposal.named, ended - started
        report = StepReport(t, epoch, proposal.loss, proposal.norm, lr, samples, seconds, parts=parts, losses=losses)
        return report._replace(gradients=named(self._gradients.latest)) if self._gradients else report

    def pause(self) -> bool:
        """No step runs ahead here."""
        return True

    def evaluate(self, metrics: Metrics, data: Any, batch_size: int, weights: Weights | None = None) -> list[Any]:
        self.check_able()
        most = 1 if self._lanes is None else len(self._lanes.placement.blocks)
        with self.environment:
            shares = self._dealer.chunks(data, batch_size, metrics.collate_fn)
            return self._twice.readings(metrics, shares, range(len(shares)), weights, interrupts.check, most)

    def export(self, *, copy: bool, digest: bool = True) -> Exported:
        if self._torn:
            self.check_able()
        with self.environment:
            return self._framework.export(self.progress.steps, copy=copy, digest=digest)

    def eval_point(self) -> Weights | None:
        with self.environment:
            return self._framework.eval_point()

    def schedule(self, value: float | Training, epoch: int) -> None:
        self.check_able()
        with self.environment:
            self._framework.schedule(value, epoch)

    def peek(self) -> dict[str, Any] | None:
        self.check_able()
        return self._twice.peek(len(self.progress.loss_history))

    def capture(self) -> Captured:
        if self._torn:
            self.check_able()
        with self.environment:
            return self._framework.capture(copy=True)

    def close(self) -> None:
        """Give back the memory that steps had freed and would have used again."""
        self.closed = True
        self._close_readers()
        self._memory()  # a finalizer runs only once

    def _commit(self, t: int, proposal: Proposal, samples: int) -> None:
        """Update the weights; then the step counts. An error in the schedule cannot undo it, but ends the run."""
        self._torn = True
        during = "the optimizer, so the weights are not those of any step"
        try:
            commit(self._framework, self._link, t, proposal)
            self.progress.add(proposal.loss, samples, self.options.audit)
            self._torn = False
            during = "the scheduler; the step itself was done"
            self._framework.schedule(proposal.loss)
        except BaseException as error:
            moment = self._definition.rounds.at(t)
            self.ended = f"{type(error).__name__} ({safe_str(error)}) at {moment} in {during}"
            if isinstance(error, PhalanxError) or not isinstance(error, Exception):
                raise
            raise WorkerError(self.ended, step=moment.step) from error

    def check_able(self) -> None:
        """Raise a RunError if the run cannot go on."""
        if self.ended:
            raise RunError(f"this run cannot go on: {self.ended}; start another")
