"""Who fell, where and why: counted, noted, and an error if it does not stop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phalanx.contracts import Course, Framework
from phalanx.deal import Dealer
from phalanx.definition import Definition
from phalanx.engines.control import COUNT, KIND, TASK, Control
from phalanx.engines.told import BROKEN_OFF, irreplaceable
from phalanx.errors import RunError, spell_samples
from phalanx.events import Incident
from phalanx.plan.placement import Placement
from phalanx.recovery.lifecycle import Place, Point, Poison, Tally

IN_TASK = -100


class Ledger:
    """The losses of one run.

    Parameters
    ----------
    definition : Definition
    framework : Framework
    placement : Placement
    control : Control
    course : Course
        Where incidents are noted.

    Attributes
    ----------
    batch : Any
        That the caller brought for the step that is being done; None for planned ones.
    portable : bool
        Whether the whole state is known. Otherwise the first worker keeps some to itself, and cannot be replaced.
    """

    def __init__(
        self, definition: Definition, framework: Framework, placement: Placement, control: Control, course: Course
    ) -> None:
        self.batch: Any = None
        self._definition = definition
        self._framework = framework
        self._placement = placement
        self.portable = framework.sharing.portable
        self._control = control
        self._incidents = course.incidents
        self._tally = Tally()
        self._attempts = 0
        self._fallen: set[int] = set()  # and not replaced yet

    def fell(self, deaths: Mapping[int, str], started: int) -> None:
        """Note and count the deaths that were not yet; ``started``: how many workers were, so far.

        Raises
        ------
        RunError
            They do not stop: at one replica of one step, or one after another with nothing done between; or nobody
            can take their places.
        """
        fresh = {worker: why for worker, why in deaths.items() if worker not in self._fallen}
        if not fresh:
            return
        self._fallen.update(fresh)
        places = self._control.places()
        for worker, why in fresh.items():
            self.note("death", worker, places[worker].step, why)
        if not self._placement.whole:
            raise irreplaceable(fresh)
        fresh = {worker: why for worker, why in fresh.items() if why != BROKEN_OFF}
        if not fresh:
            return
        doing = {worker: self._doing(worker, places[worker]) for worker in fresh}
        found = {worker: place for worker, place in doing.items() if place is not None}
        poison = self._tally.count(fresh, found, self._control.finished() + started, self._attempts)
        if poison is not None:
            raise self._error(poison, max(places).step)

    def starting(self, workers: Iterable[int]) -> list[int]:
        """Workers are about to be started, and may fall again; those of them that take another's place."""
        self._attempts += 1
        replacements = sorted(self._fallen & set(workers))
        self._fallen.difference_update(replacements)
        return replacements

    def note(self, kind: str, worker: int, step: int, why: str = "") -> None:
        """Note an incident."""
        self._incidents.append(Incident(time.perf_counter(), kind, worker, step, why))

    def _error(self, poison: Poison, step: int) -> RunError:
        causes = ", ".join(poison.causes)
        if poison.replica is None:
            return RunError(
                f"workers ended {len(poison.causes)} times in a row without anything done between ({causes}); look at "
                "what they printed last, at the system's log and at memory, or use engine='inline'",
                step=step,
            )
        if poison.replica < 0:
            where = "a task between steps" if poison.replica == IN_TASK else "its fold or update"
            return RunError(
                f"workers ended {len(poison.causes)} times at step {poison.step} in {where} ({causes}); look at the "
                "system's log and at memory, or use engine='inline' under a debugger",
                step=poison.step,
            )
        samples = self._samples(poison.step, poison.replica)
        return RunError(
            f"replica {poison.replica} of step {poison.step} ended {len(poison.causes)} workers that computed it "
            f"({causes}); its samples are {spell_samples(samples)}. Look at these samples and at memory, or compute "
            "them with engine='inline' under a debugger",
            step=poison.step,
            replica=poison.replica,
            samples=samples,
        )

    def _samples(self, step: int, replica: int) -> Sequence[int]:
        """Sample indices of a replica in a step; positions in the batch if the caller brought it."""
        if self.batch is None:
            return self._definition.plan.shares(step)[replica].tolist()
        return Dealer(self._definition, self._framework).brought(self.batch)[replica].samples.tolist()

    def _doing(self, worker: int, place: Place) -> tuple[int, int] | None:
        """(step, replica) that a worker was computing, (step, negative number) for what else may end it."""
        if self._control.words[KIND] == TASK:
            return place.step, IN_TASK
        if place.point in (Point.FOLDING, Point.UPDATING):
            return place.step, -1 - place.point
        done = self._control.words[self._control.place(worker, COUNT)]
        block = self._placement.blocks[worker]
        return (place.step, block[done]) if place.point == Point.COMPUTING and done < len(block) else None
