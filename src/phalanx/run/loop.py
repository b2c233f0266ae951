"""The loop of a run: steps one after another, evaluated where that is due, and shown to whoever looks on.

A step is complete when its update, its evaluation, the schedule that depends on it, and the calls of all observers are
done. If an exception or Ctrl-C cut that short, the next call completes it first, and no snapshot is written before.
An observer that raised is not called again; an evaluation is repeated until it succeeds.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from phalanx.checkpoint.chained import brought_as
from phalanx.definition.checks import comparing, warn
from phalanx.definition.data import spelled
from phalanx.definition.evaluation import WATCHED, Evaluation, check_metric, deciding, meant, names_of
from phalanx.definition.fields import Definition
from phalanx.definition.metrics import Metrics, Predictions
from phalanx.definition.steady import Steady, Unchanged
from phalanx.definition.streams import Supply
from phalanx.errors import PhalanxError, RunError, UsageError, WorkerError
from phalanx.seams import Engine, Observer
from phalanx.seams.records import Evaluated, PhaseReport, StepReport, Training, Weights
from phalanx.surroundings import interrupts
from phalanx.surroundings.presence import CURRENT


class Again(NamedTuple):
    """A task that is repeated until it succeeds."""

    do: Callable[[], object]


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
    supply : Supply, optional
        Where samples come from, if the data is a stream.
    first : callable, optional
        Checks the first step, and the batch that was brought for it, before observers are told of it; may refuse
        the run.
    waiting : sequence of (str, str)
        Arguments that name a metric, and its name.
    successors : iterator of sequences of Observer, optional
        Those that this process needs once it reports and saves in place of another; asked before each step from then.
    """

    def __init__(
        self,
        definition: Definition,
        engine: Engine,
        evaluations: Sequence[Evaluation],
        observers: Sequence[Observer],
        supply: Supply | None = None,
        first: Callable[[StepReport, Any], None] | None = None,
        waiting: Sequence[tuple[str, str]] = (),
        successors: Iterator[Sequence[Observer]] | None = None,
    ) -> None:
        self._successors = successors
        self._supply = supply
        self._first, self._first_batch = first, None
        self._brought = ""  # a hash of the present step's batch, if it has one and this process may have to tell it
        self.refused = False
        self._definition = definition
        self._engine = engine
        self._evaluations = self._unseen = tuple(evaluations)
        self._waiting = waiting
        self._compared = set[Any]()  # metrics that were folded
        self._names = names_of(evaluations, engine.seen.evaluated)
        self._decisive = deciding([metric for _, metric in waiting], names_of(evaluations))
        self._counts = Counter[Any]()  # of each evaluation
        self._observers = tuple(observers)
        self._data = Unchanged(definition.source)
        self._code = Steady(definition, [getattr(each, "callback", None) for each in observers])
        self._followed = True  # whether it was asked after the last step
        self._heard = 0  # incidents that the observers have heard of
        self._elsewhere = 0  # incidents that observers of another process heard of, while that one reported
        self._ended = ""  # why no step can follow
        self._completing = False
        self._due: Again | None = None  # the task that is under way, of those that complete a step
        self._after: Iterator[Callable[[], object] | Again] = iter(())  # the tasks that follow it
        self._progress, self._seen = engine.progress, engine.seen
        self._seen.observed = len(self._progress.loss_history) - len(self._progress.unseen)
        self._begun: list[StepReport] = []  # the phases of the present step that are done

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return self._progress.steps

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
        by, total = self._seen.stopped_by, self._definition.total
        if by is None or self.finished:
            return None
        return f"at step {self.steps}{'' if total is None else f' of {total}'} by {by}"

    @property
    def runs_user_code(self) -> bool:
        """Whether an observer calls the caller's own functions between steps."""
        return any(observer.runs_user_code for observer in self._observers)

    def advance(self, batch: Any, *, watched: bool) -> StepReport:
        """Do a step, on ``batch`` or the next planned one; ``watched``: the caller may look at the state after it."""
        self.complete()
        self.check_able()
        self._succeed()
        if self._completing:
            raise UsageError("a step was asked for in the middle of another; ask after that step, not in a callback")
        self._data.check(contents=False)
        if self._followed:
            self._code.check(self.steps)
        self._unbroken(functools.partial(self._updated, batch, watched=watched))
        return self._report

    def _succeed(self) -> Sequence[Observer]:
        """Take what this process needs if it reports and saves in place of another, as soon as that can be had."""
        more: Sequence[Observer] = ()
        if self._successors is not None and self._progress.leads:
            more = next(self._successors, ())
            self._observers += tuple(more)
            for observer, incident in itertools.product(more, self._progress.incidents[self._elsewhere :]):
                observer.happened(incident)
        return more

    def complete(self, *, again: bool = True) -> None:
        """Do the remaining tasks of steps that are done; without ``again``, up to the first that has to succeed."""
        if not (self._seen.complete or self._completing):
            self.check_able()
            self._after = self._and_unseen(self._after)
            self._unbroken(again=again)

    def check_able(self) -> None:
        """Refuse, by a RunError, to go on after user code or an observer was broken off."""
        if self._ended:
            raise RunError(f"this run cannot go on: {self._ended}; start another")

    def _unbroken(self, update: Callable[[], StepReport] | None = None, *, again: bool = True) -> None:
        """Do the updates of a step, and what completes it; Ctrl-C comes after that, or in an evaluation.

        A second Ctrl-C breaks off what is being done, and ends the run.
        """
        broken, self._completing = interrupts.PROCESS.broken, True
        try:
            with interrupts.held():
                if update is not None:
                    self._after = self._completion(update())
                self._tell()
            while again and (due := self._due) is not None:
                due.do()
                self._due = None
                with interrupts.held():
                    self._tell()
        except BaseException:
            if interrupts.PROCESS.broken != broken:
                state = "what it left may be half done, but result() has a whole state, and a run_dir goes on exactly"
                self._ended = f"another Ctrl-C broke off your code after {self.steps} steps; {state}"
            raise
        finally:
            self._completing = False

    def _tell(self) -> None:
        """Call observers, up to a task that is repeated until it succeeds. One that raised is not called again."""
        if self._due is not None:
            return
        broken = interrupts.PROCESS.broken
        for due in self._after:
            if isinstance(due, Again):
                self._due = due
                return
            try:
                due()
            except BaseException:
                if interrupts.PROCESS.broken != broken:
                    self._due = Again(due)  # it is never done: the run has ended, and no snapshot has this step
                raise

    def _updated(self, batch: Any, *, watched: bool) -> StepReport:
        """Do the updates of a step."""
        epoch, outer = None, (CURRENT.step, CURRENT.epoch)  # of a run whose code does this one
        supply = self._supply if batch is None else None
        try:
            if supply is not None:
                batch = supply.draw(self.steps)
            elif self._supply is not None:
                if self._definition.schedule_every == "epoch":
                    raise UsageError(
                        "step() got a batch of yours, but schedule_every is 'epoch' and data is a stream, whose epochs "
                        "such a batch does not belong to; schedule by steps, or bring no batches"
                    )
                self._supply.postpone(self.steps)
            report = self._advanced(batch, self.steps + 1 if watched or batch is not None else self._horizon())
            if supply is not None and (batch := supply.drawn) is not None:
                epoch = batch.epoch
        except PhalanxError as error:
            error.recipe = self._definition
            error.batch = batch if supply is None else supply.drawn
            error.phase = self._definition.rounds.at(len(self._progress.loss_history)).name
            self._tell_incidents()
            for observer in self._observers:
                observer.failed(error)
            raise
        finally:
            CURRENT.step, CURRENT.epoch = outer
            self._followed = watched
            if watched:
                self._code.settle()
        if epoch is not None:
            report = report._replace(epoch=epoch)
        if self._first is not None:
            self._first_batch = batch
        for observer in self._observers if batch is not None else ():
            observer.brought(batch)
        self._brought = "" if batch is None or self._successors is None else brought_as(batch)
        return report

    def _advanced(self, batch: Any, horizon: int) -> StepReport:
        """Finish a step: one with phases may have been broken off between two of them."""
        while True:
            report = self._engine.advance(batch, self._definition.rounds.updates(horizon))
            if self._definition.phases is None or (report := self._whole(report)) is not None:
                return report

    def _whole(self, report: StepReport) -> StepReport | None:
        """The report of a step, once that of its last update is there."""
        moment = self._definition.rounds.at(report.step)
        self._begun = [report] if moment.first else [*self._begun, report]
        return merged(self._begun, self._definition) if moment.last else None

    def _completion(self, report: StepReport) -> Iterator[Callable[[], object] | Again]:
        """The tasks that complete a step, in order."""
        # This generator hands tasks out, and others call them (`_tell`, `_unbroken`). So a task that raises leaves it
        # where it was, and the next verb goes on behind that task. If a task were called in here, its exception would
        # end the generator, and the rest of the step would be lost. Evaluations, schedules, averages, logs and links
        # were missing after an exception before steps were completed so. A line behind a loop runs when the next task
        # is asked for. So `observed` is set once all observers are done. Rejected: to call observers again from the
        # beginning, as some would hear twice. Not covered: what is called in here all the same (`first`, `happened`,
        # a warning). If that raises, the rest of the step is not told.
        self._report = report
        brought, self._brought = self._brought, ""
        if (first := self._first) is not None:
            self._first = None
            self._look_first(first, report)
        if len(self._progress.incidents) != self._heard:
            self._tell_incidents()
        for name in [name for name, phase in report.phases.items() if not (report.step or phase.grad_norm)]:
            warn(f"phase {name!r} changed nothing in step 0: its loss gives its parameters a gradient of 0, or none")
        for observer in self._observers:
            yield functools.partial(observer.advanced, report)
        if report.epoch is not None:
            yield from self._evaluation(report, report.epoch)
        for observer in self._observers:
            yield functools.partial(observer.step, self._report)
        self._seen.observed = self._definition.rounds.updates(report.step + 1)
        if self._successors is not None:
            self._seen.kept.append((self._report, brought))

    def _look_first(self, first: Callable[[StepReport, Any], None], report: StepReport) -> None:
        """See whether the first step is one of this run; nobody is told of anything if it is not."""
        try:
            first(report, self._first_batch)
        except UsageError:
            self._ended, self.refused = "its recipe is another than that of the snapshot", True
            raise

    def _and_unseen(self, after: Iterator[Callable[[], object] | Again]) -> Iterator[Callable[[], object] | Again]:
        """The tasks ``after``, then those of steps that workers did while the caller was leaving."""
        yield from after
        while self._progress.unseen:
            if (report := self._whole(self._progress.unseen.popleft())) is not None:
                yield from self._completion(report)

    def _evaluation(self, report: StepReport, epoch: int) -> Iterator[Callable[[], object] | Again]:
        """The tasks after a planned step: evaluations, observers that are told, the schedule that depends on one."""
        steps = report.step + 1
        if self._supply is None:
            epoch_ended = self._definition.epoch_ended(steps) > 0
            finished = steps == self._definition.total
        else:
            epoch_ended, finished = self._supply.epochs(steps) > epoch, self.finished
        if epoch_ended or finished:
            yield Again(functools.partial(self._data.check, contents=True))
        values: dict[str, float] = {}
        for due in self._evaluations:
            if finished or due.is_due(steps, epoch, epoch_ended=epoch_ended):
                yield Again(functools.partial(self._evaluate_into, values, due))
        if values:
            yield self._check_waiting
            self._report = report._replace(metric=next(iter(values.values())), metrics=values)
            for observer in self._observers:
                yield functools.partial(observer.evaluated, values)
        if epoch_ended and (metric := self._definition.schedule_on) is not None:
            yield Again(functools.partial(self._schedule, metric, values, epoch))

    def _evaluate_into(self, values: dict[str, float], due: Evaluation) -> None:
        values |= self.evaluate(due, planned=True)
        self._unseen = tuple(each for each in self._unseen if each is not due)
        self._names |= dict.fromkeys(values, True)

    def _check_waiting(self) -> None:
        """Refuse names of metrics that no evaluation has, once each has told its names."""
        if not self._unseen:
            waiting, self._waiting = self._waiting, ()
            for argument, metric in waiting:
                check_metric(argument, metric, self._names, told=True)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Full names of all that is evaluated, as far as they are known: those of objects are once they were asked."""
        return tuple(self._names)

    def _schedule(self, metric: str, values: dict[str, float], epoch: int) -> None:
        if (value := values.get(meant(metric, self._names) or "")) is not None:  # else its evaluation was not due
            self._engine.schedule(value, epoch)
        for observer in self._observers:
            observer.scheduled(value)

    def retrain(self, change: Training) -> None:
        """Freeze or thaw parameters before the next step."""
        self.check_able()
        self._engine.schedule(change, 0)
        for observer in self._observers:
            observer.retrained(change)

    def evaluate(self, due: Evaluation, *, planned: bool = False) -> dict[str, float]:
        """Evaluate the current state, or averaged weights if there are; record values by their full names."""
        metrics = due.metrics(single=self._definition.batch_size is None)
        if planned:
            metrics.decisive = frozenset(name for name in metrics.names if due.full(name) in self._decisive)
        values = self._measured(metrics, due.data, due.batch_size, key=id(due) if planned else None)
        named = {due.full(metric): value for metric, value in values.items()}
        self._seen.evaluated += [Evaluated(self.steps, value, metric) for metric, value in named.items()]
        return named

    def predict(
        self, data: Any, batch_size: int, forward_fn: Callable[..., Any] | None, weights: Weights | None = None
    ) -> Any:
        """Outputs for all samples, with the current weights (averaged, if there are such) or other ``weights``."""
        single = self._definition.batch_size is None
        metrics = Metrics({"outputs": Predictions()}, forward_fn, targets=False, single=single)
        return self._measured(metrics, data, batch_size, weights)["outputs"]

    def left(self) -> dict[str, Any]:
        """What observers add to a result, by name; without an average, that of optimizers which have two modes."""
        left = {name: value for observer in reversed(self._observers) for name, value in observer.left().items()}
        if "averaged" not in left and (point := self._engine.eval_point()) is not None:
            left["averaged"] = point
        return left

    def end(self) -> None:
        """End the observers, from the last to the first, then the engine. If one raises, the others still end.

        Before that they are told of the last step, up to an evaluation that is still due.
        """
        with contextlib.ExitStack() as endings:
            if self._supply is not None:
                endings.callback(self._supply.close)
            endings.callback(self._end_engine)
            for observer in self._observers:
                endings.callback(observer.end)
            if not self._ended:
                endings.callback(self.complete, again=False)

    def _end_engine(self) -> None:
        """Close the engine, then save in place of a process that was lost after its last step, or while it ended."""
        self._engine.close()
        over = self.finished or self._seen.stopped_by is not None
        if self._ended or not (over and self._seen.complete):  # a last step without its evaluation is not saved
            return
        with contextlib.ExitStack() as endings:
            for observer in self._succeed():
                endings.callback(observer.end)

    def _measured(
        self,
        metrics: Metrics,
        data: Any,
        batch_size: int,
        weights: Weights | None = None,
        key: Any = None,
    ) -> dict[str, Any]:
        """The values of metrics over all of ``data``; ``key``: of an evaluation that is repeated."""
        self.check_able()
        key = key or metrics.key
        metrics.watched = self._engine.options.allow is not None and self._counts[key] in WATCHED
        with contextlib.ExitStack() as after:
            if self._followed:
                self._code.check(self.steps)
                after.callback(self._code.settle)
            readings = self._engine.evaluate(metrics, data, batch_size, weights or self.left().get("averaged"))
            try:
                with comparing(self._compared, metrics.key):
                    values = metrics.fold(readings, self._definition.seed)
            except PhalanxError:
                raise
            except Exception as error:
                message = f"{type(error).__name__} in user code while evaluating all samples: {spelled(error)}"
                raise WorkerError(message) from error
        self._counts[key] += 1  # one that ended by an error is watched again
        return values

    def _horizon(self) -> int:
        """How many steps may be done before somebody looks at the state."""
        plan = self._definition.plan
        limits = [plan.steps, *[observer.horizon(self.steps) for observer in self._observers]]
        return min([*limits, *(due.following(self.steps, plan) for due in self._evaluations)])

    def _tell_incidents(self) -> None:
        incidents = self._progress.incidents
        for incident in incidents[self._heard :]:
            for observer in self._observers:
                observer.happened(incident)
        self._heard = len(incidents)
        self._elsewhere = self._elsewhere if self._progress.leads else self._heard


def merged(reports: Sequence[StepReport], definition: Definition) -> StepReport:
    """The report of a step, out of those of its updates."""
    if definition.phases is None:
        return reports[0]
    rounds = definition.rounds
    moments = [rounds.at(report.step) for report in reports]
    main = next(report for report, moment in zip(reports, moments, strict=True) if moment.phase == rounds.main)
    phases = {
        moment.name: PhaseReport(report.loss, report.grad_norm, report.lr, report.losses)
        for report, moment in zip(reports, moments, strict=True)
    }
    return main._replace(
        step=moments[0].step,
        seconds=sum([report.seconds for report in reports]),
        parts=tuple(value for report in reports for value in report.parts),
        phases=phases,
        gradients=reports[-1].gradients,
    )
