"""How a run goes on from an earlier one: its snapshot is found, compared with the recipe, and taken over."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from phalanx.checkpoint import snapshot
from phalanx.checkpoint.chain import CHAIN, Links
from phalanx.checkpoint.chained import Behaviour, Chained, brought_as, fields_of
from phalanx.checkpoint.directory import SNAPSHOTS, EventLog, RunDirectory, newest_of
from phalanx.checkpoint.files import is_there
from phalanx.checkpoint.named import fitted, loose_weights
from phalanx.checkpoint.saver import LINK, LOSSES, Saver
from phalanx.checkpoint.snapshot import Snapshot
from phalanx.checkpoint.tensors import states_in
from phalanx.definition import checks
from phalanx.definition.described import by_class, compare, described, functions_of, made, options_of
from phalanx.definition.evaluation import FUNCTIONS
from phalanx.definition.fields import Definition
from phalanx.definition.plain import changes, taking_over
from phalanx.errors import SnapshotError, UsageError
from phalanx.frameworks.registry import recorded_environment, tensor_of
from phalanx.seams import Engine, Framework
from phalanx.seams.records import Captured, Evaluated, Progress, Seen, StepReport, Tensor

ANYWAY = "anyway"  # for resume: go on although the recipe differs
LINK_OF = re.compile("[0-9a-f]{64}")


class ResumeState:
    """What a run begins from: nothing, weights, or a snapshot in its directory.

    Parameters
    ----------
    definition : Definition
    options : namespace
        Those of ``Recipe.train``, settled. If evaluations and callbacks differ, there is only a warning.
    seize : bool
        As of ``RunDirectory``.

    Raises
    ------
    UsageError
        The directory is in use, or has snapshots that are not to be used.
    SnapshotError
        All of its snapshots are damaged, or that of ``warm_start`` is.
    """

    def __init__(self, definition: Definition, options: SimpleNamespace, *, seize: bool = False) -> None:
        self._options = options
        self._definition = definition
        run_dir, beside = options.run_dir, (*options.evaluation, *options.callbacks)
        self._recipe = described(definition) if run_dir is not None else {}
        self._recipe["beside"] = _spelled(beside)
        self._differs: list[str] = []
        self._hints: list[str] = []
        self._behaviour: Behaviour | None = None
        self._directory: RunDirectory | None = None
        self._earlier: Snapshot | None = None
        self._weights: Mapping[str, Tensor] | None = None
        try:
            if run_dir is not None:
                self._directory = RunDirectory(run_dir, options.keep_snapshots, seize=seize)
                self._earlier = newest_of(self._directory.root)
                self._check_wanted(self._directory, run_dir)
            if options.warm_start is not None and self._earlier is None:
                loose = loose_weights(options.warm_start)
                self._weights = read_any(options.warm_start).weights if loose is None else loose
        except BaseException:
            self.close()
            raise

    def begin(self, framework: Framework) -> Seen:
        """Give ``framework`` the state that was found; returns what had been done.

        Raises
        ------
        UsageError
            The directory is another recipe's.
        """
        if self._directory is not None:
            with framework.environment:
                state = framework.capture(copy=False)
            self._recipe["made"] = made(state)
            self._compare(self._directory, state)
        earlier = self._earlier
        if self._weights is not None:
            with framework.environment:
                framework.adopt(Captured(fitted(self._weights, framework.capture(copy=False)), {}, {}))
        made_here = self._recipe.get("made")
        if earlier is None:
            return Seen(Progress(rounds=self._definition.rounds, made=made_here))
        with taking_over("what was evaluated"):
            metrics = [Evaluated(steps, float(value), name) for steps, value, name in earlier.metrics]
        seen = taken_over(framework, earlier, self._definition, resumed_from=earlier.step, made=made_here)
        seen.evaluated.extend(metrics)
        return seen

    def take_over(self, engine: Engine) -> None:
        """Keep the directory from here on, in place of a process that fell."""
        self._recipe["made"] = engine.progress.made

    def check(self, engine: Engine) -> None:
        """Refuse a recipe whose next step differs from the earlier run's, as far as one replica of it shows.

        Raises
        ------
        UsageError
            The directory is another recipe's.
        """
        known, self._behaviour = self._behaviour, None
        if known is not None and engine.options.allow is False:
            if known.link is not None:
                self._behaviour = known
                return
            now = engine.peek() if known.replica is not None else None
            if now is not None:
                self._settle(known.of_replica(now))
                return
        self._warn("nothing that it computes can be compared with that run")

    @property
    def first_step(self) -> Callable[[StepReport, Any], None] | None:
        """Checks the first step before any observer hears of it; None if there is nothing to compare with."""
        return None if self._behaviour is None else self._check_step

    def _check_step(self, report: StepReport, batch: Any) -> None:
        assert self._behaviour is not None, "else nobody asks"
        fields = fields_of(report, self._definition, "" if batch is None else brought_as(batch))
        if self._behaviour.of_other_samples(fields["samples"]):
            self._hints.insert(0, f"the batch of step {report.step} is another than before")
            self._warn("so that step cannot be compared with that run's")
        else:
            self._settle(self._behaviour.of_step(fields))

    def observers(self) -> tuple[EventLog, Chained, Saver] | tuple[()]:
        """The observers that record the run, in their order; none without a directory."""
        if self._directory is None:
            return ()
        directory, options = self._directory, self._options
        link = link_of(self._earlier) if self._earlier else None
        log = EventLog(directory, self._differs, self._definition.total)
        chained = Chained(directory, self._definition, options.chain, self._recipe, link)
        stop = options.on_snapshot_error == "stop"
        return log, chained, Saver(directory, options.snapshot_every, chained, stop=stop, recipe=self._recipe)

    def close(self) -> None:
        """Let go of the directory, as there will be no run."""
        if self._directory is not None:
            self._directory.close()

    def _check_wanted(self, directory: RunDirectory, run_dir: pathlib.Path) -> None:
        if self._earlier is not None and self._options.resume is True:
            directory.check_own(self._earlier.step)
        if self._earlier is not None and not self._options.resume:
            raise UsageError(
                f"run_dir is {str(run_dir)!r}, which has a run of {self._earlier.step} steps, and resume is False; "
                "choose another directory, or go on from there with resume=True"
            )

    def _check_length(self, run_dir: pathlib.Path, earlier: Snapshot) -> None:
        by_epochs = self._definition.stream is not None and self._definition.epochs is not None
        steps = None if by_epochs else self._definition.total  # batches may have been brought between
        if steps is not None and steps < earlier.step and not self._brought(steps, earlier.step):
            raise UsageError(
                f"run_dir is {str(run_dir)!r}, which has a run of {earlier.step} steps, and the recipe has "
                f"{steps}; raise steps or epochs, or choose another directory"
            )

    def _brought(self, begin: int, end: int) -> bool:
        """Whether the caller brought the batches of all these steps: then they are no planned ones."""
        assert self._directory is not None, "there is a snapshot"
        with contextlib.suppress(SnapshotError, OSError), Links(self._directory.root / CHAIN) as links:
            return all(map(links.brought, range(begin, end)))
        return False

    def _compare(self, directory: RunDirectory, state: Captured) -> None:
        """Refuse another recipe, or note how it differs; warn of what may differ."""
        earlier = self._earlier
        if earlier is None:
            return
        try:
            comparison = compare(self._recipe, earlier.recipe)
        except ValueError as error:
            raise SnapshotError(f"the snapshot of step {earlier.step} cannot be used: {error}") from error
        known = Behaviour(directory.root, earlier.step)
        differs = comparison.differs + comparison.hints
        if differs and self._options.resume != ANYWAY and earlier.step == 0 and known.link is None:
            why = "; ".join(differs)
            checks.warn(f"run_dir has a run of another recipe that did no step, so this one begins anew there: {why}")
            self._earlier = None
            return
        self._hints = comparison.hints
        if comparison.differs:
            self._refuse(comparison.differs)
        self._check_length(directory.path, earlier)
        if comparison.differs:
            return  # so what it computes differs, too
        changed = changes(recorded_environment(), earlier.environment)
        changed += changes(*map(_place, (state.facts, earlier.facts)))
        if changed := [*changed, *comparison.versions]:
            checks.warn(
                f"bits may differ from an uninterrupted run's, as the environment does: {'; '.join(changed)}; so what "
                "steps come to is not compared with that run"
            )
        else:
            self._behaviour = known

    def _settle(self, why: str) -> None:
        """Refuse to go on if a step computes something else; else only warn of what reads differently."""
        if why:
            self._refuse([why])
        else:
            self._warn("what it computes next is the same")

    def _warn(self, outcome: str) -> None:
        hints, self._hints = self._hints, []
        if hints:
            checks.warn(f"the recipe may not be that of the snapshot: {'; '.join(hints)}; {outcome}")

    def _refuse(self, differs: list[str]) -> None:
        """Refuse another recipe than the snapshot's, and write nothing any more; with ``ANYWAY``, only warn."""
        assert self._directory is not None, "there is a snapshot"
        differs, self._hints = [*differs, *self._hints], []
        why = "; ".join(differs)
        if self._options.resume != ANYWAY:
            self._directory.close()
            raise UsageError(
                f"run_dir has snapshots of another recipe: {why}. Use that recipe, choose another run_dir, or go on "
                f"all the same with resume={ANYWAY!r} (--resume {ANYWAY}), which is noted in the log"
            )
        checks.warn(
            f"going on with another recipe than that of the snapshot: {why}; what optimizers and schedules have as "
            "numbers, rates too, stays that of the snapshot (warm_start= begins with new ones)"
        )
        self._differs += differs


