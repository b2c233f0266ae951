"""Decides what deaths of workers mean: when they end a run, and else how it goes on. A pure count and a pure table.

A step has named stages. Weights change only between ``UPDATING`` and ``UPDATED``, and no worker comes there before all
have ``FOLDED``; none begins the next step before all have ``UPDATED``. So workers are never more than a step apart, and
where each was last seen tells whether the state is that before a step, that after it, or torn.

``decide`` looks up what to do next; ``engines.recovery`` does it, and asks again until there is nothing left to do.
Nothing here waits or knows a process, so every interleaving of workers, barriers and deaths can be tried in a test.

A run goes on as long as it makes progress. A death of a worker's own making (an exit, a fault, a hang) happens again at
the same place: three in a row there end the run. A signal that any process may have sent (SIGKILL, SIGTERM, the kernel
that needs memory) hits whichever worker is there, so it takes many more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Final, NamedTuple

OWN = 3  # deaths of a worker's own making, in a row at one place, that end a run
MOST = 10  # deaths by a signal from outside that end a run, by default


class Stage(IntEnum):
    """How far a worker is in a step, in order."""

    SAVING = 0  # copies what it owns into the snapshot, if one is due
    COMPUTING = 1  # gradients of its replicas
    COMPUTED = 2  # waits for the others'
    FOLDING = 3  # adds what it owns
    FOLDED = 4  # waits for the others' norms; the state is untouched so far
    UPDATING = 5  # writes weights, optimizer state, buffers
    UPDATED = 6  # waits for the others


class Progress(NamedTuple):
    """Where a worker was last seen. They are ordered as a worker passes them."""

    step: int
    stage: Stage


class Verdict(NamedTuple):
    """Where a run goes on.

    Attributes
    ----------
    step : int
        The next step to be done; the state is, or will be, the one before it.
    torn : bool
        Whether the state is that of no step, and has to be restored from a snapshot.
    """

    step: int
    torn: bool


def joinable(places: Sequence[Progress], fallen: Collection[int]) -> bool:
    """Whether replacements may start while the others wait: all workers that died were computing, in one step.

    Then no worker can pass the stage where gradients are exchanged before the replacements are there.
    """
    there = {places[worker] for worker in fallen}
    return len({seen.step for seen in there}) == 1 and all(seen.stage <= Stage.COMPUTING for seen in there)


def judge(places: Sequence[Progress]) -> Verdict:
    """How a run goes on, given where every worker was when all had stopped."""
    furthest = max(places)
    if furthest.stage < Stage.UPDATING:  # all others are in this step too, or have done all of the one before
        return Verdict(furthest.step, torn=False)
    if min(places) < Progress(furthest.step, Stage.UPDATED):
        return Verdict(furthest.step, torn=True)
    return Verdict(furthest.step + 1, torn=False)


def newest_whole(due: int, kept: int, torn: int) -> int:
    """The snapshot to go back to when the update of step ``torn`` broke off.

    One that was due by then is whole, as all workers have met since they saved. One announced for later is not begun.
    """
    # Neither word is enough. `kept` may be late: the first worker writes it in `Worker._announce`, and by then others
    # may update already. `due` may be early: it is written a step ahead. There is one place for snapshots in memory.
    # So once all have saved what is due, the kept one is overwritten, and going back to `kept` would take the newer
    # state for that of the older step. `torn` has to be a step that somebody began. Where all copies are gone, the
    # verdict is one step further. `decide` gives the furthest step that was begun instead. Not covered: all copies
    # die while they save. The one place is half written then, and `decide` says LOSE.
    return due if kept < due <= torn else kept


def next_snapshot(step: int, due: int, interval: float, *, eager: int, held: bool) -> int:
    """Before which step all workers save next, as the first worker announces it in ``step``, before the last barrier.

    Parameters
    ----------
    due : int
        What was announced before.
    interval : float
        Steps from one snapshot to the next.
    eager : int
        Each step before this one is followed by a snapshot.
    held : bool
        Whether somebody reads the snapshot, so that it has to stay.
    """
    return step + 1 if not held and (step < eager or step + 1 - due >= interval) else due


class Fallen(Enum):
    """Which workers have died, as far as that matters."""

    NOBODY = auto()
    ANYBODY = auto()  # others can take the places: the whole state lies in the arena, or is known
    OTHERS = auto()  # not the first worker, which keeps a part of the state to itself
    KEEPER = auto()  # the first worker, with the part that only it has


class Standing(Enum):
    """How far the living workers are, and what there is of the state."""

    WAITING = auto()  # they wait, or will, at the barrier before gradients are exchanged, for those that died
    AT_WORK = auto()  # they work on what was granted
    GOING_BACK = auto()  # they are idle; going back to a snapshot was broken off
    RESUMING = auto()  # they are idle, and not all have been told where to go on
    TORN = auto()  # they are idle; an update broke off, so the state is that of no step
    BEHIND = auto()  # they are idle; steps that had been finished were lost with the state after them
    WHOLE = auto()  # they are idle, with the state after the last finished step


class Action(Enum):
    """What to do next."""

    GO_ON = auto()  # nothing is left to do
    STOP = auto()  # have the living leave what was granted, and wait until they are idle
    JOIN = auto()  # start replacements of those that died, in the step that the living are in
    RESUME = auto()  # start replacements of those that died, and tell all at which step to go on
    TAKE_BACK = auto()  # RESUME with the state of the newest snapshot, or with the one that the run began with
    GO_BACK = auto()  # finish TAKE_BACK where it was broken off
    DO_AGAIN = auto()  # do a lost step again
    LOSE = auto()  # end the run: a part of the state is lost


class Repair(NamedTuple):
    """What was begun and is not finished: RESUME at a step, or GO_BACK to the state of a step (negative: the first)."""

    action: Action
    step: int


class Seen(NamedTuple):
    """What is seen of a worker.

    Attributes
    ----------
    progress : Progress
        Where it is, or was when it ended.
    fallen : bool
        Whether it has ended and is to be replaced.
    at_work : bool
        Whether it works, or worked when it ended, on what was granted.
    """

    progress: Progress
    fallen: bool
    at_work: bool


class Situation(NamedTuple):
    """All that a decision depends on.

    Attributes
    ----------
    workers : sequence of Seen
    granted : range
        The steps that workers may do now; empty if they are to leave, or do something else.
    done : int
        How many steps are finished.
    due, kept : int
        The newest snapshot that was announced, and the newest that is known to be whole.
    repair : Repair or None
    portable : bool
        Whether no worker keeps a part of the state to itself.
    copies : bool
        Whether each worker has the whole state.
    """

    workers: Sequence[Seen]
    granted: range
    done: int
    due: int
    kept: int
    repair: Repair | None
    portable: bool
    copies: bool = False

    @property
    def fallen(self) -> list[int]:
        """Those that are to be replaced, in order."""
        return [number for number, worker in enumerate(self.workers) if worker.fallen]

    @property
    def progress(self) -> list[Progress]:
        """Where every worker is, or was when it ended."""
        return [worker.progress for worker in self.workers]

    @property
    def lost(self) -> bool:
        """Whether the state is gone with all workers: each had a copy, and nothing else has one."""
        return self.copies and all(worker.fallen for worker in self.workers)

    @property
    def saving(self) -> bool:
        """Whether the newest snapshot may be one that was being taken when the last worker ended."""
        return self.kept < self.due and min(self.progress) < Progress(self.due, Stage.COMPUTING) <= Progress(
            max(self.progress).step, Stage.COMPUTING
        )


class Decision(NamedTuple):
    """What to do next, and at which step; ``back_to``: the snapshot to go back to, negative for the run's beginning."""

    action: Action
    step: int
    back_to: int = -1


