"""Saves a run at little cost: the state is copied at a step boundary, and written while the run goes on."""

from __future__ import annotations

import array
import contextlib
import pathlib
import threading
import time
from typing import Any

from phalanx.checkpoint import snapshot
from phalanx.checkpoint.directory import RunDirectory
from phalanx.checkpoint.snapshot import Snapshot
from phalanx.checkpoint.tensors import CALLBACKS, kept
from phalanx.definition import checks
from phalanx.definition.described import described
from phalanx.definition.fields import Definition
from phalanx.errors import PhalanxError, RunError, SnapshotError, UsageError
from phalanx.frameworks.registry import recorded_environment
from phalanx.seams import NEVER, Engine, Observer
from phalanx.seams.records import Captured, Seen, StepReport, Tensor, Training
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import SLICE_SECONDS


class Pacing:
    """Says when the next snapshot, or the next digest of a state, is due.

    Parameters
    ----------
    every : int or None
        Steps from one to the next; None: as ``share`` says; 0: never.
    seconds : float
        Between two, at least, if ``every`` is None.
    share : float
        Of the time that they may take.
    """

    def __init__(self, every: int | None, seconds: float, share: float) -> None:
        self._every = every
        self._seconds = seconds
        self._share = share
        self._next = NEVER if every == 0 else 0  # the step at which workers stop, to see whether it is time
        self._since = time.monotonic()
        self._pace = 0.0  # seconds of the latest step
        self._cost = 0.0  # seconds that the latest one took

    def horizon(self, steps: int) -> int:
        """The step after which the next is due, or, by time, probably is."""
        if self._next <= steps:
            if self._every is not None:
                self._next = (steps // self._every + 1) * self._every
            else:
                remaining = self._pause - (time.monotonic() - self._since)
                self._next = steps + (max(1, int(remaining / self._pace)) if self._pace else 1)
        return self._next

    def stepped(self, seconds: float) -> None:
        """Note how long a step took."""
        self._pace = seconds

    def due(self, steps: int) -> bool:
        """Whether it is time, after so many steps."""
        if steps < self._next:
            return False
        if self._every is not None:
            return steps % self._every == 0
        return time.monotonic() - self._since >= self._pause

    def took(self, began: float) -> None:
        """Note that one is done now, which ``began`` then."""
        self._since = time.monotonic()
        self._cost = self._since - began

    @property
    def _pause(self) -> float:
        return max(self._seconds, self._cost / self._share)


SECONDS = 30.0  # between snapshots, at least, with "auto"
SHARE = 0.01  # of the time, at most, with "auto"
LOSSES, LINK = "loss_history", "chain"


class Saver(Observer):
    """Writes snapshots of a run into its directory, one at a time, in a thread of its own.

    Parameters
    ----------
    directory : RunDirectory
    every : int or None
        Steps from one snapshot to the next; None: so seldom that it costs next to nothing.
    stop : bool
        Whether a snapshot that cannot be written ends the run.
    recipe : dict
        Its description, which goes into each snapshot.
    """

    def __init__(
        self, directory: RunDirectory, every: int | None, chained: Observer, *, stop: bool, recipe: dict[str, Any]
    ) -> None:
        self._directory = directory
        self._every = every
        self._chained, self._stop = chained, stop
        self._recipe = recipe
        self._environment = recorded_environment()
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._saved = -1  # the step of the newest snapshot
        self._pacing = Pacing(every, SECONDS, SHARE)

    @property
    def folder(self) -> pathlib.Path:
        """The run's directory."""
        return self._directory.path

    def begin(self, engine: Engine, run: Any = None) -> None:
        """Save at once if nothing was saved before: a full disk is better found now.

        Raises
        ------
        SnapshotError
            It could not be written, and that ends the run.
        """
        self._engine = engine
        if engine.progress.resumed_from is None:
            self.save()
            self.settle()
            return
        self._saved = engine.progress.resumed_from
        if names := ", ".join(engine.seen.waiting):  # callbacks have begun before, and taken theirs
            engine.seen.waiting.clear()
            checks.warn(
                f"the snapshot of step {self._saved} has the state of {names}, which is in no callback of this run and "
                "so not in its snapshots either. What callbacks froze stays frozen. To go on with it, pass "
                f"callbacks=[{names}] again"
            )

    def horizon(self, steps: int) -> int:
        """The step after which the next snapshot is due, or, with "auto", probably is."""
        return self._pacing.horizon(steps)

    def step(self, report: StepReport) -> None:
        """Save the state after this step if a snapshot is due.

        Raises
        ------
        SnapshotError
            The one before could not be written, and that ends the run.
        """
        self._pacing.stepped(report.seconds)
        if self._is_due(report.step + 1):
            self.save()

    def retrained(self, change: Training) -> None:
        """A snapshot of this step is another now: the end of the run saves it again."""
        if self._engine is not None:
            self._saved = min(self._saved, self._engine.progress.steps - 1)

    def save(self) -> None:
        """Copy the state, and begin to write it; waits only for the snapshot before."""
        assert self._engine is not None, "nobody saves before begin"
        self.settle()
        began = time.monotonic()
        captured = self._engine.capture()
        try:
            state = snapshot_of(self._engine.seen, captured, self._recipe, self._environment, **self._chained.left())
            thread = threading.Thread(target=self._write, args=(state, captured, began), name="phalanx-snapshot")
            thread.start()
        except BaseException:
            captured.release()
            raise
        self._thread, self._saved = thread, state.step

    def settle(self) -> bool:
        """Wait for the latest snapshot; returns whether it was written.

        Raises
        ------
        SnapshotError
            It could not be written, and that ends the run.
        """
        self._wait()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            why = f"the snapshot of step {self._saved} could not be written to {self._directory.path}: {error}"
            self._saved = -1
            if error is self._directory.taken:
                raise error
            if self._stop:
                raise SnapshotError(why) from error
            checks.warn(f"{why}; the run goes on, and those before are whole")
        return error is None

    def last_word(self) -> str:
        """Save the state, if it is there, and say whether that was done."""
        self.settle()
        if self._steps > self._saved:
            try:
                self.save()
            except RunError:  # the state is lost
                return "the state was not saved"
        saved = f"the state after {self._steps} steps was saved; the same call again goes on there"
        return saved if self.settle() else "the state was not saved"

    def end(self) -> None:
        """Save the state if it is not saved yet. A forked child, which does not hold the directory, does not.

        Raises
        ------
        SnapshotError
            It, or the one before, could not be written, and that ends the run.
        """
        if not self._directory.held:
            return
        try:
            failed = self._failure()
            if self._steps > self._saved:
                with contextlib.suppress(PhalanxError):  # the state may be lost
                    self.save()
            failed = self._failure() or failed
            if failed is not None:
                raise failed
        finally:
            self._wait()  # also after Ctrl-C: nothing may be written once the directory is let go of

    @property
    def _steps(self) -> int:
        """How many steps are done, to be compared with ``_saved``; 0 while one is incomplete, as that is not saved."""
        engine = self._engine
        return engine.progress.steps if engine is not None and engine.seen.complete else 0

    def _is_due(self, steps: int) -> bool:
        busy = self._every is None and self._thread is not None and self._thread.is_alive()
        return steps > self._saved and not busy and self._pacing.due(steps)

    def _wait(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            interrupts.check()
            self._thread.join(SLICE_SECONDS)

    def _failure(self) -> SnapshotError | None:
        try:
            self.settle()
        except SnapshotError as error:
            return error
        return None

    def _write(self, state: Snapshot, captured: Captured, began: float) -> None:
        try:
            self._directory.write(state)
            self._directory.note("snapshot", step=state.step, seconds=time.monotonic() - began)
        except Exception as error:  # whatever it is: nobody else would see it
            self._error = error
            self._directory.note("failed", step=state.step, why=str(error))
        finally:
            captured.release()
            self._pacing.took(began)


def snapshot_of(
    seen: Seen,
    captured: Captured,
    recipe: dict[str, Any],
    environment: dict[str, Any],
    digest: str | None = None,
    chain: str | None = None,
) -> Snapshot:
    """The snapshot of a state; ``chain``: the newest link, if there is one."""
    progress = seen.progress
    history = array.array("d", progress.loss_history)
    callbacks, tensors = kept(seen.states())
    more = {**({CALLBACKS: callbacks} if callbacks else {}), **({LINK: chain} if chain else {})}
    return Snapshot(
        step=progress.steps,
        digest=digest,
        weights=captured.weights,
        training={**captured.training, **tensors, LOSSES: Tensor("float64", (len(history),), history)},
        facts={**captured.facts, **more},
        samples=progress.samples,
        metrics=[[evaluated.steps, repr(evaluated.value), evaluated.name] for evaluated in seen.evaluated],
        recipe=recipe,
        environment=environment,
    )


def holds(target: pathlib.Path, digest: str) -> bool:
    """Whether the folder ``target`` is a good snapshot of the state with this digest, which its step is part of."""
    with contextlib.suppress(SnapshotError):
        return snapshot.read(target).digest == digest
    return False


def write_apart(target: pathlib.Path, definition: Definition, engine: Engine, digest: str, chain: str | None) -> None:
    """Write the present state as a snapshot in a folder of its own.

    Raises
    ------
    SnapshotError
        It could not be written.
    UsageError
        A step was begun, and is not done.
    """
    if engine.progress.between_phases:
        raise UsageError(
            f"step {engine.progress.steps} was broken off between two of its phases, and snapshots are of whole "
            "steps; do the rest of it first: run.step()"
        )
    recipe, environment = described(definition), recorded_environment()
    captured = engine.capture()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        snapshot.write(snapshot_of(engine.seen, captured, recipe, environment, digest, chain), target)
    except OSError as error:
        raise SnapshotError(f"the snapshot could not be written to {str(target)!r}: {error}") from error
    finally:
        captured.release()
