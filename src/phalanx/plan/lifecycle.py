"""Where a run stands when workers have ended, and how it goes on: a pure table over (step, phase) of every worker.

A step has named points. Weights change only between ``UPDATING`` and ``UPDATED``, and no worker comes there before all
have ``FOLDED``; none begins the next step before all have ``UPDATED``. So workers are never more than a step apart, and
where each was last seen tells whether the state is that before a step, that after it, or torn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    """How far a worker is in a step, in order."""

    SAVING = 0  # copies what it owns into the snapshot, if one is due
    COMPUTING = 1  # gradients of its replicas
    COMPUTED = 2  # waits for the others'
    FOLDING = 3  # adds what it owns
    FOLDED = 4  # waits for the others' norms; the state is untouched so far
    UPDATING = 5  # writes weights, optimizer state, buffers
    UPDATED = 6  # waits for the others


class Progress(NamedTuple):
    """Where a worker was last seen. Places are ordered as they are passed."""

    step: int
    phase: Phase


class Verdict(NamedTuple):
    """Where a run goes on.

    Attributes
    ----------
    step : int
        The next step to be done; the state is, or will be, the one before it.
    torn : bool
        Whether the state is of no step: it has to be taken back from a snapshot.
    """

    step: int
    torn: bool


def joinable(places: Sequence[Progress], fallen: Collection[int]) -> bool:
    """Whether replacements may step in while the others wait: all that fell were computing, in the same step.

    Then nobody can pass the phase where gradients are exchanged, so nothing moves until they are there.
    """
    there = {places[worker] for worker in fallen}
    return len({place.step for place in there}) == 1 and all(place.phase <= Phase.COMPUTING for place in there)


def judge(places: Sequence[Progress]) -> Verdict:
    """How a run goes on from where every worker stood when all had stopped."""
    furthest = max(places)
    if furthest.phase < Phase.UPDATING:  # all others are in this step too, or have done all of the one before
        return Verdict(furthest.step, torn=False)
    if min(places) < Progress(furthest.step, Phase.UPDATED):
        return Verdict(furthest.step, torn=True)
    return Verdict(furthest.step + 1, torn=False)


def newest_whole(due: int, kept: int, torn: int) -> int:
    """The snapshot to go back to when the update of step ``torn`` broke off.

    One that was due by then is whole, as all workers have met since they saved. One announced for later is not begun.
    """
    return due if kept < due <= torn else kept
