"""A run at an instant: its state before a step, in this process, and any replica of that step computed from it.

Everything in this room uses three operations: restore a state, compute one replica of one step, watch.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.checkpoint.chained import brought_as, leaves_now, retrained_in, scheduled_in
from phalanx.checkpoint.directory import SNAPSHOTS, snapshot_folders
from phalanx.checkpoint.files import is_there
from phalanx.checkpoint.resume import taken_over
from phalanx.checkpoint.snapshot import MANIFEST, Snapshot, read
from phalanx.definition.batches import BatchShares
from phalanx.definition.data import Share
from phalanx.definition.fields import Definition
from phalanx.definition.streams import supplied
from phalanx.engines import openers
from phalanx.engines.alone import alone
from phalanx.engines.twice import checksum
from phalanx.errors import SnapshotError, UsageError
from phalanx.plan.audit import joined
from phalanx.run.loop import merged
from phalanx.run.observers import shown
from phalanx.seams import Framework
from phalanx.seams.records import Captured, Computed, Exported, Progress, RunOptions, Seen, StepReport, Watch
from phalanx.step import compute, prepare, propose, todo
from phalanx.surroundings.presence import outside


class Instant(contextlib.AbstractContextManager["Instant"]):
    """The state of a recipe before a step.

    Parameters
    ----------
    definition : Definition
    begin : Snapshot or None
        Where to begin; None: with the model as it is made.
    workers : int
        How many workers compute the steps in between.
    batch : Any
        The batch that the caller brought for this step; None if the step is a planned one.
    losses : sequence of float
        Losses of the updates done before, where ``make_model`` makes the model as they left it.
    folder : path or None
        Of the run: its chain says what was frozen and thawed, and with what the schedule was stepped.
    devices : sequence of str
        What computes the steps in between, a worker each; none: where ``make_model`` puts the model.
    """

    def __init__(
        self,
        definition: Definition,
        begin: Snapshot | None = None,
        workers: int = 1,
        *,
        batch: Any = None,
        losses: Sequence[float] = (),
        folder: pathlib.Path | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        if definition.data is None and batch is None:
            raise UsageError(
                "the recipe has data=None: the caller brought its batches, and they are gone, so that no step of it "
                "can be computed again; give the recipe data"
            )
        _, open_engine = openers()  # they load the code that starts processes
        self.definition = definition
        self._batch, self._losses, self._changes = batch, losses, retrained_in(folder)
        self._scheduled = scheduled_in(folder)
        self._opened: list[Framework] = []
        where = "inline" if workers == 1 else "processes", workers, devices, None
        self._engine = open_engine(definition, *where, self._beginning(begin), RunOptions(allow=None))
        (self._framework,) = self._opened
        self._dealer = BatchShares(definition, self._framework.opened)
        self._supply = None
        if batch is None and definition.stream is not None:
            self._supply = supplied(definition, self._engine)
        self.brought = ""  # a hash of what a stream gave for the step that was done last
        self._retrain()

    def __exit__(self, *_: object) -> None:
        if self._supply is not None:
            self._supply.close()
        self._engine.close()

    @property
    def step(self) -> int:
        """The next step, or the one of which some phases are done."""
        return self._engine.progress.steps

    @property
    def update(self) -> int:
        """The next update; the same number as the step, where steps have no phases."""
        return len(self._engine.progress.loss_history)

    @property
    def phase(self) -> str:
        """The name of the next phase; "" where there are none."""
        return self.definition.rounds.at(self.update).name

    @property
    def exported(self) -> Exported:
        """Model, parameters and digest of now."""
        return self._engine.export(copy=False)

    @functools.cached_property
    def parameters(self) -> list[str]:
        """Names of all parameters, in the order of a gradient's entries."""
        return list(self.exported.params)

    def advance(self, horizon: int = 0, *, whole: bool = True) -> StepReport:
        """Finish the present step. Worker processes may run ahead of it, up to ``horizon`` finished steps.

        Without ``whole``, only the next phase is done.
        """
        horizon = min([max(horizon, self.step + 1), *(step for step in self._changes if step > self.step)])
        ahead = self.definition.rounds.updates(horizon) if whole else self.update + 1
        reports = [self._updated(ahead)]
        while whole and self._engine.progress.between_phases:
            reports.append(self._updated(ahead))
        return merged(reports, self.definition) if whole else reports[0]

    def _updated(self, ahead: int) -> StepReport:
        batch = None
        if self._supply is not None:
            self._supply.draw(self.step)
            batch = self._supply.drawn
        report = self._engine.advance(batch, ahead)
        if batch is not None:
            self.brought, report = brought_as(batch), report._replace(epoch=batch.epoch)
        self._retrain()
        if self.definition.schedule_on is not None and not self._engine.progress.between_phases:
            self._follow(self.definition.schedule_on, report.epoch)
        return report

    def _retrain(self) -> None:
        """Freeze and thaw what the run did before this step; a snapshot may have it already, and repeating is safe."""
        for change in () if self._engine.progress.between_phases else self._changes.get(self.step, ()):
            self._engine.schedule(change, 0)

    def _follow(self, metric: str, epoch: int | None) -> None:
        """Step the schedule after an epoch, with the value that the run had: evaluations are not computed again."""
        supply = self._supply
        if epoch is None or not (
            supply.epochs(self.step) > epoch if supply else self.definition.epoch_ended(self.step)
        ):
            return
        if self.step not in self._scheduled:
            raise UsageError(
                f"the schedule goes by {metric!r}, and no chain says its value after step {self.step}; give steps that "
                "end before"
            )
        for value in self._scheduled[self.step][-1]:
            self._engine.schedule(value, epoch)

    def go_to(self, step: int, phase: str | None = None, *, progress: bool | str = "auto") -> None:
        """Do all steps before ``step``, and its phases before ``phase``; shows a bar where that takes a while.

        Raises
        ------
        UsageError
            The step has no such phase.
        """
        rounds = self.definition.rounds
        due = [rounds.at(update).name for update in range(rounds.updates(step), rounds.updates(step + 1))]
        if phase is not None and phase not in due:
            known = f"has the phases {due}" if self.definition.phases else "has no phases"
            raise UsageError(f"phase is {phase!r}, but step {step} {known}; name one of those, or leave it out")
        for _ in shown(range(self.step, step), f"phalanx: computing up to step {step}", progress=progress):
            self.advance(step)
        while phase is not None and self.phase != phase:
            self.advance(whole=False)

    def shares(self) -> list[Share]:
        """What each replica of this step is dealt."""
        if self._batch is None and self._supply is None:
            return self._dealer.planned(self.update)
        return self._dealer.brought(self._batch if self._supply is None else self._supply.draw(self.step))

    def replica(self, replica: int, watch: Watch | None = None) -> Computed:
        """Compute a replica of this step; the state stays as it is.

        Raises
        ------
        UsageError
            It has no samples in this step.
        WorkerError
            User code raised.
        """
        shares = self.shares()
        if not len(shares[replica].samples):
            raise UsageError(f"replica is {replica}, which has no samples in step {self.step}; name another")
        with self._rewound() as framework:
            prepare(framework, self.definition, self.update, shares)
            computing = framework.gradients(todo(self.definition, self.update, [replica], shares), watch)
            computed = compute(computing, self.definition.rounds.at(self.update), replica, shares[replica])
            (computed.loss,) = framework.arithmetic.read([computed.loss])
            return computed

    def sums(self, replica: int) -> set[int]:
        """Checksums of a replica of this step, as audits compare them: by itself, or added to the one before."""
        shares, checksums = self.shares(), set[int]()
        ran = [number for number, share in enumerate(shares) if len(share.samples)]
        for work in ([replica], joined(replica, range(len(shares)), ran)):
            with self._rewound() as framework:
                prepare(framework, self.definition, self.update, shares)
                *_, computed = framework.gradients(todo(self.definition, self.update, work, shares))
                checksums.add(checksum(framework.arithmetic, computed))
        return checksums

    def mean(self) -> dict[str, Any]:
        """The mean gradient of this step by names of parameters; the state stays as it is."""
        link = alone(self._framework, self.definition.replicas)
        with self._rewound() as framework:
            return self.named(propose(framework, link, self.definition, self.update, self.shares()).gradient)

    @contextlib.contextmanager
    def _rewound(self) -> Iterator[Framework]:
        """The framework, to compute replicas of this step with; afterwards the state is what it was."""
        with self._framework.environment, outside():
            try:
                yield self._framework
            finally:
                self._framework.rewind()

    def named(self, gradient: Sequence[Any] | None) -> dict[str, Any]:
        """A gradient by names of parameters; those that have none are left out."""
        entries = gradient or [None] * len(self.parameters)
        return {name: entry for name, entry in zip(self.parameters, entries, strict=True) if entry is not None}

    def capture(self) -> Captured:
        """The state now; it stays as it is while steps are done."""
        return self._engine.capture()

    @property
    def leaves(self) -> dict[str, str]:
        """A hash of each tensor of the state now."""
        return leaves_now(self._engine)

    def put(self, state: Captured, update: int) -> None:
        """Take back a state that was captured before ``update``; only where steps are computed in this process."""
        with self._framework.environment:
            self._framework.adopt(state)
        self._engine.progress.go_back(update)

    def _beginning(self, begin: Snapshot | None) -> Callable[[Framework], Seen]:
        def adopted(framework: Framework) -> Seen:
            self._opened.append(framework)
            if begin is None:
                return Seen(Progress(list(self._losses), rounds=self.definition.rounds))
            return taken_over(framework, begin, self.definition)

        return adopted


