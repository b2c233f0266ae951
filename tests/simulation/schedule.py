"""Who acts when: simulated processes that take turns, and what befalls them, all from one seed.

A process has one or more actors. Each is a greenlet: it goes on until it waits for something, and there the schedule
decides who is next. So the code that is tested is the real one, and whatever happens is a list of decisions. Without a
decision, actors take turns. A ``Script`` has the decisions that differ from that, and the faults, by the number of the
action where each comes. The same script leads to the same run.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from greenlet import getcurrent, greenlet

MOST_ACTIONS = 200_000
Script = dict[int, tuple[Any, ...]]  # at an action: ("turn", how many are passed over), or a fault and what it strikes


class Ended(BaseException):
    """Raised in an actor whose process has been killed. It may do nothing more that others could see."""


class Stuck(AssertionError):
    """Nobody can go on, or all go on for ever."""


class Actor:
    """A thread of a simulated process."""

    def __init__(self, number: int, process: Any, name: str, thread: greenlet) -> None:
        self.number, self.process, self.name, self.thread = number, process, name, thread
        self.ready: Callable[[], object] | None = None
        self.until: float | None = 0.0


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
        self._actors: list[Actor] = []  # that have not ended
        self._living: Counter[Any] = Counter()  # how many actors of each process have not ended
        self._begun = 0
        self._current: Actor | None = None
        self._dead: set[Any] = set()
        self._frozen: set[Any] = set()
        self._moments: list[float] = []
        self._home = getcurrent()
        self._last, self._stay = 0, False

    def start(self, process: Any, name: str, body: Callable[[], object]) -> Actor:
        """Begin an actor of a process; it runs when its turn comes. A process that was killed is never begun again."""
        self.check()
        actor = Actor(self._begun, process, name, greenlet(body, self._home))
        self._actors.append(actor)
        self._living[process] += 1
        self._begun += 1
        return actor

    def run(self) -> None:
        """Run until all actors have ended.

        Raises
        ------
        Stuck
            They do not end.
        """
        try:
            while (actor := self._chosen()) is not None:
                self._current, self._last, self._stay = actor, actor.number, False
                with contextlib.suppress(Ended):
                    actor.thread.switch()
                if actor.thread.dead:
                    self._end(actor)
        finally:
            self._current = None
            for actor in list(self._actors):
                self.kill(actor.process)

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
        self._home.switch()
        actor.ready = None  # what it holds ends with it
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
        self._stay = True
        self._home.switch()
        self.check()

    def check(self) -> None:
        """Raise in an actor whose process is dead."""
        if self._current is not None and self._current.process in self._dead:
            raise Ended

    @property
    def acting(self) -> Actor:
        """The actor whose turn it is."""
        assert self._current is not None
        return self._current

    @property
    def process(self) -> Any:
        """Whose actor is acting."""
        return self.acting.process

    def lives(self, process: Any) -> bool:
        """Whether a process has an actor that has not ended."""
        return process not in self._dead and self._living[process] > 0

    def kill(self, process: Any) -> None:
        """End a process at once. What it holds is not tidied up."""
        self._dead.add(process)
        current = self._current
        for actor in [each for each in self._actors if each.process == process and each is not current]:
            self._current, actor.thread.parent = actor, getcurrent()
            with contextlib.suppress(BaseException):  # it leaves its code, which no killed process does
                actor.thread.throw(Ended)
            self._end(actor)
        self._current = current  # if that is to end, it does where it asks next

    def freeze(self, process: Any, frozen: bool = True) -> None:
        """Stop a process, or let it go on."""
        (self._frozen.add if frozen else self._frozen.discard)(process)

    def frozen(self, process: Any) -> bool:
        """Whether a process is stopped."""
        return process in self._frozen

    def _end(self, actor: Actor) -> None:
        self._actors.remove(actor)
        self._living[actor.process] -= 1

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
            planned = ("turn", draw.randrange(1, 1 + self._begun))
        if planned is not None:
            self.script[self.actions] = planned
        return planned is not None

    def _strike_planned(self) -> None:
        planned = self.script.get(self.actions)
        if planned is not None and planned[0] != "turn" and self._strike(*planned):
            self.struck.append((self.actions, planned))

    def _chosen(self) -> Actor | None:
        """Who acts next; None if all have ended. Time passes until there is one."""
        planned = self.script.get(self.actions)
        passed = planned[1] if planned is not None and planned[0] == "turn" else 0
        turn = self._last - self._stay
        while self._actors:
            if self.actions > MOST_ACTIONS:
                raise Stuck(f"no end after {self.actions} actions")
            moving = [each for each in self._actors if each.process not in self._frozen]
            moving.sort(key=lambda each: each.number <= turn)
            able = list(itertools.islice(filter(self._may, moving), None if passed else 1))
            if able:
                return able[passed % len(able)]
            while self._moments and self._moments[0] <= self.now:
                heapq.heappop(self._moments)
            times = [each.until for each in moving if each.until is not None] + self._moments[:1]
            if not times:
                raise Stuck(f"nobody can go on: {', '.join(f'{each.process} {each.name}' for each in self._actors)}")
            self.now = max(self.now, min(times))
        return None

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
