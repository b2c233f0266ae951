"""Records which workers died, where and why, until they are replaced; raises if deaths go on; notices who hangs."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.definition.batches import BatchShares
from phalanx.definition.fields import Definition
from phalanx.engines.processes.messages import End
from phalanx.errors import LostError, RunError, spell_samples
from phalanx.plan.fold import Placement
from phalanx.plan.lifecycle import OWN, Cause, Place, Stage, Streak
from phalanx.seams import Framework
from phalanx.seams.records import Incident, Records
from phalanx.shared.counters import TASK, Counters

SHOWN_CAUSES = 3
RECENT = 21  # steps whose median tells how long one takes
PATIENCE, SLOWER, FIRST_PATIENCE = 60.0, 20, 600.0  # seconds; times a usual step; seconds while none is known
STARTING = 120.0  # seconds for imports and make_model, at least
AWAKE_SECONDS = 5.0  # between two checks: more means that this process was stopped, and perhaps the workers with it
PARTS = {Stage.SAVING: "save", Stage.FOLDING: "fold", Stage.UPDATING: "update"}
DOING = {
    "save": "in its snapshot, or the schedule before it",
    "fold": "in its fold",
    "update": "in its update",
    "task": "in a task between steps",
    "wait": "while it waited for others",
}


class Deadline:
    """How many seconds a worker may be silent.

    Parameters
    ----------
    seconds : float or None
        None: 20 usual steps, at least a minute; none at all under a debugger. Steps say nothing about evaluations: of
        these it is 20 usual chunks, at least ten minutes. Silence cannot tell a hang from a long step, so whoever was
        killed for it has ten minutes when it tries again.

    Attributes
    ----------
    doubted : bool
        Whether a worker was killed, and nothing was done since.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds, self.doubted = seconds, False
        self._recent = {task: deque[float](maxlen=RECENT) for task in (False, True)}

    def note(self, seconds: float, *, task: bool = False) -> None:
        """Note how long a step took, or a chunk of a ``task``."""
        self._recent[task].append(seconds)
        self.doubted = False

    def seconds(self, *, task: bool = False, once: bool = False) -> float:
        """How long a worker may be silent now: in a step or a ``task``; ``once``: nobody could take its place."""
        if self._seconds is not None:
            return self._seconds
        if sys.gettrace() is not None:
            return math.inf
        recent = self._recent[task]
        least = FIRST_PATIENCE if task or once or self.doubted or not recent else PATIENCE
        return max(least, SLOWER * statistics.median(recent or [0]))