def of_updates(result: Any, definition: Definition) -> list[float]:
    """The loss of every update that led to a result."""
    history = {name: iter(values) for name, values in result.phase_history.items()}
    if not history:
        return list(result.loss_history)
    updates = range(sum(map(len, result.phase_history.values())))
    return [next(history[definition.rounds.at(update).name]) for update in updates]


def snapshots(folder: pathlib.Path | None) -> dict[int, pathlib.Path]:
    """Where the snapshots of a run are, by their steps, newest first; a snapshot by itself is one."""
    if folder is None:
        return {}
    if is_there(folder / MANIFEST):
        return {read(folder).step: folder}
    return snapshot_folders(folder) if is_there(folder / SNAPSHOTS) else {}


def whole(folder: pathlib.Path) -> Snapshot | None:
    """A snapshot, with every byte checked; None where a run that goes on has removed it.

    Raises
    ------
    SnapshotError
        It is damaged.
    """
    try:
        return read(folder)
    except SnapshotError:
        if is_there(folder):
            raise
        return None


def devices_of(folder: pathlib.Path | None, step: int, workers: int = 1) -> list[str]:
    """Devices of the kind that computed a run's steps from ``step`` on, so that they have its bits; empty for the CPU.

    A snapshot says which kind had computed the steps before it.
    """
    saved = snapshots(folder)
    for path in [saved[at] for at in sorted(saved, key=lambda at: (at <= step, abs(at - step)))]:
        with contextlib.suppress(SnapshotError):
            return named_devices(read(path).facts.get("device"), workers)
    return []


def named_devices(kind: str | None, count: int) -> list[str]:
    """The first devices of a kind; empty for the CPU."""
    return [f"{kind}:{number}" for number in range(count)] if kind not in (None, "cpu") else []


def nearest(folder: pathlib.Path | None, step: int) -> Snapshot | None:
    """The newest good snapshot of a run from before ``step``; None: begin with the model as it is made."""
    for saved, path in snapshots(folder).items():
        if saved <= step:
            with contextlib.suppress(SnapshotError):  # steps since an earlier one come to the same
                return read(path)
    return None