A, F, S = Action, Fallen, Standing
# An entry is one next action. The caller does it and asks again, so a repair is a walk through this table. A lost
# step with a dead worker is RESUME first (ANYBODY, BEHIND), and DO_AGAIN once all are alive. STOP comes before all
# repairs, as it is known only of idle workers how far they came. OTHERS and KEEPER lose a torn state: the snapshot in
# memory lacks what the first worker keeps to itself. Nobody comes to (NOBODY, WAITING). It has an entry because each
# row is filled in column by column. A test plants four wrong entries, one at a time: each leads to a wrong state, or
# never to an end. Not covered: a death over several hosts. `FailureLog.check` raises there before an entry is acted
# on.
TABLE: Final[Mapping[Fallen, Mapping[Standing, Action]]] = {
    fallen: dict(zip(Standing, actions, strict=True))
    for fallen, actions in {
        #             WAITING AT_WORK GOING_BACK RESUMING  TORN         BEHIND      WHOLE
        F.NOBODY:  (A.STOP, A.STOP, A.GO_BACK, A.RESUME, A.TAKE_BACK, A.DO_AGAIN, A.GO_ON),
        F.ANYBODY: (A.JOIN, A.STOP, A.GO_BACK, A.RESUME, A.TAKE_BACK, A.RESUME, A.RESUME),
        F.OTHERS:  (A.JOIN, A.STOP, A.LOSE, A.RESUME, A.LOSE, A.RESUME, A.RESUME),
        F.KEEPER:  (A.STOP, A.STOP, A.LOSE, A.LOSE, A.LOSE, A.LOSE, A.LOSE),
    }.items()
}  # fmt: skip


