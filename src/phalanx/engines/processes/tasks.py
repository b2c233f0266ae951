"""What the caller's process has its workers do between steps: a class for each task, which says how.

The caller packs a task into memory that its workers inherited, as it packs the recipe. Nothing else is unpickled there.
"""

from __future__ import annotations

import abc
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.definition.metrics import Metrics
from phalanx.errors import LostError
from phalanx.plan.shares import share_bounds
from phalanx.seams.records import Training, Weights
from phalanx.shared.state import CopiedShard

if TYPE_CHECKING:
    from phalanx.engines.processes.worker import Worker


class Task(abc.ABC):
    """Something that every worker does, at once with the others."""

    @abc.abstractmethod
    def do(self, worker: Worker) -> Any:
        """Do this worker's part; what is returned goes to the caller's process."""


@dataclass(frozen=True)
class Begin(Task):
    """Go to the beginning of a step, with the state in the arena; replacements do that before they are ready.

    ``losses``: of the steps since ``options``. ``restore``: from the snapshot in the arena.
    """

    step: int
    foreign: Any
    options: Any
    losses: list[float]
    restore: bool = False

    def do(self, worker: Worker) -> None:
        worker.framework.rewind()
        worker.shard.frozen.enter(self.step)
        # A copy: tensors among them lie in memory that is written again when another worker is started.
        worker.shard.take(*copy.deepcopy((self.foreign, self.options)))
        for loss in self.losses:  # schedules are not saved, but stepped again
            worker.framework.schedule(loss)
        if self.restore and not worker.restore():
            raise LostError(
                f"worker {worker.number}'s part of the snapshot in memory is damaged, or its scheduler, stepped again, "
                "came to other options (it reads a clock or weights): the checksum differs, so that what was lost "
                "cannot be done again; run again, with a run_dir from the newest snapshot there"
            )
        if self.restore and isinstance(worker.shard, CopiedShard):
            worker.barrier.wait()  # others restore what this worker takes
            worker.shard.load()
        worker.twice.begin(self.step)
        worker.come_to(self.step)


@dataclass(frozen=True)
class Resume(Task):
    """Go on at ``step``. The others know that the step before is done; this worker may not know it yet."""

    step: int
    loss: float

    def do(self, worker: Worker) -> None:
        worker.framework.rewind()
        if worker.step < self.step:
            worker.framework.schedule(self.loss)
        worker.come_to(self.step)


@dataclass(frozen=True)
class Evaluate(Task):
    """Measure this worker's block of chunks."""

    metric_fn: Metrics
    data: Any
    batch_size: int
    weights: Weights | None

    def do(self, worker: Worker) -> list[Any]:
        shares = worker.dealer.chunks(self.data, self.batch_size, self.metric_fn.collate_fn)
        mine = range(*share_bounds(len(shares), worker.placement.workers)[worker.number])
        return worker.twice.readings(self.metric_fn, shares, mine, self.weights, worker.tick)


@dataclass(frozen=True)
class Describe(Task):
    """Say what is beside the arrays in the arena, after a ``change`` that schedules are told, and after saving."""

    save: bool
    change: tuple[float | Training, int] | None = None

    def do(self, worker: Worker) -> dict[str, Any]:
        if self.change is not None:
            worker.framework.schedule(*self.change)  # repeated, it changes nothing
        if self.save:
            worker.save()
        return worker.shard.state()


@dataclass(frozen=True)
class HandOver(Task):
    """Have worker ``source``, which has a copy of the whole state, write it to the arena."""

    source: int

    def do(self, worker: Worker) -> dict[str, Any] | None:
        assert isinstance(worker.shard, CopiedShard), "others have their state in the arena"
        worker.framework.rewind()
        return worker.shard.whole() if worker.number == self.source else None


@dataclass(frozen=True)
class Peek(Task):
    """Have the first worker compute what ``seams.Engine.peek`` returns."""

    def do(self, worker: Worker) -> dict[str, Any] | None:
        return worker.twice.peek(worker.step) if worker.number == 0 else None


@dataclass(frozen=True)
class HandGradients(Task):
    """Return those of a step that callbacks asked for; None if it was begun before this worker came."""

    step: int

    def do(self, worker: Worker) -> dict[int, tuple[str, Any]] | None:
        kept = worker.gradients
        return kept.latest if kept and kept.step == self.step else None
