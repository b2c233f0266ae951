"""The loop of a run: steps one after another, evaluated where that is due, and shown to whoever looks on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.definition.batches import Unchanged
from phalanx.definition.evaluation import Evaluation
from phalanx.definition.evaluation.metrics import Metrics, Predictions
from phalanx.definition.fields import Definition
from phalanx.errors import PhalanxError, UsageError, WorkerError
from phalanx.seams import Dealer, Engine, Weights
from phalanx.seams.events import Evaluated, PhaseReport, StepReport
from phalanx.seams.observer import Observer


class Loop:
    """Asks an engine for steps, and says how far it may run ahead of those who look on.

    Parameters
    ----------
    definition : Definition
    engine : Engine
    evaluations : sequence of Evaluation
        Each is due as often as it says, and after the last step.
    observers : sequence of Observer
        They have begun, in this order.
    supply : Dealer, optional
        Where samples come from, if the data is a stream.
    """

    def __init__(
        self,
        definition: Definition,
        engine: Engine,
        evaluations: Sequence[Evaluation],
        observers: Sequence[Observer],
        supply: Dealer | None = None,
    ) -> None:
        self._supply = supply
        self._definition = definition
        self._engine = engine
        self._evaluations = tuple(evaluations)
        self._observers = tuple(observers)
        self._data = Unchanged(definition.source)
        self._told = 0  # incidents that the observers have heard of
        self._begun: list[StepReport] = []  # the phases of the present step that are done

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return self._engine.run_state.steps

    @property
    def finished(self) -> bool:
        """Whether all steps or epochs that were asked for are done."""
        total, epochs = self._definition.total, self._definition.epochs
        if self._supply is None or epochs is None:
            return total is not None and self.steps >= total
        return self._supply.epochs(self.steps) >= epochs

    @property
    def stopped_early(self) -> str | None:
        """Where and by whom the run was stopped, if that was before its end."""
        by, total = self._engine.run_state.stopped_by, self._definition.total
        if by is None or self.finished:
            return None
        return f"at step {self.steps}{'' if total is None else f' of {total}'} by {by}"

    @property
    def runs_user_code(self) -> bool:
        """Whether an observer calls the caller's own functions between steps."""
        return any(observer.runs_user_code for observer in self._observers)

    def advance(self, batch: Any, *, watched: bool) -> StepReport:
        """Do a step, on ``batch`` or the next planned one; ``watched``: the caller may look at the state after it."""
        self._data.check(contents=False)
        epoch = None
        try:
            if self._supply is not None and batch is None:
                batch = self._supply.draw(self.steps)
                epoch = batch.epoch
            elif self._supply is not None:
                self._supply.postpone(self.steps)
            report = self._advanced(batch, self.steps + 1 if watched or batch is not None else self._horizon())
        except PhalanxError as error:
            error.recipe, error.batch = self._definition, batch
            error.phase = self._definition.rounds.at(len(self._engine.run_state.loss_history)).name
            self._tell_incidents()
            for observer in self._observers:
                observer.failed(error)
            raise
        if epoch is not None:
            report = report._replace(epoch=epoch)
        for observer in self._observers if batch is not None else ():
            observer.brought(batch)
        if len(self._engine.run_state.incidents) != self._told:
            self._tell_incidents()
        try:
            for observer in self._observers:
                observer.advanced(report)
            if report.epoch is not None:
                report = self._evaluated(report)
        except BaseException:  # the step is done all the same, and they see it
            self._show(report, [observer for observer in self._observers if not observer.needs_evaluation])
            raise
        self._show(report, self._observers)
        return report

    def _advanced(self, batch: Any, horizon: int) -> StepReport:
        """What is left of a step: a step with phases may have been broken off between two."""
        rounds = self._definition.rounds
        while True:
            report = self._engine.advance(batch, rounds.updates(horizon))
            moment = rounds.at(report.step)
            self._begun = [report] if moment.first else [*self._begun, report]
            if moment.last:
                return merged(self._begun, self._definition)

    def evaluate(self, metric_fn: Any, data: Any, batch_size: int, name: str = "") -> dict[str, float]:
        """Evaluate the current state, averaged if it is; note the values, by their metrics' names after ``name``."""
        single = self._definition.batch_size is None
        values = self._measured(Metrics(metric_fn, single=single), data, batch_size)
        named = {f"{name}/{metric}" if name else metric: value for metric, value in values.items()}
        self._engine.run_state.evaluated += [Evaluated(self.steps, value, metric) for metric, value in named.items()]
        return named

    def predict(
        self, data: Any, batch_size: int, forward_fn: Callable[..., Any] | None, weights: Weights | None = None
    ) -> Any:
        """Outputs for all samples, of the current state (averaged, if it is) or with other ``weights``."""
        single = self._definition.batch_size is None
        metrics = Metrics({"outputs": Predictions()}, forward_fn, targets=False, single=single)
        return self._measured(metrics, data, batch_size, weights)["outputs"]

    def left(self) -> dict[str, Any]:
        """What observers leave for a result."""
        return {name: value for observer in self._observers for name, value in observer.left().items()}

    def end(self) -> None:
        """End the observers, from the last to the first, then the engine; what one raises does not keep the others."""
        with contextlib.ExitStack() as endings:
            if self._supply is not None:
                endings.callback(self._supply.close)
            endings.callback(self._engine.close)
            for observer in self._observers:
                endings.callback(observer.end)

    def _measured(self, metrics: Metrics, data: Any, batch_size: int, weights: Weights | None = None) -> dict[str, Any]:
        """What metrics come to over all of ``data``."""
        readings = self._engine.evaluate(metrics, data, batch_size, weights or self.left().get("averaged"))
        try:
            return metrics.fold(readings)
        except PhalanxError:
            raise
        except Exception as error:
            message = f"{type(error).__name__} in user code while evaluating all samples: {error}"
            raise WorkerError(message) from error

    def _evaluated(self, report: StepReport) -> StepReport:
        """Evaluate what is due after a planned step; the report with its values."""
        steps, epoch, finished = report.step + 1, report.epoch, self.finished
        assert epoch is not None, "who asks has looked"
        if self._supply is None:
            epoch_ended = steps % self._definition.plan.steps_per_epoch == 0
        else:
            epoch_ended = self._supply.epochs(steps) > epoch
        if epoch_ended or finished:
            self._data.check(contents=True)
        values: dict[str, float] = {}
        for due in self._evaluations:
            if finished or due.is_due(steps, epoch, epoch_ended=epoch_ended):
                values |= self.evaluate(due.metric_fn, due.data, due.batch_size, due.name)
        if not values:
            return report
        for observer in self._observers:
            observer.evaluated(values)
        name = self._definition.schedule_on
        if epoch_ended and name is not None:
            if name not in values:
                raise UsageError(
                    f"schedule_on is {name!r}, but what was evaluated is {', '.join(values)}; name one of those"
                )
            self._engine.schedule(values[name], epoch)
        return report._replace(metric=next(iter(values.values())), metrics=values)

    def _horizon(self) -> int:
        """How many steps may be done before somebody looks at the state."""
        plan = self._definition.plan
        limits = [plan.steps, *[observer.horizon(self.steps) for observer in self._observers]]
        periods = [due.period(plan.steps_per_epoch) for due in self._evaluations]
        return min([*limits, *((self.steps // period + 1) * period for period in periods)])

    def _tell_incidents(self) -> None:
        incidents = self._engine.run_state.incidents
        for incident in incidents[self._told :]:
            for observer in self._observers:
                observer.happened(incident)
        self._told = len(incidents)

    @staticmethod
    def _show(report: StepReport, observers: Sequence[Observer]) -> None:
        for observer in observers:
            observer.step(report)


def merged(reports: Sequence[StepReport], definition: Definition) -> StepReport:
    """The report of a step, out of those of its updates."""
    if definition.phases is None:
        return reports[0]
    rounds = definition.rounds
    moments = [rounds.at(report.step) for report in reports]
    main = next(report for report, moment in zip(reports, moments, strict=True) if moment.phase == rounds.main)
    phases = {
        moment.name: PhaseReport(report.loss, report.grad_norm, report.lr)
        for report, moment in zip(reports, moments, strict=True)
    }
    return main._replace(
        step=moments[0].step,
        seconds=sum([report.seconds for report in reports]),
        parts=tuple(value for report in reports for value in report.parts),
        phases=phases,
    )
