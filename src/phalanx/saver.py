"""When a run is saved, and that this costs it little: the state is copied at a step boundary and written beside it."""

from __future__ import annotations

import array
import contextlib
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

from phalanx.contracts import Captured, Course, Engine
from phalanx.errors import PhalanxError, SnapshotError
from phalanx.events import Evaluated, StepReport
from phalanx.state.directory import RunDirectory
from phalanx.state.snapshot import Snapshot
from phalanx.state.tensors import Tensor

SECONDS = 30.0  # between snapshots, at least, with "auto"
SHARE = 0.01  # of the time, at most, with "auto"
LOSSES = "loss_history"


class Saver:
    """Writes snapshots of a run into its directory, one at a time, in a thread of its own.

    Parameters
    ----------
    directory : RunDirectory
    every : int or None
        Steps from one snapshot to the next; None: as seldom as costs next to nothing.
    stop : bool
        Whether a snapshot that cannot be written ends the run.
    recipe, environment : dict
        Go into each snapshot.
    """

    def __init__(
        self, directory: RunDirectory, every: int | None, *, stop: bool, recipe: dict[str, Any], environment: Any
    ) -> None:
        self._directory = directory
        self._every = every
        self._stop = stop
        self._recipe = recipe
        self._environment = environment
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._saved = -1  # the step of the newest snapshot
        self._since = time.monotonic()
        self._pace = 0.0  # seconds of the latest step
        self._cost = 0.0  # seconds that the latest snapshot took, from beginning to end

    def begin(self, course: Course, engine: Engine, resumed: int | None, facts: dict[str, Any]) -> None:
        """Say in the log how the run begins; save at once if nothing was, as a full disk is better found now."""
        self._directory.note("start" if resumed is None else "resume", step=len(course.loss_history), **facts)
        if resumed is None:
            self.save(engine, [])
            self.settle()
        else:
            self._saved = resumed

    def horizon(self, steps: int) -> int:
        """How many steps may be done before this wants to be asked again."""
        if self._every is not None:
            return (steps // self._every + 1) * self._every
        left = self._pause() - (time.monotonic() - self._since)
        return steps + max(1, int(left / self._pace)) if self._pace else steps + 1

    def note(self, report: StepReport) -> None:
        """A step was done."""
        self._pace = report.seconds
        facts = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr, "seconds": report.seconds}
        self._directory.note("step", step=report.step, **facts)

    def due(self, steps: int) -> bool:
        """Whether a snapshot should be written after so many steps."""
        if steps <= self._saved:
            return False
        if self._every is not None:
            return steps % self._every == 0
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and time.monotonic() - self._since >= self._pause()

    def save(self, engine: Engine, metrics: Sequence[Evaluated]) -> None:
        """Copy the state, and begin to write it; waits only for the snapshot before."""
        self.settle()
        began = time.monotonic()
        captured = engine.capture()
        state = snapshot_of(engine.course, captured, metrics, self._recipe, self._environment)
        self._thread = threading.Thread(target=self._write, args=(state, captured, began), name="phalanx-snapshot")
        self._saved = state.step
        self._thread.start()

    def settle(self) -> None:
        """Wait until the latest snapshot is written, or could not be.

        Raises
        ------
        SnapshotError
            It could not be, and that ends the run.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            why = f"the snapshot of step {self._saved} could not be written to {self._directory.path}: {error}"
            self._saved = -1
            if self._stop:
                raise SnapshotError(why) from error
            warnings.warn(f"{why}; the run goes on, and those before are whole", stacklevel=2)

    def close(self, engine: Engine, metrics: Sequence[Evaluated], steps: int) -> None:
        """Save what was not saved, if the state is there, and let go of the directory."""
        try:
            if steps > self._saved:
                with contextlib.suppress(PhalanxError):
                    self.save(engine, metrics)
            self.settle()
        finally:
            self._directory.note("end", step=steps)
            self._directory.close()

    def _pause(self) -> float:
        return max(SECONDS, self._cost / SHARE)

    def _write(self, state: Snapshot, captured: Captured, began: float) -> None:
        try:
            self._directory.write(state)
            self._directory.note("snapshot", step=state.step, seconds=time.monotonic() - began)
        except OSError as error:
            self._error = error
            self._directory.note("failed", step=state.step, why=str(error))
        finally:
            captured.release()
            self._since = time.monotonic()
            self._cost = self._since - began


def snapshot_of(
    course: Course,
    captured: Captured,
    metrics: Sequence[Evaluated],
    recipe: dict[str, Any],
    environment: dict[str, Any],
    digest: str | None = None,
) -> Snapshot:
    """What is written of a state."""
    history = array.array("d", course.loss_history)
    return Snapshot(
        step=len(course.loss_history),
        digest=digest,
        weights=captured.weights,
        training={**captured.training, LOSSES: Tensor("float64", (len(history),), history)},
        facts=captured.facts,
        samples=course.samples,
        metrics=[[evaluated.steps, repr(evaluated.value), evaluated.name] for evaluated in metrics],
        recipe=recipe,
        environment=environment,
    )
