"""A run you hold: iterate it, feed it, evaluate it, take its result. Paces an engine; knows no framework."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.checkpoint.saver import Saver, write_apart
from phalanx.definition import checks
from phalanx.definition.evaluation import DEFAULT_BATCH, check_evaluation
from phalanx.definition.fields import Definition
from phalanx.errors import LeftError, PhalanxError, Preempted, SnapshotError, UsageError
from phalanx.run.loop import Loop
from phalanx.run.result import Result, result_of
from phalanx.seams import Engine
from phalanx.seams.events import Incident, StepReport
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import ALONE, Turns, verb


class Run:
    """One execution of a recipe; made by ``recipe.start()``, used in a ``with`` block.

    Iterating yields a ``StepReport`` per step; while you hold report k, the state is exactly the one after step k.

    Attributes
    ----------
    metric_history : list of Evaluated
        Every evaluation so far.
    """

    def __init__(
        self, definition: Definition, engine: Engine, loop: Loop, saver: Saver | None, turn: Turns, called: float
    ) -> None:
        self._definition = definition
        self._engine = engine
        self._loop = loop
        self._saver = saver  # also one of the observers in the loop
        self._called = called
        self._opened = time.perf_counter()
        self._terminated = self._closed = False
        self._watched = True  # whether the caller may look at the state after each step
        self.turn, self.metric_history = turn, engine.run_state.evaluated

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
        """Do the next planned step.

        Raises
        ------
        StopIteration
            The run is closed, or all planned steps are done.
        UsageError
            There is no data, or it was changed in place.
        RunError
            The step failed; the state is the one before it, and ``error.result`` holds it.
        RuntimeError
            A callback raised StopIteration, which would pass for the end of the run.
        """
        if self._definition.data is None:
            raise UsageError("there is no data to iterate over (data=None): bring each batch with run.step(batch)")
        if self._closed or self.steps >= self._definition.plan.steps:
            raise StopIteration
        try:
            return self._advance(None)
        except StopIteration as error:  # as generators do
            raise RuntimeError("a callback raised StopIteration") from error

    @verb
    def finish(self) -> None:
        """Do all planned steps that are left. Between them the run keeps its environment, if no callback looks.

        Raises
        ------
        UsageError
            There is no data, or it was changed in place.
        RunError
            A step or an evaluation failed, or a snapshot (``on_snapshot_error="stop"``). As with whatever a callback
            raises, and with Ctrl-C, ``error.result`` holds the last good state.
        Preempted
            ``terminate`` was called.
        """
        self._watched = self._loop.runs_user_code
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
        return self._loop.steps

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
            The run is closed, or has no planned step left; the batch cannot be dealt; data was changed in place.
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

        Raises
        ------
        UsageError
            The run is closed, or this cannot be evaluated: the message names the argument.
        WorkerError
            ``metric_fn``, the model or the data raised; ``samples`` are those of the chunk. The run can go on.
        RunError
            The run cannot go on, or its workers were lost.
        """
        self._check_open()
        check_evaluation(metric_fn, data, batch_size)
        with self._handing_over():
            return self._loop.evaluate(metric_fn, data, batch_size)

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
        write_apart(target, self._definition, self._engine, digest)

    @verb
    def result(self) -> Result:
        """The state now as a Result of your own: training on does not change it.

        Raises
        ------
        RunError
            There is no whole state: an update broke off, or the workers were lost with it.
        """
        return self._result(copy=not self._closed)

    @verb
    def close(self) -> None:
        """End the run and its workers. ``result()`` still works; steps do not.

        Raises
        ------
        SnapshotError
            The last snapshot could not be written (``on_snapshot_error="stop"``).
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.end()
        except SnapshotError as error:
            self._hand_over(error)
            raise

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
            try:
                report = self._loop.advance(batch, watched=self._watched)
            except LeftError as error:
                raise self._preempted() if self._terminated else error from None
            if self._terminated and self._engine.pause():
                raise self._preempted()
        return report

    def _preempted(self) -> Preempted:
        outcome = "nothing is saved here: there is no run_dir, or it is that of process 0"
        if self._saver is not None:
            outcome = self._saver.last_word()
        return Preempted(f"SIGTERM came, and {outcome}", step=self.steps - 1)

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
        return result_of(self._definition, self._engine, self._called, self._opened, copy=copy)
