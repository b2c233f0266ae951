"""Who acts when: simulated processes that take turns, and what befalls them, all from one seed.

A process has one or more actors. Each is a greenlet: it goes on until it waits for something, and there the schedule
decides who is next. So the code that is tested is the real one, and whatever happens is a list of decisions. Without a
decision, actors take turns. A script has the decisions that differ from that, and the faults, by the number of the
action where each comes: ("turn", how many are passed over), or a fault and what it strikes. The same script leads to
the same run.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import random
from collections import Counter

from greenlet import getcurrent, greenlet


class Ended(BaseException):
    """Raised in an actor whose process has been killed. It may do nothing more that others could see."""


class Stuck(AssertionError):
    """Nobody can go on, or all go on for ever."""


class Actor(greenlet):
    """A thread of a simulated process: it can go on when ``ready()``, and from the moment ``until`` on."""

    __slots__ = "name", "number", "process", "ready", "until"


class Schedule:
    """Runs actors one at a time.

    Parameters
    ----------
    script : dict
        Decisions to replay.
    strike : callable
        ``strike(fault, *what)`` does a fault of the script; returns whether it met anything.
    seed : int, optional
        With one, further decisions are drawn from it, and added to ``script``.
    draw : callable
        ``draw(random, schedule)``: a fault to be done now, or None. Only with a seed.
    restless : float
        How probable it is that somebody else's turn comes first, with a seed.
    most : int
        Actions after which a run has no end.

    Attributes
    ----------
    now : float
        Simulated seconds.
    actions : int
        How many there were.
    struck : list
        Faults that were done: a script whose faults miss proves nothing.
    frozen : set
        Processes that are stopped.
    moments : list of float
        When something happens by itself, so that somebody may be ready then.
    """

    def __init__(self, script, strike, seed=None, draw=None, restless=0.1, most=200_000):
        self.script, self.now, self.actions, self.most = script, 0.0, 0, most
        self.struck, self.frozen, self.moments = [], set(), []
        self._strike, self._draw, self._restless = strike, draw, restless
        self._random = None if seed is None else random.Random(seed)
        self._actors, self._living, self._dead = [], Counter(), set()  # how many actors of each process have not ended
        self._begun = self._last = 0  # how many actors; the number after which the next one is looked for
        self._home = getcurrent()
        self._home.process = None

    def start(self, process, name, body):
        """Begin an actor of a process; it runs when its turn comes. A process that was killed is never begun again."""
        self.check()
        actor = Actor(body, self._home)
        actor.number, actor.process, actor.name = self._begun, process, name
        actor.ready, actor.until = None, 0.0
        self._actors.append(actor)
        self._living[process] += 1
        self._begun += 1
        return actor

    def run(self):
        """Run until all actors have ended. Raises a ``Stuck`` if they do not end."""
        try:
            while (actor := self._chosen()) is not None:
                self._last = actor.number
                with contextlib.suppress(Ended):
                    actor.switch()
                if actor.dead:
                    self._end(actor)
        finally:
            for actor in list(self._actors):
                self.kill(actor.process)

    def wait(self, ready=None, seconds=None):
        """By an actor: let others act until ``ready()``, or until some time has passed; returns whether it is ready.

        Without ``ready``: until the time has passed. With neither: until the next turn.
        """
        self.act()
        if seconds is None:
            seconds = 0 if ready is None else math.inf
        self._let_others_act(ready, self.now + seconds)
        return ready is not None and bool(ready())

    def act(self):
        """By an actor: do something that others may see, and keep the turn; returns whether something was decided."""
        self.check()
        self.actions += 1
        planned = self.script.get(self.actions) or (self._random and self._drawn())
        if not planned:
            return False
        if planned[0] != "turn" and self._strike(*planned):
            self.struck.append((self.actions, planned))
            self.check()  # it may have struck this one
        return True

    def pause(self):
        """By an actor: others may act here. Without a decision it goes on itself."""
        if self.act() or self.actions > self.most:
            self._last -= 1
            self._let_others_act(None, self.now)

    def check(self):
        """Raise in an actor whose process is dead."""
        if getcurrent().process in self._dead:
            raise Ended

    @property
    def process(self):
        """Whose actor is acting."""
        return getcurrent().process

    @property
    def living(self):
        """All processes that have an actor that has not ended."""
        return {process for process, count in self._living.items() if count} - self._dead

    def lives(self, process):
        """Whether a process has an actor that has not ended."""
        return process not in self._dead and self._living[process] > 0

    def kill(self, process):
        """End a process at once. What it holds is not tidied up. The actor that acts ends where it asks next."""
        self._dead.add(process)
        for actor in [each for each in self._actors if each.process == process and each is not getcurrent()]:
            actor.parent = getcurrent()
            with contextlib.suppress(BaseException):  # it leaves its code, which no killed process does
                actor.throw(Ended)
            self._end(actor)

    def _end(self, actor):
        self._actors.remove(actor)
        self._living[actor.process] -= 1

    def _drawn(self):
        """What is drawn for this action, if anything; it is in the script then."""
        planned = self._draw(self._random, self) if self._draw else None
        if planned is None and self._random.random() < self._restless:
            planned = "turn", self._random.randrange(1, 1 + self._begun)
        if planned is not None:
            self.script[self.actions] = planned
        return planned

    def _let_others_act(self, ready, until):
        actor = getcurrent()
        actor.ready, actor.until = ready, until
        self._home.switch()
        actor.ready = None  # what it holds ends with it
        self.check()

    def _chosen(self):
        """Who acts next; None if all have ended. Time passes until there is one."""
        planned = self.script.get(self.actions, ("turn", 0))
        passed = planned[1] if planned[0] == "turn" else 0
        after = bisect.bisect(self._actors, self._last, key=lambda each: each.number)
        turns = self._actors[after:] + self._actors[:after]
        while turns:
            if self.actions > self.most:
                raise Stuck(f"no end after {self.actions} actions")
            moving = [each for each in turns if each.process not in self.frozen]
            able = list(itertools.islice(filter(self._may, moving), None if passed else 1))
            if able:
                return able[passed % len(able)]
            self.moments = [moment for moment in self.moments if moment > self.now]
            self.now = min([*[each.until for each in moving], *self.moments], default=math.inf)
            if self.now == math.inf:
                raise Stuck(f"nobody can go on: {', '.join(f'{each.process} {each.name}' for each in self._actors)}")
        return None

    def _may(self, actor):
        return actor.until <= self.now or (actor.ready is not None and actor.ready())


def shortened(script, fails):
    """The script without decisions that the failure does not need."""
    kept, size = dict(script), len(script)
    while size:
        before, names = len(kept), sorted(kept)
        for first in range(0, before, size):
            less = {at: what for at, what in kept.items() if at not in names[first : first + size]}
            if fails(dict(less)):
                kept = less
        if len(kept) == before:
            size //= 2
    return kept


def spelled(script):
    """A script as lines that can be pasted into a test."""
    return [f"{at}: {what!r}," for at, what in sorted(script.items())]