def _place(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Where a framework computes, as far as its state tells."""
    known = facts.get("environment")
    return known if isinstance(known, dict) else {"device": facts.get("device")}


def _spelled(beside: Sequence[Any]) -> dict[str, str]:
    """Options of evaluations and callbacks, by class."""
    options_by_class = {name: {**options_of(item), **functions_of(item, FUNCTIONS)} for name, item in by_class(beside)}
    return {f"{name}.{option}": text for name, options in options_by_class.items() for option, text in options.items()}


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
        Parameters and buffers by name, as tensors: ``model.load_state_dict(weights, strict=False)``. Those of jax
        and tinygrad are numpy arrays.
    loss_history : list of float
        Mean loss of every step; of steps with phases, of every phase in turn.
    """

    step: int
    samples: int
    digest: str | None
    weights: dict[str, Any] = field(repr=False)
    loss_history: list[float] = field(repr=False)


def load(path: Any) -> Loaded:
    """Read a snapshot, as ``run.save`` or a run's directory holds it; every byte is checked, nothing is executed.

    Parameters
    ----------
    path : str or path
        The folder of a snapshot, or a ``run_dir``, of which the newest good one is taken.

    Returns
    -------
    Loaded
        ``weights`` (parameters and buffers by name), ``step``, ``loss_history`` and more.

    Raises
    ------
    SnapshotError
        It is not whole, damaged, or of another version.
    UsageError
        ``path`` is no path.
    """
    earlier = read_any(checks.path("path", path, hint="give the folder of a snapshot, or a run_dir"))
    weights = {name: tensor_of(stored, earlier.facts) for name, stored in earlier.weights.items()}
    return Loaded(earlier.step, earlier.samples, earlier.digest, weights, losses_in(earlier))


def read_any(path: pathlib.Path) -> Snapshot:
    """The snapshot at ``path``, or the newest good one of the run there."""
    if is_there(path / snapshot.MANIFEST):
        return snapshot.read(path)
    if not is_there(path / SNAPSHOTS):
        raise SnapshotError(f"{str(path)!r} is no snapshot and no directory of a run; give one of these")
    earlier = newest_of(path)
    if earlier is None:
        raise SnapshotError(f"{str(path)!r} has no snapshot")
    return earlier


def taken_over(framework: Framework, earlier: Snapshot, definition: Definition, **facts: Any) -> Seen:
    """Give ``framework`` the state of a snapshot; returns what had been done, with other ``facts`` of its progress."""
    with taking_over("the state"), framework.environment:
        framework.adopt(Captured(dict(earlier.weights), dict(earlier.training), earlier.facts))
    states, rounds = states_in(earlier.facts, earlier.training), definition.rounds
    losses = losses_in(earlier, rounds.updates(earlier.step))
    return Seen(Progress(losses, earlier.samples, rounds, **facts), waiting=states)


def link_of(earlier: Snapshot) -> str | None:
    """The link of its run's chain at its step, if it says one."""
    link = earlier.facts.get(LINK)
    return link if isinstance(link, str) and LINK_OF.fullmatch(link) else None


def losses_in(earlier: Snapshot, updates: int | None = None) -> list[float]:
    """The loss of every update; ``updates``: how many those are, where the recipe is known."""
    stored = earlier.training.get(LOSSES)
    shape = None if stored is None else stored.shape
    phased = updates is None and any(name.startswith("phases") for name in earlier.noted("values"))
    expected = shape if phased else (earlier.step if updates is None else updates,)
    if stored is None or stored.dtype != "float64" or len(stored.shape) != 1 or shape != expected:
        content = "none" if stored is None else f"those of {checks.outline(stored)}"
        raise SnapshotError(f"the snapshot is of step {earlier.step}, which has a loss for each, but has {content}")
    history: list[Any] = memoryview(stored.content).cast("B").cast("d").tolist()
    return history