class HangWatch:
    """Notices that nothing has changed for ``seconds()``. Time in which this process was stopped does not count.

    Attributes
    ----------
    quiet : int
        In how many checks in a row nothing had changed. A process that is stopped makes none.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds, self.quiet = seconds, 0
        self._last = b""
        self._since = self._seen = time.monotonic()

    def expired(self, progress: bytes, *, starting: bool) -> bool:
        """Whether ``progress`` has been the same for too long; the time starts anew then. Starting may take longer."""
        now = time.monotonic()
        asleep, self._seen = now - self._seen > AWAKE_SECONDS, now
        if progress != self._last or asleep:
            self._last, self._since, self.quiet = progress, now, 0
            return False
        self.quiet += 1
        expired = now - self._since > max(self._seconds(), STARTING if starting else 0)
        if expired:
            self._since = now
        return expired


class FailureLog:
    """The deaths of one run, and the only record of which workers are dead.

    Parameters
    ----------
    definition : Definition
    framework : Framework
    placement : Placement
    counters : Counters
    records : Records
        Where incidents are noted.

    Attributes
    ----------
    dead : dict of int to End
        The workers that are to be replaced, and how they ended; from a worker's end until another is started.
    batch : Any
        The batch that the caller brought for the current step; None for a planned one.
    """

    def __init__(
        self,
        definition: Definition,
        framework: Framework,
        placement: Placement,
        counters: Counters,
        records: Records,
    ) -> None:
        self.dead: dict[int, End] = {}
        self.batch: Any = None
        self._starting: set[int] = set()  # replacements of workers that died
        self._definition = definition
        self._framework = framework
        self._placement = placement
        self._counters = counters
        self._incidents = records.progress.incidents
        self._tally = records.tally
        self._hopeless: RunError | None = None
        self._tasks = 0  # tasks that were done

    @property
    def portable(self) -> bool:
        """Whether the whole state is known. Otherwise only the first worker has a part of it: it cannot be replaced."""
        return self._framework.sharing.portable and not self._counters.apart

    @property
    def replaceable(self) -> bool:
        """Whether any worker can be replaced."""
        return self.portable and self._placement.whole

    def fell(self, worker: int, end: End) -> None:
        """Record a worker's death. The first reason counts: code that ends a worker says why before others notice."""
        if worker in self.dead:
            return
        self.dead[worker] = end
        self._starting.discard(worker)
        step = self._counters.progress()[worker].step
        if end.cause is not Cause.CALLER or self._placement.whole:
            self.note("death", worker, step, end.why)
        if end.cause is not Cause.CALLER:
            streak = self._tally.count(worker, self._place(worker, end), end.cause, end.why)
            if streak is not None and self._hopeless is None:
                self._hopeless = self._error(worker, streak, step)

    def fill(self, worker: int) -> None:
        """A worker is started, perhaps as a replacement; it may die before it is ready."""
        if self.dead.pop(worker, None) is not None:
            self._starting.add(worker)

    def started(self, step: int) -> None:
        """Workers were started at ``step``; some may have died again."""
        for worker in sorted(self._starting):
            self.note("replaced", worker, step)
        self._starting.clear()

    def check(self) -> None:
        """Raise if workers cannot be replaced, or if that is futile.

        Raises
        ------
        RunError
            They die of what they do; or, over several hosts, all begin anew with other workers.
        """
        if self._hopeless is not None:  # raised once: the state is copied to the caller after that
            hopeless, self._hopeless = self._hopeless, None
            raise hopeless
        if not self._placement.whole:
            worker, end = min(self.dead.items())
            raise LostError(f"worker {worker} of this host {end.why}")

    def came_through(self, kind: int) -> None:
        """Note that a grant was done."""
        self._tasks += kind == TASK

    def note(self, kind: str, worker: int, step: int, why: str = "") -> None:
        """Note an incident in an update."""
        step = step if step < 0 else self._definition.rounds.at(step).step
        self._incidents.append(Incident(time.perf_counter(), kind, worker, step, why))

    def computes(self, worker: int) -> bool:
        """Whether not all of its replicas are done; for a loss over the whole batch it is ``COMPUTED`` halfway."""
        stage, done = self._counters.progress()[worker].stage, self._counters.workers[worker].replicas
        return stage in (Stage.COMPUTING, Stage.COMPUTED) and done < len(self._placement.blocks[worker])

    def _place(self, worker: int, end: End) -> Place:
        """What a worker was doing when it died."""
        step, stage = self._counters.progress()[worker]
        if not end.ready:
            return Place(-1, "start")
        if self._counters.idle(worker):
            return Place(step, "wait")
        if self._counters.kind == TASK:
            return Place(step, "task", self._tasks)
        if self.computes(worker):
            return Place(step, "compute", self._counters.workers[worker].replicas)
        return Place(step, PARTS.get(stage, "wait"))

    def _error(self, worker: int, streak: Streak, step: int) -> RunError:
        point, count = streak.place, len(streak.causes)
        more = f", ... and {count - SHOWN_CAUSES} more" if count > SHOWN_CAUSES else ""
        causes = ", ".join(streak.causes[:SHOWN_CAUSES]) + more
        patience = "" if streak.own >= OWN else "; if others end workers, raise max_failures"
        if "deadline_seconds" in causes:
            patience += "; if it was at work and takes so long, raise deadline_seconds"
        if point.doing != "compute":
            where = "before it was ready" if point.doing == "start" else f"at step {step} {DOING[point.doing]}"
            return RunError(
                f"worker {worker} ended {count} times in a row {where} ({causes}); look at what it printed last, at "
                f"the system's log and at memory, or use engine='inline' under a debugger{patience}",
                step=step,
            )
        replica = self._placement.blocks[worker][point.done]
        samples = self._samples(point.step, replica)
        return RunError(
            f"replica {replica} of step {point.step} ended {count} workers in a row that computed it "
            f"({causes}); its samples are {spell_samples(samples)}. Look at these samples and at memory, or compute "
            f"them with engine='inline' under a debugger{patience}",
            step=point.step,
            replica=replica,
            samples=samples,
        )

    def _samples(self, step: int, replica: int) -> Sequence[int]:
        """Sample indices of a replica in a step; positions in the batch if the caller brought it."""
        if self.batch is None:
            return self._definition.plan.shares(self._definition.rounds.at(step).step)[replica].tolist()
        return BatchShares(self._definition, self._framework.opened).brought(self.batch)[replica].samples.tolist()
