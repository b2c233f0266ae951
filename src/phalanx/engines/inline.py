"""The inline engine: one worker, this process, all replicas one after another. The reference: simple before fast."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

from phalanx.contracts import Exported, Framework
from phalanx.data import Share
from phalanx.deal import Dealer
from phalanx.definition import Definition
from phalanx.errors import PhalanxError, RunError, UsageError, WorkerError, spell_samples
from phalanx.events import StepReport
from phalanx.plan import evaluation_key
from phalanx.plan.fold import Fold
from phalanx.step import Proposal, commit, propose
from phalanx.surroundings import Interrupts, Reentrant


class Inline:
    """Takes a recipe's state from step to step in the calling process.

    Parameters
    ----------
    definition : Definition
    framework : Framework
        Holds the state.

    Attributes
    ----------
    loss_history : list of float
        One mean loss per finished step; its length is the number of finished steps.
    samples : int
        Samples seen in all of them.
    environment : context manager
        Re-entrant. Inside, generators, threads, modes and SIGINT are the run's; outside, the caller's.
    """

    workers = 1

    def __init__(self, definition: Definition, framework: Framework) -> None:
        self._definition = definition
        self._framework = framework
        self._dealer = Dealer(definition, framework)
        self._torn = False
        self._ended = ""
        self._interrupts = Interrupts()
        self.environment = Reentrant(self._interrupts, framework.environment)
        self.loss_history: list[float] = []
        self.samples = 0

    def advance(self, batch: Any = None) -> StepReport:
        """Do one step: the next planned one, or on a batch that the caller brought.

        Either the whole step is done, or (after an error or Ctrl-C) none of it is.
        """
        self._check_able()
        started = time.perf_counter()
        t, lr = len(self.loss_history), self._framework.lr
        with self.environment:
            shares = self._dealer.planned(t) if batch is None else self._dealer.brought(batch)
            proposal = propose(self._framework, self._definition, t, shares)
            samples = sum([len(share.samples) for share in shares])
            self._interrupts.hold()
            try:
                self._commit(t, proposal, samples)
            finally:
                self._interrupts.release()
        epoch = self._definition.plan.epoch(t) if batch is None else None
        return StepReport(t, epoch, proposal.loss, proposal.norm, lr, samples, time.perf_counter() - started)

    def evaluate(self, metric_fn: Callable[..., Any], data: Any, batch_size: int) -> float:
        """Weighted mean of a metric over all samples of ``data``, chunk by chunk, folded in the fixed order."""
        self._check_able()
        seed = self._definition.seed
        with self.environment:
            shares = list(self._dealer.chunks(data, batch_size))
            values: Fold[float] = Fold(len(shares), operator.add)
            weights: Fold[float] = Fold(len(shares), operator.add)
            for chunk, share in enumerate(shares):
                mean, weight = self._measure(metric_fn, evaluation_key(seed, chunk), share)
                values.push(chunk, mean * weight if weight else None)
                weights.push(chunk, weight)
        value, weight = values.total(), weights.total()
        if value is None or not weight:
            raise UsageError("metric_fn returned weight 0 for every chunk; there is nothing to average over")
        return value / weight

    def export(self, *, copy: bool) -> Exported:
        """The state as of the last finished step; ``copy`` makes it independent of the run."""
        if self._torn:
            self._check_able()
        with self.environment:
            return self._framework.export(len(self.loss_history), copy=copy)

    def _measure(self, metric_fn: Callable[..., Any], key: int, share: Share) -> tuple[float, float]:
        try:
            return self._framework.measure(metric_fn, key, share)
        except PhalanxError:
            raise
        except Exception as error:
            samples = spell_samples(share.samples)
            message = f"{type(error).__name__} in user code while evaluating samples {samples}: {error}"
            raise WorkerError(message, samples=share.samples) from error

    def _commit(self, t: int, proposal: Proposal, samples: int) -> None:
        """The step counts once the update is done; what fails in the schedule cannot undo it, but ends the run."""
        self._torn = True
        during = "the optimizer, so the weights are not those of any step"
        try:
            commit(self._framework, t, proposal)
            self.loss_history.append(proposal.loss)
            self.samples += samples
            self._torn = False
            during = "the scheduler; the step itself was done"
            self._framework.schedule(proposal.loss)
        except BaseException as error:
            self._ended = f"{type(error).__name__} ({error}) at step {t} in {during}"
            if isinstance(error, PhalanxError) or not isinstance(error, Exception):
                raise
            raise WorkerError(self._ended, step=t) from error

    def _check_able(self) -> None:
        if self._ended:
            raise RunError(f"this run cannot go on: {self._ended}; start another")
