"""Workers in simulated time, under somebody who ends them at random, or with a poison in what they compute."""

import math
from dataclasses import dataclass, field

from phalanx.plan.tally import Cause, Death, Spot, Tally


@dataclass
class World:
    """W workers that compute blocks of replicas, meet, update, and are replaced when they end.

    Attributes
    ----------
    every : float
        Mean seconds from one kill to the next, whoever it hits.
    together : float
        Share of the kills that hit everybody.
    poison : Spot or None
        Ends whoever is at it ...
    after : float
        ... after so many seconds.
    """

    rng: object
    workers: int = 2
    replicas: int = 4
    starting: float = 0.1
    computing: float = 0.01
    updating: float = 0.002
    every: float = math.inf
    together: float = 0.0
    poison: Spot | None = None
    after: float = 0.001
    cause: Cause = Cause.ANYBODY
    now: float = 0.0
    step: int = 0
    finished: int = 0
    started: int = 0
    occasions: int = 0
    deaths: int = 0
    lived: float = 0.0
    place: dict = field(default_factory=dict)  # worker to (what it does, until when)
    at_end: dict = field(default_factory=dict)  # worker to what it did when it last ended
    since: dict = field(default_factory=dict)
    fatal: dict = field(default_factory=dict)
    strike: float = math.inf

    def lasts(self, seconds):
        """How long something takes on a busy machine."""
        return seconds * self.rng.uniform(0.7, 1.6)

    def block(self, worker):
        return range(worker * self.replicas // self.workers, (worker + 1) * self.replicas // self.workers)

    def go_on(self, worker, spot):
        """What a worker does from now on; None: it waits."""
        seconds = {None: math.inf, "start": self.starting, "replica": self.computing, "update": self.updating}
        fatal = spot is not None and spot == self.poison
        until = self.now + self.lasts(seconds[spot and spot.doing]) if spot else math.inf
        self.since[worker] = self.now
        self.fatal[worker] = self.now + self.lasts(self.after) if fatal else math.inf
        self.place[worker] = spot, math.inf if fatal else until

    def train(self, steps, most=100_000):
        """The verdict, or None when all steps are done (or so many workers were ended that this goes on for ever)."""
        tally, dead = Tally(), {}
        self.strike = self.now + self.every * self.rng.expovariate(1)
        for worker in range(self.workers):
            self.go_on(worker, Spot(-1, "start", worker))
        while self.step < steps and self.deaths < most:
            self.pass_time(dead)
            if dead and not any(spot and spot.doing == "start" for spot, _ in self.place.values()):
                found = self.count(tally, dead)
                if found is not None:
                    return found
                self.wait(tally.pause)
                self.occasions += 1
                for worker in list(dead):
                    del dead[worker]
                    self.go_on(worker, Spot(-1, "start", worker))
        return None

    def count(self, tally, dead):
        done = {
            Spot(self.step, "replica", replica)
            for worker in range(self.workers)
            for replica in self.block(worker)
            if replica in self.came_through(worker)
        }
        starting = {worker for worker in dead if self.at_end[worker] == Spot(-1, "start", worker)}
        done |= {Spot(-1, "start", worker) for worker in range(self.workers) if worker not in starting}
        return tally.count(dead, done, self.step, self.finished + self.started, self.occasions, self.lived)

    def wait(self, seconds):
        """Nobody is started for a while."""
        self.now += seconds
        self.lived += seconds * len(self.place)
        if self.strike < self.now:  # it hit nobody
            self.strike = self.now + self.every * self.rng.expovariate(1)

    def came_through(self, worker):
        spot = self.place.get(worker, (None, 0))[0] if worker in self.place else self.at_end[worker]
        if spot is None or spot.doing == "update":
            return set(self.block(worker))
        return set(range(self.block(worker)[0], spot.which)) if spot.doing == "replica" else set()

    def pass_time(self, dead):
        """To the next thing that happens."""
        times = [*(min(until, self.fatal[worker]) for worker, (_, until) in self.place.items()), self.strike]
        then = min(times)
        self.lived += (then - self.now) * len(self.place)
        self.now = then
        if self.now == self.strike:
            self.strike = self.now + self.every * self.rng.expovariate(1)
            alive = list(self.place)
            everybody = self.rng.random() < self.together
            for worker in alive if everybody else alive and [self.rng.choice(alive)]:
                self.end(worker, dead, Cause.ANYBODY)
            return
        for worker, (spot, until) in list(self.place.items()):
            if self.now == self.fatal[worker]:
                self.end(worker, dead, self.cause)
            elif self.now == until:
                self.next(worker, spot)

    def end(self, worker, dead, cause):
        spot, _ = self.place.pop(worker)
        self.at_end[worker] = spot
        self.deaths += 1
        dead[worker] = Death("was killed", cause, spot, self.now - self.since[worker])

    def next(self, worker, spot):
        """One thing is done; what comes next."""
        if spot.doing == "start":
            self.started += 1
            self.go_on(worker, Spot(self.step, "replica", self.block(worker)[0]))
        elif spot.doing == "replica":
            self.finished += 1
            more = spot.which + 1 in self.block(worker)
            self.go_on(worker, Spot(self.step, "replica", spot.which + 1) if more else None)
            if len(self.place) == self.workers and all(spot is None for spot, _ in self.place.values()):
                for each in range(self.workers):
                    self.go_on(each, Spot(self.step, "update", each))
        else:
            self.go_on(worker, None)
            if len(self.place) == self.workers and all(spot is None for spot, _ in self.place.values()):
                self.step += 1
                for each in range(self.workers):
                    self.go_on(each, Spot(self.step, "replica", self.block(each)[0]))
