"""Who fell, where and why: counted, noted, and an error if it does not stop."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from phalanx.definition.batches import BatchShares
from phalanx.definition.fields import Definition
from phalanx.engines.processes.messages import End, irreplaceable
from phalanx.errors import RunError, spell_samples
from phalanx.plan.lifecycle import Phase, Progress
from phalanx.plan.placement import Placement
from phalanx.plan.tally import Cause, Death, Poison, Spot, Tally
from phalanx.seams import Framework, RunState
from phalanx.seams.events import Incident
from phalanx.shared.counters import TASK, Counters
from phalanx.surroundings import interrupts

SHOWN_CAUSES = 3
SLICE_SECONDS = 0.05  # between two looks at Ctrl-C
PARTS = {Phase.SAVING: "save", Phase.FOLDING: "fold", Phase.UPDATING: "update"}
DOING = {
    "save": "its snapshot, or the schedule before it",
    "fold": "its fold",
    "update": "its update",
    "task": "a task between steps",
}


class FailureLog:
    """The losses of one run.

    Parameters
    ----------
    definition : Definition
    framework : Framework
    placement : Placement
    counters : Counters
    run_state : RunState
        Where incidents are noted.

    Attributes
    ----------
    batch : Any
        That the caller brought for the step that is being done; None for planned ones.
    portable : bool
        Whether the whole state is known. Otherwise the first worker keeps some to itself, and cannot be replaced.
    """

    def __init__(
        self,
        definition: Definition,
        framework: Framework,
        placement: Placement,
        counters: Counters,
        run_state: RunState,
    ) -> None:
        self.batch: Any = None
        self._definition = definition
        self._framework = framework
        self._placement = placement
        self.portable = framework.sharing.portable
        self._counters = counters
        self._incidents = run_state.incidents
        self._tally = Tally()
        self._attempts = 0
        self._noted: dict[int, int] = {}  # the latest life of each worker whose end was counted
        self._tasks_done = False  # since the latest death
        self._vacant: set[int] = set()  # places of those that were not replaced yet

    def fell(self, deaths: Mapping[int, End], started: int, lived: float) -> None:
        """Note and count the deaths that were not yet.

        Parameters
        ----------
        deaths : mapping
            Of those that are to be replaced.
        started : int
            How many workers were ready so far.
        lived : float
            Seconds that all workers together have lived so far.

        Raises
        ------
        RunError
            What ends them is what they do; or nobody can take their places.
        """
        fresh = {worker: end for worker, end in deaths.items() if self._noted.get(worker) != end.life}
        if not fresh:
            return
        places = self._counters.progress()
        for worker, end in fresh.items():
            self._noted[worker] = end.life
            self._vacant.add(worker)
            self.note("death", worker, places[worker].step, end.why)
        if not self._placement.whole:
            raise irreplaceable(fresh)
        fresh = {worker: end for worker, end in fresh.items() if end.cause is not Cause.CALLER}
        if not fresh:
            return
        found = {worker: self._death(worker, end, places[worker]) for worker, end in fresh.items()}
        step, done = max(places).step, self._counters.computed + started
        poison = self._tally.count(found, self._come_through(fresh, places), step, done, self._attempts, lived)
        if poison is not None:
            raise self._error(poison, step)

    @property
    def replaceable(self) -> bool:
        """Whether another worker can take the place of any."""
        return self.portable and self._placement.whole

    def start(self) -> None:
        """Workers are about to be started, and may fall again; waits a little if that was futile often."""
        self._attempts += 1
        end = time.monotonic() + self._tally.pause
        while (left := end - time.monotonic()) > 0:
            interrupts.check()
            time.sleep(min(left, SLICE_SECONDS))

    def started(self, deaths: Collection[int], step: int) -> None:
        """Workers were started; those in ``deaths`` have ended again."""
        for worker in sorted(self._vacant - set(deaths)):
            self._vacant.remove(worker)
            self.note("replaced", worker, step)

    def came_through(self, kind: int) -> None:
        """What was granted was done."""
        self._tasks_done = kind == TASK

    def note(self, kind: str, worker: int, step: int, why: str = "") -> None:
        """Note an incident."""
        self._incidents.append(Incident(time.perf_counter(), kind, worker, step, why))

    def _error(self, poison: Poison, step: int) -> RunError:
        spot, count = poison.spot, len(poison.causes)
        more = f", ... and {count - SHOWN_CAUSES} more" if count > SHOWN_CAUSES else ""
        causes = ", ".join(poison.causes[:SHOWN_CAUSES]) + more
        if spot is None or spot.doing == "start":
            return RunError(
                f"workers ended {count} times in a row without anything done between ({causes}); look at "
                "what they printed last, at the system's log and at memory, or use engine='inline'",
                step=step,
            )
        if spot.doing != "replica":
            return RunError(
                f"workers ended {count} times at step {spot.step} in {DOING[spot.doing]} ({causes}); look at the "
                "system's log and at memory, or use engine='inline' under a debugger",
                step=spot.step,
            )
        samples = self._samples(spot.step, spot.which)
        return RunError(
            f"replica {spot.which} of step {spot.step} ended {count} workers that computed it "
            f"({causes}); its samples are {spell_samples(samples)}. Look at these samples and at memory, or compute "
            "them with engine='inline' under a debugger",
            step=spot.step,
            replica=spot.which,
            samples=samples,
        )

    def _samples(self, step: int, replica: int) -> Sequence[int]:
        """Sample indices of a replica in a step; positions in the batch if the caller brought it."""
        if self.batch is None:
            return self._definition.plan.shares(step)[replica].tolist()
        return BatchShares(self._definition, self._framework.opened).brought(self.batch)[replica].samples.tolist()

    def _death(self, worker: int, end: End, place: Progress) -> Death:
        spot, since = self._spot(worker, place), self._counters.workers[worker].began
        if not end.ready:
            spot, since = Spot(-1, "start", worker), end.since
        elif spot is not None and spot.doing == "task":
            since = end.since
        return Death(end.why, end.cause, spot, max(0.0, end.when - max(since, end.since)))

    def _spot(self, worker: int, place: Progress) -> Spot | None:
        """What a worker that was ready did when it ended; None if it waited."""
        if self._counters.idle(worker):
            return None
        if self._counters.kind == TASK:
            return Spot(place.step, "task", worker)
        if place.phase in PARTS:
            return Spot(place.step, PARTS[place.phase], worker)
        done, block = self._counters.workers[worker].replicas, self._placement.blocks[worker]
        computing = place.phase == Phase.COMPUTING and done < len(block)
        return Spot(place.step, "replica", block[done]) if computing else None

    def _come_through(self, fresh: Mapping[int, End], places: Sequence[Progress]) -> set[Spot]:
        """What workers have done and live, or lived, after it."""
        found = {Spot(-1, "start", worker) for worker, end in fresh.items() if end.ready}
        for worker, (step, phase) in enumerate(places):
            if phase == Phase.COMPUTING:
                done = self._counters.workers[worker].replicas
                found |= {Spot(step, "replica", replica) for replica in self._placement.blocks[worker][:done]}
            elif phase > Phase.COMPUTING:
                found |= {Spot(step, "replica", replica) for replica in self._placement.blocks[worker]}
            found |= {Spot(step, part, worker) for passed, part in PARTS.items() if passed < phase}
            if self._tasks_done:
                found.add(Spot(step, "task", worker))
        self._tasks_done = False
        return found