def decide(run: Situation) -> Decision:
    """What to do next; asked again after that until it is GO_ON."""
    verdict = judged(run)
    action = TABLE[who_fell(run)][stands(run, verdict)]
    if action is Action.JOIN:
        return Decision(action, run.progress[run.fallen[0]].step)
    if action is Action.TAKE_BACK and run.lost and run.saving:
        return Decision(Action.LOSE, verdict.step)
    if action is Action.TAKE_BACK:
        begun = max(run.progress).step  # of copies that are all gone, the verdict is a step that nobody began
        return Decision(action, verdict.step, newest_whole(run.due, run.kept, begun))
    if action is Action.GO_BACK and run.repair is not None:
        return Decision(action, verdict.step, run.repair.step)
    return Decision(action, verdict.step)


def judged(run: Situation) -> Verdict:
    """How the run goes on. Where each worker has the whole state, what survivors have counts: all have the same."""
    if run.copies and not run.lost:
        return judge([worker.progress for worker in run.workers if not worker.fallen])
    return judge(run.progress)._replace(torn=True) if run.lost else judge(run.progress)


def who_fell(run: Situation) -> Fallen:
    """The row of the table."""
    if not run.fallen:
        return Fallen.NOBODY
    if run.portable or (run.copies and not run.lost):
        return Fallen.ANYBODY
    return Fallen.KEEPER if 0 in run.fallen else Fallen.OTHERS


def stands(run: Situation, verdict: Verdict) -> Standing:
    """The column of the table."""
    fallen, progress = run.fallen, run.progress
    broke_off = bool(fallen) and all(run.workers[worker].at_work for worker in fallen)
    if broke_off and joinable(progress, fallen) and progress[fallen[0]].step in run.granted:
        return Standing.WAITING
    if any(worker.at_work and not worker.fallen for worker in run.workers):
        return Standing.AT_WORK
    # An unfinished repair decides before the verdict does. In the middle of one, some workers stand where the
    # snapshot was taken, and others where the update broke off. `judge` looks at the furthest of them, and may call
    # that mixture whole. So `Supervisor` notes a repair before it touches anything, and drops the note when all
    # workers have been told. Doing a repair twice is harmless. The mixture was taken for a state once, in
    # `take_home`, which did not look at the note. RESUME is the exception if all copies are gone: nobody is left who
    # could hand the state over. Not covered: the end of the caller's process. The note lives there alone, and workers
    # end with it.
    if run.repair is not None and not (run.lost and run.repair.action is Action.RESUME):
        return Standing.GOING_BACK if run.repair.action is Action.GO_BACK else Standing.RESUMING
    if verdict.torn and (fallen or run.portable):  # if none died, an optimizer raised, and only torch's own can go back
        return Standing.TORN
    # Done by some who went on from its last barrier, while others were made to leave there: not all know that.
    return S.BEHIND if verdict.step < run.done else S.RESUMING if verdict.step > run.done else S.WHOLE


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
        Deaths by a signal from outside that end a run.
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
