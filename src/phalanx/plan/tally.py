"""Whether what ends workers is what they compute: a pure count of deaths, which knows no process and no clock.

Two things end workers. Somebody outside (another process's signal, the kernel that wants memory) strikes whoever is
there; going on is right, however often it happens. A poison (a sample, an update, a model factory) strikes whoever
computes it; going on is useless. An exit, a fault or a hang is of the worker's own making, so three at one spot are
enough. A SIGKILL may be either, so it is asked how likely somebody outside would have hit just this spot so often:
that depends on how much of all workers' time was spent there, and on whether the deaths come after equal times.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

OWN = 3  # deaths of a worker's own making, at one spot, that end a run
CHANCE = 1e-7  # that a storm is taken for a poison, at one spot
ALIKE = 0.3  # times that differ by less than this share are the same: more would be made of a coincidence
FUTILE = 300  # occasions in a row, with no replica computed and no worker started, that end a run
PATIENT, LONGEST_PAUSE = 8, 0.25  # futile occasions before the next start waits a little; seconds


class Cause(Enum):
    """Who may have ended a worker."""

    ITSELF = "itself"  # it exited, crashed or hung
    ANYBODY = "anybody"  # a signal that another process may have sent
    STARTER = "starter"  # the process that started it ended
    CALLER = "caller"  # the run itself, after Ctrl-C


class Spot(NamedTuple):
    """What a worker was doing: ``doing`` is "replica" (number ``which``), or "start", "fold", "update" or "task"."""

    step: int
    doing: str
    which: int


class Death(NamedTuple):
    """The end of a worker.

    Attributes
    ----------
    why : str
    cause : Cause
    spot : Spot or None
        What it was doing; None if it waited, so that nothing it did can have ended it.
    seconds : float
        How long it had been at it.
    """

    why: str
    cause: Cause
    spot: Spot | None
    seconds: float


class Poison(NamedTuple):
    """Why a run is given up: what ended workers at one spot; None for anywhere, with nothing done between."""

    spot: Spot | None
    causes: tuple[str, ...]


@dataclass
class Suspicion:
    """Deaths at one spot. The first only says which spot is suspected; the later ones are the evidence.

    Attributes
    ----------
    lived : float
        Seconds that all workers together had lived at the first death.
    kills : int
        How many workers anybody may have ended up to that one.
    """

    lived: float
    kills: int
    occasion: int = -1
    causes: list[str] = field(default_factory=list[str])
    own: int = 0
    seconds: list[float] = field(default_factory=list[float])

    def chance(self, lived: float, kills: int) -> float:
        """How likely a storm would do at least this: hit this spot so often, each time after such times.

        A storm hits a spot as often as its share of all workers' time says, and comes at any time in it: that ``n``
        times, spread evenly over any span from 0, differ by no more than a factor of r has the chance
        ``(1 - 1 / r) ** (n - 1)``.
        """
        hits = len(self.seconds) - 1
        if hits < 1:
            return 1.0
        later = self.seconds[1:]
        share = min(1.0, sum(later) / max(lived - self.lived, 1e-9))
        trials = max(kills - self.kills, hits)
        spread = max(ALIKE, 1 - min(later) / max(1e-9, *later))
        return at_least(hits, trials, share) * spread ** (hits - 1)


@dataclass
class Tally:
    """Counts deaths, so that what ends every worker ends the run, and what ends some does not."""

    _at: dict[Spot, Suspicion] = field(default_factory=dict[Spot, Suspicion])
    _kills: int = 0
    _futile: list[str] = field(default_factory=list[str])
    _done: int = -1
    _occasion: int = -1

    def count(
        self, deaths: Mapping[int, Death], finished: Collection[Spot], step: int, done: int, occasion: int, lived: float
    ) -> Poison | None:
        """Count deaths; those between two attempts to replace workers are one occasion.

        Parameters
        ----------
        deaths : mapping
            Of each worker that ended.
        finished : collection of Spot
            What workers came through alive: that is no poison.
        step : int
            The furthest that any worker has come to; what lies before it was come through.
        done : int
            How many replicas were finished and workers started so far, anywhere.
        occasion : int
            How often workers were about to be started so far.
        lived : float
            Seconds that all workers together have lived so far.
        """
        for spot in [spot for spot in self._at if spot in finished or 0 <= spot.step < step]:
            del self._at[spot]
        if done != self._done:
            self._done, self._futile = done, []
        if occasion != self._occasion:
            self._occasion = occasion
            self._futile.append(min(death.why for death in deaths.values()))
        self._kills += sum(death.cause is Cause.ANYBODY for death in deaths.values())
        for death in deaths.values():
            spot = None if death.cause is Cause.STARTER else death.spot
            if spot is not None and self._convicted(spot, death, lived):
                return Poison(spot, tuple(self._at[spot].causes))
        return Poison(None, tuple(self._futile)) if len(self._futile) >= FUTILE else None

    @property
    def pause(self) -> float:
        """Seconds to wait before workers are started again: nothing, unless that has been futile for a while."""
        futile = len(self._futile) - PATIENT
        return min(LONGEST_PAUSE, 0.02 * futile) if futile > 0 else 0.0

    def _convicted(self, spot: Spot, death: Death, lived: float) -> bool:
        """Count a death at a spot, once an occasion; whether the spot is to blame."""
        found = self._at.get(spot)
        if found is None:
            found = self._at[spot] = Suspicion(lived, self._kills)
        if found.occasion != self._occasion:
            found.occasion = self._occasion
            found.causes.append(death.why)
            if death.cause is Cause.ITSELF:
                found.own += 1
            else:
                found.seconds.append(death.seconds)
        return found.own >= OWN or found.chance(lived, self._kills) < CHANCE


def at_least(hits: int, trials: int, share: float) -> float:
    """How likely ``hits`` or more of ``trials`` fall where ``share`` of them is expected; 1 if that is no surprise."""
    if hits <= share * trials:
        return 1.0
    odds, rest = math.log(share) if share > 0 else -math.inf, math.log1p(-share)
    ways = math.lgamma(trials + 1)
    return math.fsum(
        math.exp(
            ways - math.lgamma(count + 1) - math.lgamma(trials - count + 1) + count * odds + (trials - count) * rest
        )
        for count in range(hits, trials + 1)
    )
