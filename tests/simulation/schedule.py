"""Who acts when: simulated processes that take turns, and what befalls them, all from one seed.

A process has one or more actors. Each is a thread, but only one of all runs at a time: it goes on until it waits for
something, and there the schedule decides who is next. So the code that is tested is the real one, and whatever happens
is a list of decisions. Without a decision, actors take turns. A ``Script`` has the decisions that differ from that, and
the faults, by the number of the action where each comes. The same script leads to the same run.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

MOST_ACTIONS = 200_000
Script = dict[int, tuple[Any, ...]]  # at an action: ("turn", how many are passed over), or a fault and what it strikes


class Ended(BaseException):
    """Raised in an actor whose process has been killed. It may do nothing more that others could see."""


class Stuck(AssertionError):
    """Nobody can go on, or all go on for ever."""


class Actor:
    """A thread of a simulated process."""

    def __init__(self, process: Any, name: str, body: Callable[[], object]) -> None:
        self.process, self.name, self.body = process, name, body
        self.turn, self.gone = threading.Semaphore(0), threading.Semaphore(0)
        self.ready: Callable[[], object] | None = None
        self.until: float | None = 0.0
        self.over = self.unwound = False


class Schedule:
    """Runs actors one at a time.

    Parameters
    ----------
    script : Script
        Decisions to replay.
    seed : int, optional
        With one, further decisions are drawn from it, and added to ``script``.
    draw : callable, optional
        ``draw(random, schedule)``: a fault to be done now, or None. Only with a seed.
    strike : callable
        ``strike(fault, *what)`` does a fault of the script.
    restless : float
        How probable it is that somebody else's turn comes first, with a seed.

    Attributes
    ----------
    now : float
        Simulated seconds.
    actions : int
        How many there were.
    struck : list
        Faults that were done: a script whose faults miss proves nothing.
    """

    def __init__(
        self, script: Script, strike: Callable[..., bool], seed: int | None = None,
        draw: Callable[[random.Random, Schedule], tuple[Any, ...] | None] | None = None, restless: float = 0.1,
    ) -> None:  # fmt: skip
        self.script, self.now, self.actions = script, 0.0, 0
        self.struck: list[tuple[int, tuple[Any, ...]]] = []
        self._strike, self._draw, self._restless = strike, draw, restless
        self._random = None if seed is None else random.Random(seed)
        self._actors: list[Actor] = []
        self._current: Actor | None = None
        self._dead: set[Any] = set()
        self._frozen: set[Any] = set()
        self._moments: list[float] = []
        self._home = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._last = 0

    def start(self, process: Any, name: str, body: Callable[[], object]) -> Actor:
        """Begin an actor of a process; it runs when its turn comes. A process that was killed is never begun again."""
        actor = Actor(process, name, body)
        self._actors.append(actor)
        threading.Thread(target=self._live, args=(actor,), daemon=True).start()
        return actor

    def run(self) -> None:
        """Run until all actors have ended.

        Raises
        ------
        Stuck
            They do not end.
        """
        self._pass_on(None)
        self._home.acquire()
        for actor in [each for each in self._actors if not each.over]:  # after an error
            self._dead.add(actor.process)
            self._unwind(actor)
        if self._error is not None:
            raise self._error

    def wait(self, ready: Callable[[], object] | None = None, seconds: float | None = None) -> bool:
        """By an actor: let others act until ``ready()``, or until some time has passed; returns whether it is ready.

        Without ``ready``: until the time has passed. With neither: until the next turn.
        """
        actor = self._current
        assert actor is not None
        self.check()
        actor.ready = ready
        actor.until = self.now if ready is None and seconds is None else None if seconds is None else self.now + seconds
        self._befall()
        self.check()  # it may have struck this one
        if self._pass_on(actor):
            actor.turn.acquire()
        self._current, actor.ready = actor, None  # what it holds ends with it
        self.check()
        return bool(ready is not None and ready())

    def act(self) -> None:
        """By an actor: do something that others may see. It may be struck before, but keeps its turn."""
        self.check()
        self._befall()
        self.check()

    def expect(self, moment: float) -> None:
        """Something happens by itself at this moment, so somebody may be ready then."""
        heapq.heappush(self._moments, moment)

    def pause(self) -> None:
        """By an actor: others may act here. Without a decision it goes on itself."""
        self.check()
        self.actions += 1
        if self.actions not in self.script and not self._drawn():
            if self.actions > MOST_ACTIONS:
                raise Stuck(f"no end after {self.actions} actions")
            return
        actor = self._current
        assert actor is not None
        actor.ready, actor.until = None, self.now
        self._strike_planned()
        self.check()
        if self._pass_on(actor, stay=True):
            actor.turn.acquire()
        self._current = actor
        self.check()

    def check(self) -> None:
        """Raise in an actor whose process is dead."""
        if self._current is not None and self._current.process in self._dead:
            raise Ended

    @property
    def process(self) -> Any:
        """Whose actor is acting."""
        assert self._current is not None
        return self._current.process

    def lives(self, process: Any) -> bool:
        """Whether a process has an actor that has not ended."""
        return process not in self._dead and any(each.process == process and not each.over for each in self._actors)

    def kill(self, process: Any) -> None:
        """End a process at once. What it holds is not tidied up."""
        self._dead.add(process)
        current = self._current
        for actor in [each for each in self._actors if each.process == process and not each.over]:
            if actor is not current:  # that one ends where it asks next
                self._unwind(actor)
        self._current = current

    def freeze(self, process: Any, frozen: bool = True) -> None:
        """Stop a process, or let it go on."""
        (self._frozen.add if frozen else self._frozen.discard)(process)

    def frozen(self, process: Any) -> bool:
        """Whether a process is stopped."""
        return process in self._frozen

    def _live(self, actor: Actor) -> None:
        actor.turn.acquire()
        self._current = actor
        try:
            self.check()
            actor.body()
        except Ended:
            pass
        except BaseException as error:
            self._error = self._error or error
        actor.over = True
        if actor.unwound:
            actor.gone.release()
        else:
            self._pass_on(actor)

    def _unwind(self, actor: Actor) -> None:
        """Have a dead actor leave its code."""
        actor.unwound = True
        actor.turn.release()
        actor.gone.acquire()

    def _pass_on(self, giver: Actor | None, *, stay: bool = False) -> bool:
        """Let the next one act, or the run end; returns whether ``giver`` has to wait. ``stay``: it comes first."""
        chosen = None
        with contextlib.suppress(Stuck):
            chosen = self._chosen(stay) if self._error is None else None
        if chosen is None:
            self._home.release()
        elif chosen is not giver:
            chosen.turn.release()
        return chosen is not giver

    def _befall(self) -> None:
        """Do the faults that come now."""
        self.actions += 1
        if self.actions not in self.script:
            self._drawn()
        self._strike_planned()

    def _drawn(self) -> bool:
        """Whether a decision was drawn for this action; it is in the script then."""
        draw = self._random
        if draw is None:
            return False
        planned = None if self._draw is None else self._draw(draw, self)
        if planned is None and draw.random() < self._restless:
            planned = ("turn", draw.randrange(1, 1 + len(self._actors)))
        if planned is not None:
            self.script[self.actions] = planned
        return planned is not None

    def _strike_planned(self) -> None:
        planned = self.script.get(self.actions)
        if planned is not None and planned[0] != "turn" and self._strike(*planned):
            self.struck.append((self.actions, planned))

    def _chosen(self, stay: bool) -> Actor | None:
        """Who acts next; None if all have ended."""
        try:
            able = self._able(stay)
        except Stuck as error:
            self._error = error
            raise
        if not able:
            return None
        planned = self.script.get(self.actions)
        passed = planned[1] if planned is not None and planned[0] == "turn" else 0
        chosen = able[passed % len(able)]
        self._last = self._actors.index(chosen)
        return chosen

    def _able(self, stay: bool) -> list[Actor]:
        """Who can act, the one whose turn it is first; time passes until there is one."""
        if self.actions > MOST_ACTIONS:
            raise Stuck(f"no end after {self.actions} actions")
        while True:
            here = [each for each in self._actors if not each.over and each.process not in self._dead]
            moving = [each for each in here if each.process not in self._frozen]
            able = [each for each in moving if self._may(each)]
            if able:
                turn = self._last - stay
                return sorted(able, key=lambda each: (self._actors.index(each) <= turn, self._actors.index(each)))
            if not here:
                return []
            while self._moments and self._moments[0] <= self.now:
                heapq.heappop(self._moments)
            times = [each.until for each in moving if each.until is not None] + self._moments[:1]
            if not times:
                raise Stuck(f"nobody can go on: {', '.join(f'{each.process} {each.name}' for each in here)}")
            self.now = max(self.now, min(times))

    def _may(self, actor: Actor) -> bool:
        if actor.until is not None and actor.until <= self.now:
            return True
        return actor.ready is not None and bool(actor.ready())


def shortened(script: Script, fails: Callable[[Script], bool]) -> Script:
    """The script without decisions that the failure does not need."""
    kept, size = dict(script), max(1, len(script) // 2)
    while True:
        for first in range(0, len(kept), size):
            names = sorted(kept)[first : first + size]
            less = {at: what for at, what in kept.items() if at not in names}
            if names and fails(dict(less)):
                kept = less
                break
        else:
            if size == 1:
                return kept
            size = max(1, size // 2)


def spelled(script: Script) -> Iterable[str]:
    """A script as lines that can be pasted into a test."""
    return (f"{at}: {what!r}," for at, what in sorted(script.items()))
