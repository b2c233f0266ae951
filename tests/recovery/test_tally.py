"""Storms and poisons in simulated time: the first never end a run, the second do, after few deaths."""

import math
import random
from collections import Counter

import pytest

from phalanx.plan import tally
from phalanx.plan.tally import FUTILE, OWN, Cause, Death, Spot, Tally, at_least
from tests.recovery.storms import World

X = Spot(3, "replica", 1)
STORMY = [  # workers, seconds that a replica takes, kills in as long
    (workers, computing, rate)
    for workers in (1, 2, 4)
    for computing in (0.005, 0.05, 0.5)
    for rate in (0.25, 0.5, 1, 2)
]


def storm(workers, computing, rate, seed):
    """A world under somebody who strikes that often; while a worker starts, no more than that often."""
    rng = random.Random(f"{workers} {computing} {rate} {seed}")
    every = computing / rate if computing > 0.1 else (computing + 0.1) / rate
    together, replicas = rng.choice([0, 0.2, 1]), workers * rng.randint(1, 2)
    return World(rng, workers, replicas, computing=computing, every=every, together=together)


def verdicts(seeds):
    """What was taken for a poison in storms, and how many workers these ended."""
    worlds = [storm(*weather, seed) for weather in STORMY for seed in range(seeds)]
    found = [world.train(20, most=200) for world in worlds]
    return [poison for poison in found if poison is not None], sum(world.deaths for world in worlds)


def test_a_storm_never_ends_a_run():
    """Workers are ended at random, up to twice while a replica is computed: of thousands of deaths none is blamed."""
    blamed, deaths = verdicts(3)
    assert deaths > 5000
    assert blamed == []


@pytest.mark.campaign
def test_a_long_storm_never_ends_a_run():
    """The same with some hundred thousand deaths; the rule's error rate is printed."""
    blamed, deaths = verdicts(40)
    print(f"{len(blamed)} storms of {len(STORMY) * 40}, with {deaths} deaths, were taken for a poison")
    assert deaths > 90_000
    assert blamed == []


class Naive(Tally):
    """Counts to three at one spot, and asks for nothing else."""

    def count(self, deaths, *rest):
        for death in deaths.values():
            self.__dict__.setdefault("seen", Counter())[death.spot] += 1
            if death.spot is not None and self.seen[death.spot] >= OWN:
                return tally.Poison(death.spot, ())
        return None


def test_a_rule_that_counts_to_three_is_caught(monkeypatch):
    """The storms can fail: under them, a rule that only counts ends runs."""
    monkeypatch.setattr("tests.recovery.storms.Tally", Naive)
    blamed, _ = verdicts(1)
    assert len(blamed) > len(STORMY) // 3


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(("computing", "after"), [(0.005, 0.001), (0.05, 0.04), (0.5, 0.1), (5, 4)])
@pytest.mark.parametrize("starting", [0.1, 1.0])
def test_a_poison_soon_ends_the_run(workers, computing, after, starting):
    """SIGKILL of whoever computes a certain replica: it is named, after three to fifteen deaths, at any pace."""
    for seed in range(20):
        rng = random.Random(seed)
        world = World(rng, workers, computing=computing, after=after, starting=starting, poison=X)
        assert world.train(10).spot == X
        assert OWN <= world.deaths <= 15


@pytest.mark.parametrize("workers", [2, 4])
def test_a_poison_in_a_storm_ends_the_run_all_the_same(workers):
    """Somebody strikes others meanwhile: the poison is still told from them, later."""
    for seed in range(20):
        world = World(random.Random(seed), workers, every=0.5, poison=X)
        assert world.train(10).spot == X
        assert world.deaths < 60


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_ends_a_worker_that_starts_ends_the_run(workers):
    """SIGKILL of whoever is to become worker 0: after at most forty deaths."""
    spot = Spot(-1, "start", 0)
    for seed in range(20):
        world = World(random.Random(seed), workers, after=0.05, poison=spot)
        assert world.train(10).spot == spot
        assert world.deaths <= 40


@pytest.mark.parametrize("doing", ["replica", "update", "start"])
def test_three_ends_of_its_own_making_are_enough(doing):
    """Exits, faults and hangs are nobody else's: the third at one spot ends the run, whatever else happens."""
    spot = Spot(-1, "start", 0) if doing == "start" else Spot(3, doing, 1)
    for seed in range(20):
        world = World(random.Random(seed), 2, poison=spot, cause=Cause.ITSELF)
        assert world.train(10).spot == spot
        assert world.deaths == OWN


def kill(spot, seconds=0.01, cause=Cause.ANYBODY):
    return Death("was killed by SIGKILL", cause, spot, seconds)


def test_a_replica_that_was_computed_is_no_poison():
    """What somebody came through, and what lies before the present step, is never blamed for later deaths."""
    for finished, step in (({X}, 3), ((), 4)):
        judge = Tally()
        for occasion in range(0, 100, 2):
            assert judge.count({0: kill(X)}, (), 3, occasion, occasion, 10.0 * occasion) is None
            assert judge.count({1: kill(None)}, finished, step, occasion, occasion + 1, 10.0 * occasion + 5) is None
    judge, blamed = Tally(), False
    for occasion in range(0, 100, 2):
        blamed |= judge.count({0: kill(X)}, (), 3, occasion, occasion, 10.0 * occasion) is not None
    assert blamed


def test_deaths_with_the_process_that_started_them_blame_nobody():
    """However often a zygote takes its workers along at one spot, that is not blamed; in the end it is futile."""
    judge = Tally()
    for occasion in range(FUTILE - 1):
        assert judge.count({0: kill(X, cause=Cause.STARTER)}, (), 3, 0, occasion, occasion) is None
    assert judge.count({0: kill(X, cause=Cause.STARTER)}, (), 3, 0, FUTILE, FUTILE).spot is None


def test_deaths_that_are_noticed_one_by_one_are_one_occasion():
    """Eight workers that end together, before anybody was replaced: that is one futile occasion, not eight."""
    judge = Tally()
    for worker in range(8):
        assert judge.count({worker: kill(None)}, (), 0, 0, 0, 1.0) is None
    assert len(judge._futile) == 1
    assert judge.count({0: kill(X, cause=Cause.ITSELF)}, (), 3, 0, 1, 1.0) is None
    assert judge.count({0: kill(X, cause=Cause.ITSELF)}, (), 3, 0, 1, 1.0) is None
    assert judge.count({0: kill(X, cause=Cause.ITSELF)}, (), 3, 0, 1, 1.0) is None


def test_starting_waits_when_it_was_futile_often():
    """The first starts are at once, later ones wait a little, never long."""
    judge, pauses = Tally(), []
    for occasion in range(100):
        judge.count({0: kill(None)}, (), 0, 0, occasion, 1.0)
        pauses.append(judge.pause)
    assert pauses[: tally.PATIENT] == [0.0] * tally.PATIENT
    assert pauses == sorted(pauses)
    assert 0 < max(pauses) <= tally.LONGEST_PAUSE


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.999])
def test_the_tail_of_the_binomial_distribution(share):
    """Compared with the sum as schools teach it, for every number of trials up to twelve."""
    for trials in range(1, 13):
        for hits in range(1, trials + 1):
            terms = [math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(hits, trials + 1)]
            wanted = 1.0 if hits <= share * trials else math.fsum(terms)
            assert math.isclose(at_least(hits, trials, share), wanted, rel_tol=1e-9)
