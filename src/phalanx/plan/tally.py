"""When deaths of workers end a run: a pure count, which knows no process and no clock.

Going on is right as long as something gets done. What a worker does to itself (an exit, a fault, a hang) it does again
at the same place: three times there, and nothing else between, are enough. A signal that anybody may have sent
(SIGKILL, SIGTERM, the kernel that wants memory) strikes whoever is there, so many more are needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

OWN = 3  # deaths of a worker's own making, in a row at one place, that end a run
MOST = 10  # deaths by a signal of anybody's, if the caller does not say how many


class Cause(Enum):
    """Who may have ended a worker."""

    ITSELF = auto()  # it exited, crashed or hung
    ANYBODY = auto()  # a signal that another process may have sent, to it or to the process that started it
    CALLER = auto()  # the run itself, after Ctrl-C


class Place(NamedTuple):
    """Where a worker ended: a worker that ends at the same place as the one before it did not get further.

    Attributes
    ----------
    step : int
    doing : str
        "start", "save", "compute", "fold", "update", "wait" or "task".
    done : int
        How many of its replicas it had computed in this step; of a task, how many tasks were done in all.
    """

    step: int
    doing: str
    done: int = 0


@dataclass
class Streak:
    """Deaths in a row at one place."""

    place: Place
    causes: list[str] = field(default_factory=list[str])
    own: int = 0


class Tally:
    """Counts, for each worker, deaths in a row at one place.

    Parameters
    ----------
    most : int
        Deaths by a signal of anybody's that end a run.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._latest: dict[int, Streak] = {}

    def count(self, worker: int, place: Place, cause: Cause, why: str) -> Streak | None:
        """Count a death; the streak that it is part of, if that ends the run."""
        streak = self._latest.get(worker)
        if streak is None or streak.place != place:
            streak = self._latest[worker] = Streak(place)
        streak.causes.append(why)
        streak.own += cause is Cause.ITSELF
        others = len(streak.causes) - streak.own
        return streak if streak.own >= OWN or others >= self._most else None
