"""How a run goes on from an earlier one: its snapshot is found, compared with the recipe, and taken over."""

from __future__ import annotations

import pathlib
import warnings
from dataclasses import dataclass, field
from typing import Any

from phalanx.checkpoint import snapshot
from phalanx.checkpoint.directory import SNAPSHOTS, EventLog, RunDirectory, newest_of
from phalanx.checkpoint.saver import LOSSES, Saver
from phalanx.checkpoint.snapshot import Snapshot
from phalanx.definition.fields import Definition
from phalanx.definition.fingerprint import compare, fingerprint
from phalanx.errors import SnapshotError, UsageError
from phalanx.frameworks.registry import recorded_environment, tensor_of
from phalanx.seams import Framework, RunState
from phalanx.seams.events import Evaluated
from phalanx.seams.snapshots import Captured

ANYWAY = "anyway"  # for resume: go on although the recipe differs


class ResumeState:
    """What was before a run: nothing, weights to begin from, or a snapshot in its directory.

    Parameters
    ----------
    definition : Definition
    run_dir : path or None
    resume : bool or "anyway"
    keep : int
        How many snapshots stay in ``run_dir``.
    warm_start : path or None

    Raises
    ------
    UsageError
        The directory is another recipe's, in use, or has snapshots that are not to be used.
    SnapshotError
        All of its snapshots are damaged, or that to begin from is.
    """

    def __init__(
        self,
        definition: Definition,
        run_dir: pathlib.Path | None,
        resume: bool | str,
        keep: int,
        warm_start: pathlib.Path | None,
    ) -> None:
        self._resume = resume
        self._definition = definition
        self._recipe = fingerprint(definition) if run_dir is not None else {}
        self._differs: list[str] = []
        self._directory: RunDirectory | None = None
        self._found: Snapshot | None = None
        self._weights: Snapshot | None = None
        try:
            if run_dir is not None:
                self._directory = RunDirectory(run_dir, keep)
                self._found = self._checked(run_dir, self._directory.newest())
            if warm_start is not None and self._found is None:
                self._weights = read_any(warm_start)
        except BaseException:
            self.close()
            raise

    def begin(self, framework: Framework) -> RunState:
        """Give ``framework`` the state that was found; returns what had been done."""
        found = self._found
        if self._weights is not None:
            with framework.environment:
                framework.snapshots.adopt_weights(self._weights.weights)
        if found is None:
            return RunState()
        with framework.environment:
            framework.snapshots.adopt(Captured(dict(found.weights), dict(found.training), found.facts))
        try:
            metrics = [Evaluated(int(steps), float(value), str(name)) for steps, value, name in found.metrics]
        except (TypeError, ValueError, OverflowError) as error:
            raise SnapshotError("the snapshot's evaluations are none") from error
        return RunState(losses_in(found), found.samples, resumed_from=found.step, evaluated=metrics)

    def observers(self, every: int | None, *, stop: bool) -> tuple[EventLog, Saver] | tuple[()]:
        """What keeps the run from here on, in the order in which it looks on; nothing without a directory."""
        if self._directory is None:
            return ()
        log = EventLog(self._directory, self._differs)
        return log, Saver(self._directory, every, stop=stop, recipe=self._recipe)

    def close(self) -> None:
        """Let go of the directory, as there will be no run."""
        if self._directory is not None:
            self._directory.close()

    def _checked(self, run_dir: pathlib.Path, found: Snapshot | None) -> Snapshot | None:
        if found is None:
            return None
        if not self._resume:
            raise UsageError(
                f"run_dir is {str(run_dir)!r}, which has a run of {found.step} steps, and resume is False; "
                "choose another directory, or go on from there with resume=True"
            )
        self._compare(found)
        steps = None if self._definition.data is None else self._definition.plan.steps
        if steps is not None and steps < found.step:
            raise UsageError(
                f"run_dir is {str(run_dir)!r}, which has a run of {found.step} steps, and the recipe has "
                f"{steps}; raise steps or epochs, or choose another directory"
            )
        now = recorded_environment()
        differing = [name for name in {**now, **found.environment} if now.get(name) != found.environment.get(name)]
        if differing:
            told = "; ".join(f"{name} is {now.get(name)}, was {found.environment.get(name)}" for name in differing)
            warnings.warn(f"bits may differ from an uninterrupted run's, as the numbers' environment does: {told}",
                          stacklevel=2)  # fmt: skip
        return found

    def _compare(self, found: Snapshot) -> None:
        """Refuse another recipe, or note how it differs; warn of what may differ."""
        try:
            comparison = compare(self._definition, self._recipe, found.recipe)
        except ValueError as error:
            raise SnapshotError(f"the snapshot of step {found.step} cannot be used: {error}") from error
        told = "; ".join(comparison.differs)
        if told and self._resume != ANYWAY:
            raise UsageError(
                f"run_dir has snapshots of another recipe: {told}. Use that recipe, choose another run_dir, or "
                f"go on all the same with resume={ANYWAY!r}, which is noted in the log"
            )
        if told:
            warnings.warn(f"going on with another recipe than that of the snapshot: {told}", stacklevel=2)
        self._differs = comparison.differs
        if comparison.doubts:
            told = "; ".join(comparison.doubts)
            warnings.warn(f"the recipe may not be that of the snapshot: {told}", stacklevel=2)


@dataclass(frozen=True)
class Loaded:
    """A snapshot that was read.

    Attributes
    ----------
    step, samples : int
        Finished steps, and samples seen in them.
    digest : str or None
        That of the run's ``Result``, where ``run.save`` wrote it.
    weights : dict
        Parameters and buffers by name, as tensors: ``model.load_state_dict(weights, strict=False)``. Those of a jax
        recipe are numpy arrays.
    loss_history : list of float
        Mean loss of every step.
    """

    step: int
    samples: int
    digest: str | None
    weights: dict[str, Any] = field(repr=False)
    loss_history: list[float] = field(repr=False)


def loaded(path: pathlib.Path) -> Loaded:
    """See ``phalanx.load``."""
    found = read_any(path)
    weights = {name: tensor_of(stored, found.facts) for name, stored in found.weights.items()}
    return Loaded(found.step, found.samples, found.digest, weights, losses_in(found))


def read_any(path: pathlib.Path) -> Snapshot:
    """The snapshot at ``path``, or the newest good one of the run there."""
    try:
        alone = (path / snapshot.MANIFEST).exists() or not (path / SNAPSHOTS).is_dir()
    except OSError as error:
        raise SnapshotError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    if alone:
        return snapshot.read(path)
    found = newest_of(path)
    if found is None:
        raise SnapshotError(f"{str(path)!r} has no snapshot")
    return found


def losses_in(found: Snapshot) -> list[float]:
    """The loss of every step."""
    stored = found.training.get(LOSSES)
    if stored is None or stored.dtype != "float64" or stored.shape != (found.step,):
        told = "none" if stored is None else f"those of {stored.dtype}{list(stored.shape)}"
        raise SnapshotError(f"the snapshot is of step {found.step}, which has a loss for each, but has {told}")
    history: list[Any] = memoryview(stored.content).cast("B").cast("d").tolist()
    return history
