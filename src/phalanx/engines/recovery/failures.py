"""Who fell, where and why: recorded until they are replaced, counted, and an error if it does not stop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.definition.batches import BatchShares
from phalanx.definition.fields import Definition
from phalanx.engines.processes.messages import End
from phalanx.errors import LostError, RunError, spell_samples
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


@dataclass
class Vacancy:
    """A place whose worker has ended: how, whether that was counted, and whether another was started in it since."""

    end: End
    counted: bool = False
    filled: bool = False


class Vacancies:
    """Who is dead: the only record of that, from a worker's end until another is ready in its place."""

    def __init__(self) -> None:
        self._places: dict[int, Vacancy] = {}

    @property
    def dead(self) -> dict[int, End]:
        """The workers that are to be replaced, and how they ended."""
        return {worker: vacancy.end for worker, vacancy in self._places.items() if not vacancy.filled}

    def fell(self, worker: int, end: End) -> None:
        """A worker has ended; what is told first counts, as who ends a worker tells why before that shows."""
        if worker not in self.dead:
            self._places[worker] = Vacancy(end)

    def fill(self, worker: int) -> None:
        """A worker was started in a place; it may end again before it is ready."""
        if worker in self._places:
            self._places[worker].filled = True

    def count(self) -> dict[int, End]:
        """The deaths that were not counted yet; from here on they are."""
        fresh = {worker: vacancy for worker, vacancy in self._places.items() if not vacancy.counted}
        for vacancy in fresh.values():
            vacancy.counted = True
        return {worker: vacancy.end for worker, vacancy in fresh.items()}

    def replaced(self) -> list[int]:
        """The places that are taken again, by workers that are ready; they are no vacancies from here on."""
        taken = sorted(worker for worker, vacancy in self._places.items() if vacancy.filled)
        for worker in taken:
            del self._places[worker]
        return taken


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
    vacancies : Vacancies
        Who is dead.
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
        self.vacancies = Vacancies()
        self.batch: Any = None
        self._definition = definition
        self._framework = framework
        self._placement = placement
        self.portable = framework.sharing.portable
        self._counters = counters
        self._incidents = run_state.incidents
        self._tally = Tally()
        self._attempts = 0
        self._tasks_done = False  # since the latest death

    @property
    def dead(self) -> dict[int, End]:
        """The workers that are to be replaced, and how they ended."""
        return self.vacancies.dead

    def count(self, started: int, lived: float) -> None:
        """Note and count the deaths that were not yet.

        Parameters
        ----------
        started : int
            How many workers were ready so far.
        lived : float
            Seconds that all workers together have lived so far.

        Raises
        ------
        RunError
            What ends them is what they do; or nobody can take their places.
        """
        fresh = self.vacancies.count()
        progress = self._counters.progress()
        for worker, end in fresh.items():
            self.note("death", worker, progress[worker].step, end.why)
        if not self._placement.whole:
            raise self.irreplaceable()
        fresh = {worker: end for worker, end in fresh.items() if end.cause is not Cause.CALLER}
        if not fresh:
            return
        deaths = {worker: self._death(worker, end, progress[worker]) for worker, end in fresh.items()}
        step, done = max(progress).step, self._counters.computed + started
        poison = self._tally.count(deaths, self._come_through(fresh, progress), step, done, self._attempts, lived)
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

    def started(self, step: int) -> None:
        """Workers were started at ``step``; some may have ended again."""
        for worker in self.vacancies.replaced():
            self.note("replaced", worker, step)

    def irreplaceable(self) -> LostError:
        """Why a run over several hosts ends."""
        worker, end = min(self.dead.items())
        return LostError(
            f"worker {worker} of this host {end.why}, and in a run over several hosts no worker is replaced; start all "
            "hosts again: with a run_dir the run goes on from its newest snapshot, to the same digest"
        )

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
            return self._definition.plan.shares(self._definition.rounds.at(step).step)[replica].tolist()
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
