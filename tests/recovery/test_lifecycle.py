"""The decisions after a death, against workers that are only counters: what may be, and what may never be, decided."""

import itertools
import random

import pytest

from phalanx.plan.lifecycle import Phase, Progress, joinable, judge, newest_whole

STEPS = 5
INTERVAL = 2


class Broken(Exception):
    """A simulated worker was ended."""


class Worker:
    """Goes through the points of each step; what it owns is the number of the step that it was last written for."""

    def __init__(self, supervisor, number):
        self.supervisor, self.number = supervisor, number
        self.place = Progress(0, Phase.SAVING)
        self.arrived = 0
        self.owned, self.half = 0, False  # updates that were written; whether one is being written
        self.saved = (0, False)  # (step, whether it is half written)
        self.todo = self.life()

    def life(self):
        """One yield per thing that another worker, or a death, may come between."""
        for step in range(STEPS):
            self.place = Progress(step, Phase.SAVING)
            yield
            if self.supervisor.due == step:
                self.saved = (step, True)
                yield
                self.saved = (step, False)
            for phase in (Phase.COMPUTING, Phase.COMPUTED):
                self.place = Progress(step, phase)
                yield
            yield from self.meet()
            self.place = Progress(step, Phase.FOLDING)
            yield
            self.place = Progress(step, Phase.FOLDED)
            yield
            yield from self.meet()
            if self.number == 0:
                if self.supervisor.due == step:
                    self.supervisor.kept = step
                    yield
                if step + 1 - self.supervisor.due >= INTERVAL:
                    self.supervisor.due = step + 1
            self.place = Progress(step, Phase.UPDATING)
            yield
            self.half = True
            yield
            self.owned, self.half = step + 1, False
            yield
            self.place = Progress(step, Phase.UPDATED)
            yield
            yield from self.meet()

    def meet(self):
        self.arrived += 1
        while min(worker.arrived for worker in self.supervisor.workers) < self.arrived:
            yield


class Wall:
    """W workers, run in a seeded order until some of them are ended and the others have come to a stop."""

    def __init__(self, count):
        self.due, self.kept = -1, -1
        self.workers = [Worker(self, number) for number in range(count)]

    def run(self, rng, fatal):
        """Returns who fell; ``fatal(worker)`` says where."""
        living, fallen = list(self.workers), []
        still = 0
        while living and still < 20 * len(living):
            worker = rng.choice(living)
            before = (worker.place, worker.arrived, worker.half, worker.owned)
            if next(worker.todo, "done") == "done":
                living.remove(worker)
            elif fatal(worker):
                living.remove(worker)
                fallen.append(worker.number)
            still = 0 if (worker.place, worker.arrived, worker.half, worker.owned) != before else still + 1
        return fallen


def check(supervisor):
    """The verdict must be true of what the workers really wrote."""
    places = [worker.place for worker in supervisor.workers]
    verdict = judge(places)
    whole = (
        not any(worker.half for worker in supervisor.workers)
        and len({worker.owned for worker in supervisor.workers}) == 1
    )
    if not verdict.torn:
        assert whole
        assert verdict.step == supervisor.workers[0].owned
        return
    kept = newest_whole(supervisor.due, supervisor.kept, verdict.step)
    assert {worker.saved for worker in supervisor.workers} == {(kept, False)} or kept == -1
    assert kept <= verdict.step


POINTS = list(itertools.product(range(STEPS), Phase))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_death_at_every_point_is_judged_as_what_it_is(count):
    """Every phase x every worker x many orders in which the others go on: never a torn state taken for a whole one."""
    for (step, phase), victim in itertools.product(POINTS, range(count)):
        for seed in range(12):
            rng = random.Random(f"{count} {step} {phase} {victim} {seed}")
            delay = iter([False] * rng.randrange(3) + [True])
            supervisor = Wall(count)
            place = Progress(step, phase)
            fallen = supervisor.run(
                rng, lambda w, v=victim, p=place, d=delay: (w.number, w.place) == (v, p) and next(d, True)
            )
            if fallen:
                check(supervisor)


def test_several_deaths_at_once_are_judged_as_what_they_are():
    """Any workers at any time, up to all of them."""
    torn = 0
    for seed in range(3000):
        rng = random.Random(seed)
        supervisor = Wall(rng.randint(1, 4))
        if supervisor.run(rng, lambda worker, rng=rng: rng.random() < 0.02):
            check(supervisor)
            torn += judge([worker.place for worker in supervisor.workers]).torn
    assert torn > 100  # otherwise this looked at nothing


def test_replacements_join_only_where_everybody_waits_for_them():
    """If a replacement may join, no other worker has passed, or will pass, the exchange of that step."""
    joined = 0
    for seed in range(3000):
        rng = random.Random(seed)
        supervisor = Wall(rng.randint(2, 4))
        fallen = supervisor.run(rng, lambda worker, rng=rng: rng.random() < 0.02)
        places = [worker.place for worker in supervisor.workers]
        if fallen and joinable(places, fallen):
            joined += 1
            step = places[fallen[0]].step
            assert all(place < Progress(step, Phase.FOLDING) for place in places)
            assert all(worker.owned == step and not worker.half for worker in supervisor.workers)
    assert joined > 100


def test_a_judge_that_trusts_updates_is_caught(monkeypatch):
    """A table that takes broken updates for whole ones: the simulation must notice."""
    monkeypatch.setitem(globals(), "judge", lambda places: judge_naively(places))
    with pytest.raises(AssertionError):
        test_several_deaths_at_once_are_judged_as_what_they_are()


def test_a_snapshot_that_is_only_announced_is_caught(monkeypatch):
    """A table that goes back to what is due, saved or not: the simulation must notice."""
    monkeypatch.setitem(globals(), "newest_whole", lambda due, kept, torn: due)
    with pytest.raises(AssertionError):
        test_several_deaths_at_once_are_judged_as_what_they_are()


def judge_naively(places):
    """The furthest worker is right."""
    verdict = judge_of_the_library(places)
    return verdict._replace(torn=False)


judge_of_the_library = judge


@pytest.mark.parametrize(
    ("places", "step", "torn"),
    [
        ([(3, 0), (3, 1)], 3, False),
        ([(3, 2), (3, 1), (2, 6)], 3, False),
        ([(3, 4), (3, 3)], 3, False),
        ([(3, 5), (3, 4)], 3, True),
        ([(3, 5), (3, 5)], 3, True),
        ([(3, 6), (3, 5)], 3, True),
        ([(3, 6), (3, 4)], 3, True),
        ([(3, 6), (3, 6)], 4, False),
        ([(4, 0), (3, 6)], 4, False),
        ([(9, 5)], 9, True),
    ],
)
def test_the_table(places, step, torn):
    """By hand: from where everyone stood to how the run goes on."""
    assert judge([Progress(step, Phase(phase)) for step, phase in places]) == (step, torn)
