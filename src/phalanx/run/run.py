"""A run you hold: iterate it, feed it, evaluate it, take its result. Paces an engine; knows no framework."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.checkpoint.saver import Saver, write_apart
from phalanx.definition import checks
from phalanx.definition.batches import Unchanged
from phalanx.definition.evaluation import DEFAULT_BATCH, Evaluation, check_evaluation
from phalanx.definition.fields import Definition
from phalanx.errors import LeftError, PhalanxError, Preempted, SnapshotError, UsageError
from phalanx.run.progress import ProgressBar
from phalanx.run.result import Result, result_of
from phalanx.seams import Engine
from phalanx.seams.events import Evaluated, Incident, StepReport
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import ALONE, Turns, verb

Callback = Callable[[StepReport], Any]


class Run:
    """One execution of a recipe; made by ``recipe.start()``, used in a ``with`` block.

    Iterating yields a ``StepReport`` per step; while you hold report k, the state is exactly the one after step k.

    Attributes
    ----------
    metric_history : list of Evaluated
        Every evaluation so far.
    """

    def __init__(
        self,
        definition: Definition,
        engine: Engine,
        callbacks: Sequence[Callback],
        evaluation: Evaluation | None,
        progress: ProgressBar,
        called: float,
        saver: Saver | None = None,
    ) -> None:
        self._definition = definition
        self._engine = engine
        self._callbacks = tuple(callbacks)
        self._evaluation = evaluation
        self._progress = progress
        self._called = called
        self._saver = saver
        self._data = Unchanged(definition.source)
        self._terminated = self._closed = False
        self._opened, self._watched = time.perf_counter(), True
        self.turn, self.metric_history = Turns(), list[Evaluated]()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        with interrupts.guarded(leaving=interrupted), interrupts.shielded(), self.turn:
            try:
                if interrupted:
                    self._hand_over(error)
            finally:
                self.close()

    def __iter__(self) -> Iterator[StepReport]:
        return self

    @verb
    def __next__(self) -> StepReport:
        if self._definition.data is None:
            raise UsageError("there is no data to iterate over (data=None): bring each batch with run.step(batch)")
        if self._closed or self.steps >= self._definition.plan.steps:
            self._progress.close()
            raise StopIteration
        try:
            return self._advance(None)
        except StopIteration as error:  # as generators do: a callback's would pass for the end of the run
            raise RuntimeError("a callback raised StopIteration") from error

    @verb
    def finish(self) -> None:
        """Do all planned steps that are left. Between them the run keeps its environment, if no callback looks."""
        self._watched = bool(self._callbacks)
        try:
            going_on = True
            while going_on:
                with contextlib.nullcontext() if self._watched else self._engine.environment:
                    going_on = self._until_wanted()
        except BaseException as error:  # nobody else holds this run: what was trained must not be lost with it
            self._hand_over(error)
            raise
        finally:
            self._watched = True

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return len(self._engine.run_state.loss_history)

    @property
    def incidents(self) -> Sequence[Incident]:
        """Deaths and replacements of workers so far, and what was rolled back."""
        return tuple(self._engine.run_state.incidents)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers alive now; empty where replicas are computed in this process."""
        return self._engine.worker_pids

    @verb
    def step(self, batch: Any = None) -> float:
        """Do one step and return its mean loss.

        Parameters
        ----------
        batch : Any, optional
            A whole batch, dealt to the replicas as ``numpy.array_split`` does; without it, the next planned one.

        Raises
        ------
        UsageError
            The run is closed, or has no planned step left.
        RunError
            The step failed; the state is the one before it, and ``error.result`` holds it.
        """
        if batch is None:
            if self._definition.data is None:
                raise UsageError("step() was called without a batch, but data is None; bring one: run.step((x, y))")
            if self.steps >= self._definition.plan.steps:
                raise UsageError(f"all {self.steps} planned steps are done; raise steps or epochs, or bring a batch")
        return self._advance(batch).loss

    @verb
    def evaluate(self, metric_fn: Callable[..., Any], data: Any, batch_size: int = DEFAULT_BATCH) -> float:
        """Evaluate the current state in evaluation mode: exact, nothing padded, nothing counted twice.

        Modes, generators and buffers are afterwards as they were before.

        Parameters
        ----------
        metric_fn : callable
            ``metric_fn(output, target) -> mean`` over the samples it is given, or ``(mean, weight)``.
        data : Any
            Samples, in any form that a recipe's data may have.
        batch_size : int, default 256
            Samples at once. One by one where the recipe's own ``batch_size`` is None.

        Returns
        -------
        float
            The mean over all samples, weighted by chunk size or returned weights, float64; kept in ``metric_history``.
        """
        self._check_open()
        check_evaluation(metric_fn, data, batch_size)
        with self._handing_over():
            value = self._engine.evaluate(metric_fn, data, batch_size)
        name = getattr(metric_fn, "__name__", "metric").replace("<lambda>", "metric")
        self.metric_history.append(Evaluated(self.steps, value, name))
        return value

    @verb
    def save(self, path: Any) -> None:
        """Write a snapshot of the state now, as a folder; ``phalanx.load`` reads it, ``warm_start`` begins from it.

        Parameters
        ----------
        path : path-like
            A folder that does not exist yet; it appears when it is whole and durable.

        Raises
        ------
        UsageError
            The run is closed, or there is something at ``path``.
        SnapshotError
            It could not be written.
        """
        self._check_open()
        target = checks.path("path", path, hint="give the name of a folder that is to be made")
        if target.exists() or target.is_symlink():
            raise UsageError(f"path is {str(path)!r}, which exists already; choose another name, or remove it")
        digest = self._result(copy=False).digest
        write_apart(target, self._definition, self._engine, self.metric_history, digest)

    @verb
    def result(self) -> Result:
        """The state now as a Result of your own: training on does not change it."""
        return self._result(copy=not self._closed)

    @verb
    def close(self) -> None:
        """End the run and its workers. ``result()`` still works; steps do not."""
        self._progress.close()
        if not self._closed:
            self._closed = True
            try:
                if self._saver is not None:
                    self._saver.close(self._engine, self.metric_history, self.steps)
            except SnapshotError as error:
                self._engine.close()
                self._hand_over(error)
                raise
            finally:
                self._engine.close()

    def terminate(self) -> None:
        """After the step that is being done, save (in ``run_dir``) and raise ``Preempted``; for signal handlers."""
        self._terminated = True

    def _until_wanted(self) -> bool:
        """Do what is left, or steps until another thread waits for its turn; whether that is so."""
        return any(ALONE.wanted for _ in self)

    def _advance(self, batch: Any) -> StepReport:
        self._check_open()
        interrupts.check()
        with self._handing_over():
            self._data.check(contents=False)
            try:
                report = self._engine.advance(batch, self._horizon(batch))
            except LeftError as error:
                raise self._preempted() if self._terminated else error from None
        try:
            if (due := self._evaluation) is not None and self._due(report):
                report = report._replace(metric=self.evaluate(due.metric_fn, due.data, due.batch_size))
        finally:  # observers see each step, also one whose evaluation failed
            self._progress.show(report, self.metric_history)
            for callback in self._callbacks:
                with self.turn.lent(), interrupts.opened():
                    callback(report)
        with self._handing_over():
            if self._due(report):
                self._data.check(contents=True)
            if self._saver is not None:
                self._saver.note(report, self._engine.run_state.incidents)
                if self._saver.due(self.steps):
                    self._saver.save(self._engine, self.metric_history)
            if self._terminated and self._engine.pause():
                raise self._preempted()
        return report

    def _preempted(self) -> Preempted:
        told, saver = "nothing is saved here: there is no run_dir, or it is that of process 0", self._saver
        told = told if saver is None else saver.last_word(self._engine, self.metric_history, self.steps)
        return Preempted(f"SIGTERM came, and {told}", step=self.steps - 1)

    def _horizon(self, batch: Any) -> int:
        """How many steps may be done before the state is looked at."""
        if self._watched or batch is not None:
            return self.steps + 1
        plan = self._definition.plan
        limits = [plan.steps]
        if self._evaluation is not None:
            limits.append((self.steps // plan.steps_per_epoch + 1) * plan.steps_per_epoch)
        if self._saver is not None:
            limits.append(self._saver.horizon(self.steps))
        return min(limits)

    def _due(self, report: StepReport) -> bool:
        plan = None if report.epoch is None else self._definition.plan
        return plan is not None and (self.steps % plan.steps_per_epoch == 0 or self.steps == plan.steps)

    def _check_open(self) -> None:
        self.turn.check()
        if self._closed:
            raise UsageError("this run is closed: its with block has ended; start another with recipe.start()")

    @contextlib.contextmanager
    def _handing_over(self) -> Iterator[None]:
        """What is raised inside gets the last good state."""
        try:
            yield
        except PhalanxError as error:
            self._hand_over(error)
            raise

    def _hand_over(self, error: BaseException) -> None:
        """Set ``error.result`` to the last good state, unless it is set or the class has no room for it."""
        if getattr(error, "result", None) is None:
            with contextlib.suppress(AttributeError, TypeError), interrupts.shielded():
                error.result = self._last_good()  # type: ignore[attr-defined]

    def _last_good(self) -> Result | None:
        """None where an update was torn. A model that cannot be copied is handed over as it is."""
        for copy in (True, False):
            with contextlib.suppress(PhalanxError):
                return self._result(copy=copy)
        return None

    def _result(self, *, copy: bool) -> Result:
        if self._saver is not None and not self._closed:
            self._saver.settle()
        return result_of(self._definition, self._engine, self.metric_history, self._called, self._opened, copy=copy)
