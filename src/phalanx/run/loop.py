"""The loop of a run: steps one after another, evaluated where that is due, and shown to whoever looks on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.definition.batches import Unchanged
from phalanx.definition.evaluation import Evaluation
from phalanx.definition.fields import Definition
from phalanx.errors import PhalanxError
from phalanx.seams import Engine
from phalanx.seams.events import Evaluated, StepReport
from phalanx.seams.observer import Observer


class Loop:
    """Asks an engine for steps, and says how far it may run ahead of those who look on.

    Parameters
    ----------
    definition : Definition
    engine : Engine
    evaluation : Evaluation or None
        Due after every epoch and after the last step.
    observers : sequence of Observer
        They have begun, in this order.
    """

    def __init__(
        self, definition: Definition, engine: Engine, evaluation: Evaluation | None, observers: Sequence[Observer]
    ) -> None:
        self._definition = definition
        self._engine = engine
        self._evaluation = evaluation
        self._observers = tuple(observers)
        self._data = Unchanged(definition.source)
        self._told = 0  # incidents that the observers have heard of

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return len(self._engine.run_state.loss_history)

    @property
    def runs_user_code(self) -> bool:
        """Whether an observer calls the caller's own functions between steps."""
        return any(observer.runs_user_code for observer in self._observers)

    def advance(self, batch: Any, *, watched: bool) -> StepReport:
        """Do a step, on ``batch`` or the next planned one; ``watched``: the caller may look at the state after it."""
        self._data.check(contents=False)
        try:
            report = self._engine.advance(batch, self.steps + 1 if watched or batch is not None else self._horizon())
        except PhalanxError as error:
            self._tell_incidents()
            for observer in self._observers:
                observer.failed(error)
            raise
        for observer in self._observers if batch is not None else ():
            observer.brought(batch)
        if len(self._engine.run_state.incidents) != self._told:
            self._tell_incidents()
        epoch_ended = report.epoch is not None and self._ends_epoch(report.step + 1)
        try:
            if epoch_ended:
                self._data.check(contents=True)
            if epoch_ended and (due := self._evaluation) is not None:
                report = report._replace(metric=self.evaluate(due.metric_fn, due.data, due.batch_size))
        except BaseException:  # the step is done all the same, and they see it
            self._show(report, [observer for observer in self._observers if not observer.needs_evaluation])
            raise
        self._show(report, self._observers)
        return report

    def evaluate(self, metric_fn: Callable[..., Any], data: Any, batch_size: int) -> float:
        """Evaluate the current state, and note the value under the metric's name."""
        value = self._engine.evaluate(metric_fn, data, batch_size)
        name = getattr(metric_fn, "__name__", "metric").replace("<lambda>", "metric")
        self._engine.run_state.evaluated.append(Evaluated(self.steps, value, name))
        return value

    def end(self) -> None:
        """End the observers, from the last to the first, then the engine; what one raises does not keep the others."""
        with contextlib.ExitStack() as endings:
            endings.callback(self._engine.close)
            for observer in self._observers:
                endings.callback(observer.end)

    def _horizon(self) -> int:
        """How many steps may be done before somebody looks at the state."""
        plan = self._definition.plan
        limits = [plan.steps, *[observer.horizon(self.steps) for observer in self._observers]]
        if self._evaluation is not None:
            limits.append((self.steps // plan.steps_per_epoch + 1) * plan.steps_per_epoch)
        return min(limits)

    def _ends_epoch(self, steps: int) -> bool:
        """Whether the last of so many steps was the last one of an epoch, or of all."""
        plan = self._definition.plan
        return steps % plan.steps_per_epoch == 0 or steps == plan.steps

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
