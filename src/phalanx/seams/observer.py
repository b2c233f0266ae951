"""The seam between a run and whatever looks on: a progress bar, callbacks, a log of events, snapshots, proof tools."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from phalanx.errors import PhalanxError
from phalanx.seams import Engine
from phalanx.seams.events import Incident, StepReport

NEVER: Final = sys.maxsize  # a horizon: this observer can do without the state until the run ends


class Observer:
    """What a run tells those who look on. Each method does nothing here; an observer defines those that it needs.

    A run without observers pays nothing for them. With several, each step is told to all of them in one order, and
    ``end`` in the reverse: who began first ends last. What an observer raises reaches the caller; those behind it are
    told of that step before anything else is done. An observer must not change the state. Nobody hears of single
    replicas yet: engines fold gradients piece by piece, so there is no whole one to show.

    Attributes
    ----------
    runs_user_code : bool
        Whether ``step`` calls the caller's own functions. They find generators, threads and modes as the caller has
        them, so the run leaves its environment for every step.
    """

    runs_user_code: ClassVar[bool] = False

    def begin(self, engine: Engine, run: Any = None) -> None:
        """Look on from here: ``engine`` has the state, ``engine.run_state`` what was done so far, ``run`` shows it."""

    def horizon(self, steps: int) -> int:
        """How many finished steps the run may have before this must see the state again; ``steps`` are finished.

        Asked before every step after which the caller does not look at the run. Workers run no further ahead than the
        nearest horizon of all observers.
        """
        return NEVER

    def happened(self, incident: Incident) -> None:
        """Hear of something that happened to a worker, before the report of the step that was done next."""

    def brought(self, batch: Any) -> None:
        """Hear of the batch that the caller brought for the step that was done next, before its report."""

    def failed(self, error: PhalanxError) -> None:
        """Hear that a step failed; the state is the one before it."""

    def advanced(self, report: StepReport) -> None:
        """Hear of a finished step before anything is evaluated after it."""

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Hear what was evaluated after a step that was due, by name, before ``step``."""

    def step(self, report: StepReport) -> None:
        """See a finished step, with the value of its evaluation where one was due."""

    def left(self) -> dict[str, Any]:
        """What a result gets from this: "averaged", parameters by name that are evaluated in place of the state's."""
        return {}

    def end(self) -> None:
        """Stop looking on, and give back what was opened in ``begin``; the engine still has the state."""
