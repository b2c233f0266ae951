"""The inline engine: one worker, this process, all replicas one after another. The reference: simple before fast."""

from __future__ import annotations

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
from phalanx.step import Rules, commit, propose
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
        self._rules = Rules(definition.replicas, definition.seed, definition.on_nonfinite)
        self._torn: str | None = None
        self._interrupts = Interrupts()
        self.environment = Reentrant(self._interrupts, framework.environment)
        self.loss_history: list[float] = []
        self.samples = 0

    def advance(self, batch: Any = None) -> StepReport:
        """Do one step: the next planned one, or on a batch that the caller brought.

        Either the whole step is done, or (after an error or Ctrl-C) none of it is.
        """
        self._check_whole()
        started = time.perf_counter()
        t = len(self.loss_history)
        with self.environment:
            shares = self._dealer.planned(t) if batch is None else self._dealer.brought(batch)
            proposal = propose(self._framework, self._rules, t, shares)
            samples, lr = sum(len(share.samples) for share in shares), self._framework.lr
            self._interrupts.hold()
            try:
                commit(self._framework, proposal)
                self.loss_history.append(proposal.loss)
                self.samples += samples
            except BaseException as error:
                self._torn = f"{type(error).__name__} in the optimizer or scheduler at step {t}: {error}"
                if not isinstance(error, Exception):
                    raise
                message = f"{self._torn}; the update was under way, so the weights are not those of any step"
                raise WorkerError(message, step=t) from error
            finally:
                self._interrupts.release()
        epoch = self._definition.plan.epoch(t) if batch is None else None
        return StepReport(t, epoch, proposal.loss, proposal.norm, lr, samples, time.perf_counter() - started)

    def evaluate(self, metric_fn: Callable[..., Any], data: Any, batch_size: int) -> float:
        """Weighted mean of a metric over all samples of ``data``, chunk by chunk, folded in the fixed order."""
        self._check_whole()
        seed = self._definition.seed
        with self.environment:
            shares = list(self._dealer.chunks(data, batch_size))
            values: Fold[float] = Fold(len(shares), _plus)
            weights: Fold[float] = Fold(len(shares), _plus)
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
        self._check_whole()
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

    def _check_whole(self) -> None:
        if self._torn is not None:
            raise RunError(f"this run cannot go on: {self._torn}; start another")


def _plus(left: float, right: float) -> float:
    return left + right
