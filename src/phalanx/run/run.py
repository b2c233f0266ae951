"""A run you hold: iterate it, feed it, evaluate it, take its result. Paces an engine; knows no framework."""

from __future__ import annotations

import contextlib
import difflib
import pathlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.checkpoint.saver import Saver, holds, write_apart
from phalanx.definition import checks
from phalanx.definition.evaluation import DEFAULT_BATCH, Evaluation, check_samples
from phalanx.definition.fields import Definition, matches
from phalanx.errors import LeftError, PeersLostError, PhalanxError, Preempted, SnapshotError, UsageError
from phalanx.run.loop import Loop
from phalanx.run.result import Result, result_of
from phalanx.seams import Engine
from phalanx.seams.records import Exported, Incident, StepLoss, StepReport, Training
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import ALONE, Turns, verb


class Run:
    """One execution of a recipe; made by ``recipe.start()``, used in a ``with`` block.

    Iterating yields a ``StepReport`` per step; while you hold report k, the state is exactly the one after step k.

    ``metric_history`` has every evaluation so far.
    """

    def __init__(
        self,
        definition: Definition,
        engine: Engine,
        loop: Loop,
        saver: Saver | None,
        turn: Turns,
        called: float,
        predictor: Callable[..., Any] | None = None,
        kept_in: pathlib.Path | None = None,
        max_seconds: float | None = None,
    ) -> None:
        self._definition = definition
        self._engine = engine
        self._loop = loop
        self._saver = saver  # also one of the observers in the loop
        self._terminated, self.closed = "", False
        self._looked = False
        self._given = weakref.WeakSet[Any]()  # what the caller looks at, and may change; engines keep it
        self._times, self._predictor = (called, time.perf_counter()), predictor
        self._max_seconds = max_seconds  # since ``called``, until the run stops
        self.kept_in = kept_in  # run_dir, in processes that do not write to it, too
        self._watched = True  # whether the caller may look at the state after each step
        self.turn, self.metric_history = turn, engine.seen.evaluated

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        with interrupts.guarded(leaving=interrupted), interrupts.held(), self.turn:
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
            The run is closed or stopped, or all planned steps are done.
        UsageError
            There is no data, or it was changed in place. (A RunError: the step failed; the state is the one before.)
        RuntimeError
            A callback raised StopIteration, which would pass for the end of the run.
        """
        if self._definition.data is None:
            raise UsageError("there is no data to iterate over (data=None): bring each batch with run.step(batch)")
        self._complete()
        if self.closed or self._loop.finished or (self.stopped and self._engine.pause()):
            raise StopIteration
        try:
            return self._advance(None)
        except StopIteration as error:  # as generators do
            raise RuntimeError("a callback raised StopIteration") from error

    def stop(self, by: str = "run.stop()") -> None:
        """End iterating and ``finish`` after the step that is being done; ``by``: for ``result.stopped_early``."""
        self._engine.seen.stopped_by = by

    @verb
    def finish(self) -> None:
        """Do all remaining planned steps. Between them the run keeps its environment, unless callbacks are called.

        Raises
        ------
        UsageError, RunError, Preempted
            As in iterating; or a snapshot failed (``on_snapshot_error="stop"``). As with whatever a callback raises,
            and with Ctrl-C, ``error.result`` holds the last good state. Preempted: ``terminate`` was called.
        """
        self._watched = self._loop.runs_user_code
        try:
            going_on = True
            while going_on:  # another thread may have its turn outside of the environment
                with contextlib.nullcontext() if self._watched else self._engine.environment:
                    going_on = any(ALONE.wanted for _ in self)
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
    def epoch(self) -> int | None:
        """The epoch of the next planned step, from 0; None where the caller or a stream brings the batches."""
        return self._definition.epoch_of(self._definition.rounds.updates(self.steps))

    @property
    def resumed_from(self) -> int | None:
        """After how many steps it went on from a snapshot; None if it did not."""
        return self._engine.progress.resumed_from

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._engine.seen.stopped_by is not None

    @property
    def model(self) -> Any:
        """The model as it is now, to look at until the next step: another object than the one that is trained.

        Weights and buffers are views where memory can be shared. The next step refuses writes that torch
        counts (not those through ``.data`` or numpy), and changes of ``requires_grad``. Other changes have no effect.
        """
        return self._look().model()

    @property
    def params(self) -> dict[str, Any]:
        """Its parameters by name, without gradients; views, as of ``model``."""
        return dict(self._look().params)

    @property
    def averaged(self) -> dict[str, Any] | None:
        """Parameters by name that evaluations use: as ``callbacks.EMA`` averaged them so far.

        Without it, where an optimizer with two modes (``train()`` and ``eval()``) wants the model evaluated.
        """
        return self._loop.left().get("averaged")

    def __reduce__(self) -> Any:
        """None in another process and in a copy, once it is closed: who had it gets another one in ``begin``."""
        if not self.closed:
            raise TypeError("a run that is open stays in its process, and has no copy")
        return type(None), ()

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Full names of all that ``evaluation=`` has, also where it is not due; of objects once they were asked."""
        return self._loop.metric_names

    @property
    def run_dir(self) -> pathlib.Path | None:
        """Where the run is kept; None for one that is not."""
        return None if self._saver is None else self._saver.folder

    @property
    def incidents(self) -> Sequence[Incident]:
        """Deaths and replacements of workers so far, and what was rolled back."""
        return tuple(self._engine.progress.incidents)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers alive now; empty where replicas are computed in this process."""
        return self._engine.worker_pids

    @verb
    def step(self, batch: Any = None) -> StepLoss:
        """Do one step and return its mean loss: a float that has ``losses``, ``norm``, ``lr`` and ``step``, too.

        Parameters
        ----------
        batch : Any, optional
            A whole batch, dealt to the replicas as ``numpy.array_split`` does; without it, the next planned one.

        Raises
        ------
        UsageError
            The run is closed, or has no planned step left; the batch cannot be dealt; data or weights were changed.
        """
        self._complete()
        if batch is None:
            if self._definition.data is None:
                raise UsageError("step() was called without a batch, but data is None; bring one: run.step((x, y))")
            if self._loop.finished:
                raise UsageError(f"all {self.steps} planned steps are done; raise steps or epochs, or bring a batch")
        return StepLoss(self._advance(batch))

    @verb
    def freeze(self, *names: str) -> None:
        """Train parameters no more from the next step on; snapshots keep it.

        A kill undoes it with the steps since the newest snapshot, so call it by a rule: of ``run.steps`` or ``epoch``.

        Parameters
        ----------
        *names : str
            Names of modules or parameters, or patterns as of ``fnmatch``: ``run.freeze("encoder", "*.bias")``. Buffers,
            as BatchNorm's, go on.

        Raises
        ------
        UsageError
            A name matches no parameter, an optimizer would have none to train, or the model is not torch's.
        """
        self._retrain(names, trained=False)

    @verb
    def thaw(self, *names: str) -> None:
        """Train parameters from the next step on: the reverse of ``freeze``, also of what ``make_model`` froze.

        Raises
        ------
        UsageError
            A name matches no parameter, no optimizer has it, or the model is not torch's.
        """
        self._retrain(names, trained=True)

    def _retrain(self, names: Sequence[str], *, trained: bool) -> None:
        self._check_open()
        self._complete()
        known = list(self.params)
        for name in names or ("",):
            if not isinstance(name, str) or not any(matches(name, item) for item in known):
                close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.3) or known[:3]
                raise UsageError(
                    f"no parameter or module is called {checks.shown(name)}; close to it are {', '.join(close)}: give "
                    "names of run.params or of modules, or patterns, one by one: "
                    f"run.{'thaw' if trained else 'freeze'}('encoder.*', 'head')"
                )
        chosen = tuple(item for item in known if any(matches(name, item) for name in names))
        with self._handed_over():
            self._loop.retrain(Training(chosen, trained))

    @verb
    def evaluate(
        self,
        metric_fn: Any,
        data: Any,
        batch_size: int = DEFAULT_BATCH,
        forward_fn: Callable[..., Any] | None = None,
        target_fn: Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> Any:
        """Evaluate the current state in evaluation mode: exact, nothing padded, nothing counted twice.

        Modes, generators and buffers are afterwards as they were before. With ``averaged`` weights, if there are such.

        Parameters
        ----------
        metric_fn, data, batch_size, forward_fn, target_fn, collate_fn
            As in ``Evaluation``.

        Returns
        -------
        float, or dict of str to float
            The mean over all samples, weighted by chunk size or returned weights, float64; by name for a list or dict.
            Kept in ``metric_history``.

        Raises
        ------
        UsageError, WorkerError, RunError
            The call is wrong; ``metric_fn``, the model or the data raised (the run can go on); workers were lost.
        """
        self._check_open()
        self._complete()
        evaluation = Evaluation(
            metric_fn, data, batch_size, forward_fn=forward_fn, target_fn=target_fn, collate_fn=collate_fn
        )
        with self._handed_over():
            values = self._loop.evaluate(evaluation)
        return values if isinstance(metric_fn, (dict, list, tuple)) or len(values) > 1 else next(iter(values.values()))

    @verb
    def predict(self, data: Any, batch_size: int = DEFAULT_BATCH, forward_fn: Callable[..., Any] | None = None) -> Any:
        """Outputs of the current state for all samples, in evaluation mode, computed by the workers.

        Parameters
        ----------
        data, batch_size
            As in ``evaluate``; targets in the data are not looked at.
        forward_fn : callable, optional
            ``forward_fn(model, batch) -> output``, in place of the recipe's: if that returns a loss, say.

        Returns
        -------
        array or tensor, or dict, tuple or list of them
            A row for each sample, in their order, on the CPU, or an item for each where the output is such a list; an
            output without either is a UsageError.
        """
        self._check_open()
        data = check_samples(data, batch_size)
        with self._handed_over():
            return self._loop.predict(data, batch_size, forward_fn)

    @verb
    def save(self, path: Any) -> None:
        """Write a snapshot of the state now as the folder ``path``, which appears when it is whole and durable.

        ``phalanx.load`` reads it, ``warm_start`` begins from it; ``result.save`` writes weights alone.

        Raises
        ------
        UsageError
            The run is closed, or there is something else at ``path`` than a snapshot of this very state.
        """
        self._check_open()
        target = checks.path("path", path, hint="give the name of a folder that is to be made")
        self._complete()
        digest = self._now(copy=False).digest
        if not (target.exists() or target.is_symlink()):
            write_apart(target, self._definition, self._engine, digest, self._loop.left().get("chain"))
        elif not holds(target, digest):  # a step that was done again saves the same again
            raise UsageError(f"path is {str(path)!r}, which exists already; choose another name, or remove it")

    @verb
    def result(self) -> Result:
        """The state now as a Result of your own; a RunError if an update broke off, or workers were lost with it."""
        return self._now(copy=not self.closed)

    @verb
    def close(self) -> None:
        """End the run and its workers. ``result()`` still works; steps do not."""
        if self.closed:
            return
        self.closed = True
        try:
            self._loop.end()
        except SnapshotError as error:
            self._hand_over(error)
            raise

    def terminate(self, why: str = "run.terminate() was called") -> None:
        """After the step that is being done, save (in ``run_dir``) and raise ``Preempted``; for signal handlers."""
        self._terminated = why

    def save_by(self, saver: Saver | None) -> None:
        """Take what saves this run, as the process that saved it has fallen."""
        self._saver = saver

    def _now(self, *, copy: bool) -> Result:
        """The state as it is; ``copy``: independent of the run."""
        if self._loop.refused:
            self._loop.check_able()
        if self._saver is not None and not self.closed:
            self._saver.settle()
        extras = {**self._loop.left(), "stopped_early": self._loop.stopped_early}
        return result_of(self._definition, self._engine, self._times, extras, self._predictor, copy=copy)

    @contextlib.contextmanager
    def _handed_over(self) -> Iterator[None]:
        """What is raised inside gets the last good state."""
        try:
            yield
        except PhalanxError as error:
            self._hand_over(error)
            raise

    def _hand_over(self, error: BaseException | None) -> None:
        """Set ``error.result`` to the last good state, unless it is set, it cannot be set, or an update was torn.

        A model that cannot be copied is handed over as it is.
        """
        for copy in (True, False):
            if getattr(error, "result", None) is None:
                with contextlib.suppress(AttributeError, TypeError, PhalanxError), interrupts.held():
                    error.result = self._now(copy=copy)  # type: ignore[union-attr]

    def _complete(self) -> None:
        """Complete the last step first, if an exception or Ctrl-C cut it short."""
        if not self.closed and not self._engine.seen.complete:
            with self._handed_over():
                self._loop.complete()

    def _advance(self, batch: Any) -> StepReport:
        self._check_open()
        for given in self._given if self._looked else ():  # an empty set of weak references takes a microsecond
            given.check()
        interrupts.check()
        with self._handed_over():
            try:
                report = self._loop.advance(batch, watched=self._watched)
            except (LeftError, PeersLostError) as error:
                raise self._preempted() if self._terminated else error from None
            if self._max_seconds is not None and time.perf_counter() - self._times[0] >= self._max_seconds:
                self.stop(self._engine.seen.stopped_by or f"max_seconds={self._max_seconds:.10g}")
            if self._terminated and self._engine.pause():
                raise self._preempted()
        return report

    @verb
    def _look(self) -> Exported:
        shown = self._engine.export(copy=False, digest=False)
        if shown.looked_at is not None:
            self._looked = True
            self._given.add(shown.looked_at)
        return shown

    def _preempted(self) -> Preempted:
        self._engine.seen.leaving = self._terminated
        nothing = "nothing is saved here: there is no run_dir, or another process saves"
        outcome = nothing if self._saver is None else self._saver.last_word()
        return Preempted(f"{self._terminated}, and {outcome}", step=self.steps - 1)

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("this run is closed: its with block has ended; start another with recipe.start()")
