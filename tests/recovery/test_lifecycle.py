"""The decisions after a death, against workers that are only counters: what may be, and what may never be, decided."""

import itertools
import random

import pytest

from phalanx.plan import lifecycle
from phalanx.plan.lifecycle import (
    TABLE,
    Action,
    Fallen,
    Progress,
    Repair,
    Seen,
    Situation,
    Stage,
    Standing,
    decide,
    joinable,
    judge,
    newest_whole,
    next_snapshot,
)

STEPS = 5
INTERVAL = 2


class Broken(Exception):
    """A simulated worker was ended."""


class Worker:
    """Goes through the points of each step; what it owns is the number of the step that it was last written for."""

    def __init__(self, supervisor, number):
        self.supervisor, self.number = supervisor, number
        self.place = Progress(0, Stage.SAVING)
        self.arrived = 0
        self.owned, self.half = 0, False  # updates that were written; whether one is being written
        self.saved = (0, False)  # (step, whether it is half written)
        self.todo = self.life()

    def life(self):
        """One yield per thing that another worker, or a death, may come between."""
        for step in range(STEPS):
            self.place = Progress(step, Stage.SAVING)
            yield
            if self.supervisor.due == step:
                self.saved = (step, True)
                yield
                self.saved = (step, False)
            for stage in (Stage.COMPUTING, Stage.COMPUTED):
                self.place = Progress(step, stage)
                yield
            yield from self.meet()
            self.place = Progress(step, Stage.FOLDING)
            yield
            self.place = Progress(step, Stage.FOLDED)
            yield
            yield from self.meet()
            if self.number == 0:
                if self.supervisor.due == step:
                    self.supervisor.kept = step
                    yield
                if step + 1 - self.supervisor.due >= INTERVAL:
                    self.supervisor.due = step + 1
            self.place = Progress(step, Stage.UPDATING)
            yield
            self.half = True
            yield
            self.owned, self.half = step + 1, False
            yield
            self.place = Progress(step, Stage.UPDATED)
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


POINTS = list(itertools.product(range(STEPS), Stage))


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_death_at_every_point_is_judged_as_what_it_is(count):
    """Every stage x every worker x many orders in which the others go on: never a torn state taken for a whole one."""
    for (step, stage), victim in itertools.product(POINTS, range(count)):
        for seed in range(12):
            rng = random.Random(f"{count} {step} {stage} {victim} {seed}")
            delay = iter([False] * rng.randrange(3) + [True])
            supervisor = Wall(count)
            place = Progress(step, stage)
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
            assert all(place < Progress(step, Stage.FOLDING) for place in places)
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
    assert judge([Progress(step, Stage(stage)) for step, stage in places]) == (step, torn)


class Hands:
    """Does what the table says to simulated workers; now and then it is broken off, or somebody else falls."""

    def __init__(self, wall, fallen, rng):
        self.rng = rng
        self.workers, self.due, self.kept = wall.workers, wall.due, wall.kept
        self.done = wall.workers[0].place.step  # the first worker reports a step when it begins the next
        self.fallen, self.at_work = set(fallen), {worker.number for worker in wall.workers}
        self.repair = None

    def situation(self):
        seen = [Seen(w.place, w.number in self.fallen, w.number in self.at_work) for w in self.workers]
        return Situation(seen, range(0), self.done, self.due, self.kept, self.repair, portable=True)

    def finish(self):
        """Until there is nothing left to do; the state must then be that of the last finished step."""
        taken = []
        while (decision := decide(self.situation())).action is not Action.GO_ON:
            taken.append(decision.action)
            assert len(taken) < 200
            getattr(self, decision.action.name.lower())(decision)
        assert not self.fallen
        assert self.repair is None
        assert [(worker.owned, worker.half) for worker in self.workers] == [(self.done, False)] * len(self.workers)
        return taken

    def stop(self, decision):
        self.at_work &= self.fallen

    def resume(self, decision):
        assert [(worker.owned, worker.half) for worker in self.workers] == [(decision.step, False)] * len(self.workers)
        self.done = max(self.done, decision.step)
        self.repair = Repair(Action.RESUME, decision.step)
        self.tell(decision.step, self.workers)

    def take_back(self, decision):
        assert {worker.saved for worker in self.workers} == {(decision.back_to, False)} or decision.back_to < 0
        self.go_back(decision)

    def go_back(self, decision):
        self.repair = Repair(Action.GO_BACK, decision.back_to)
        step = max(decision.back_to, 0)
        self.tell(step, self.workers, restored=True)

    def do_again(self, decision):
        assert decision.step < self.done
        for worker in self.workers:
            worker.half, worker.place = True, Progress(decision.step, Stage.UPDATING)
            if self.rng.random() < 0.1:
                self.fallen.add(worker.number)
            else:
                worker.owned, worker.half = decision.step + 1, False
                worker.place = Progress(decision.step, Stage.UPDATED)
        if not self.fallen:
            for worker in self.workers:
                worker.place = Progress(decision.step + 1, Stage.SAVING)

    def tell(self, step, workers, restored=False):
        """Replacements begin at ``step``; then all are told, unless that is broken off or somebody falls."""
        for number in self.fallen:
            workers[number].place = Progress(step, Stage.SAVING)
        self.fallen, self.at_work = set(), set()
        for worker in workers:
            if self.rng.random() < 0.1:  # Ctrl-C
                return
            if self.rng.random() < 0.1:
                self.fallen.add(worker.number)
                return
            worker.place = Progress(step, Stage.SAVING)
            if restored:
                worker.owned, worker.half = step, False
        self.repair = None


def carried_out(seeds=2000):
    """What was done to make good deaths at any time, in many runs."""
    taken = []
    for seed in range(seeds):
        rng = random.Random(seed)
        wall = Wall(rng.randint(1, 4))
        fallen = wall.run(rng, lambda worker, rng=rng: rng.random() < 0.02)
        if fallen:
            taken += Hands(wall, fallen, rng).finish()
    return set(taken)


def test_what_the_table_says_leads_back_to_the_last_finished_step():
    """Any deaths, repairs that are broken off, deaths in repairs and in replays: it ends, with the state whole."""
    assert carried_out() == {Action.STOP, Action.RESUME, Action.TAKE_BACK, Action.GO_BACK, Action.DO_AGAIN}


@pytest.mark.parametrize(
    ("fallen", "standing", "action"),
    [
        (Fallen.ANYBODY, Standing.TORN, Action.RESUME),
        (Fallen.NOBODY, Standing.GOING_BACK, Action.RESUME),
        (Fallen.NOBODY, Standing.BEHIND, Action.GO_ON),
        (Fallen.ANYBODY, Standing.GOING_BACK, Action.RESUME),
    ],
)
def test_a_wrong_row_is_caught(monkeypatch, fallen, standing, action):
    """With one wrong entry in the table, the simulation ends in a wrong state, or never."""
    monkeypatch.setitem(TABLE[fallen], standing, action)
    with pytest.raises(AssertionError):
        carried_out()


def test_the_table_has_an_answer_for_everything():
    """Every row has every column; over several hosts every death ends the run; what only one knew is lost with it."""
    assert {fallen: set(row) for fallen, row in TABLE.items()} == {fallen: set(Standing) for fallen in Fallen}
    stopped = set(Standing) - {Standing.WAITING, Standing.AT_WORK}
    assert {TABLE[Fallen.KEEPER][standing] for standing in stopped} == {Action.LOSE}


def seen(*places):
    """Workers by (step, stage, whether fallen, whether at work)."""
    return [Seen(Progress(step, stage), fallen, at_work) for step, stage, fallen, at_work in places]


C, U, D = Stage.COMPUTING, Stage.UPDATING, Stage.UPDATED
USUAL = {"granted": range(3, 9), "done": 3, "due": 2, "kept": 1, "repair": None, "portable": True}


@pytest.mark.parametrize(
    ("places", "changes", "decision"),
    [
        ([(3, C, True, True), (3, C, False, True)], {}, (Action.JOIN, 3, -1)),
        ([(3, C, True, True), (3, C, False, True)], {"granted": range(0)}, (Action.STOP, 3, -1)),
        ([(9, C, True, True), (9, C, False, True)], {}, (Action.STOP, 9, -1)),
        ([(3, C, True, False), (3, C, False, True)], {}, (Action.STOP, 3, -1)),
        ([(3, C, True, True), (3, C, False, True)], {"portable": False}, (Action.STOP, 3, -1)),
        ([(3, C, False, True), (3, C, True, True)], {"portable": False}, (Action.JOIN, 3, -1)),
        ([(3, U, True, True), (3, D, False, False)], {}, (Action.TAKE_BACK, 3, 2)),
        ([(3, U, True, True), (3, D, False, False)], {"due": 4}, (Action.TAKE_BACK, 3, 1)),
        ([(3, U, True, True), (3, D, False, False)], {"portable": False}, (Action.LOSE, 3, -1)),
        ([(3, U, False, False), (3, U, False, False)], {}, (Action.TAKE_BACK, 3, 2)),
        ([(3, U, False, False), (3, U, False, False)], {"portable": False}, (Action.GO_ON, 3, -1)),
        ([(3, D, True, True), (3, D, False, False)], {}, (Action.RESUME, 4, -1)),
        ([(3, C, False, False)], {"repair": Repair(Action.GO_BACK, 2)}, (Action.GO_BACK, 3, 2)),
        ([(3, C, False, False)], {"repair": Repair(Action.RESUME, 3)}, (Action.RESUME, 3, -1)),
        ([(2, C, False, False)], {}, (Action.DO_AGAIN, 2, -1)),
        ([(3, C, False, False)], {}, (Action.GO_ON, 3, -1)),
        ([(3, D, False, False), (4, C, False, False)], {}, (Action.RESUME, 4, -1)),
    ],
)
def test_decisions(places, changes, decision):
    """By hand: who fell where, what was granted and saved, and what is done next."""
    assert decide(Situation(seen(*places), **(USUAL | changes))) == decision


class Copies(Hands):
    """The same where each worker has the whole state in memory of its own, which goes with it."""

    def situation(self):
        return super().situation()._replace(copies=True)

    def resume(self, decision):
        """A survivor hands its state over to those that take the places of others."""
        living = [worker for worker in self.workers if worker.number not in self.fallen]
        assert [(worker.owned, worker.half) for worker in living] == [(decision.step, False)] * len(living) != []
        for number in self.fallen:
            self.workers[number].owned, self.workers[number].half = decision.step, False
        super().resume(decision)

    def take_back(self, decision):
        assert len(self.fallen) == len(self.workers)  # else somebody has the state
        super().take_back(decision)

    def tell(self, step, workers, restored=False):
        for number in self.fallen if restored else ():
            workers[number].owned, workers[number].half = None, True  # until it is told
        super().tell(step, workers, restored)

    def lose(self, decision):
        """Only if the snapshot may have been torn: not all have saved it, and the step before it is done."""
        assert len(self.fallen) == len(self.workers)
        assert min(worker.place for worker in self.workers) < Progress(self.due, Stage.COMPUTING)
        assert self.kept < self.due <= max(worker.place for worker in self.workers).step
        raise Broken

    def finish(self):
        taken = []
        try:
            taken = super().finish()
        except Broken:
            taken = [Action.LOSE]
        return taken


def copies_carried_out(seeds=4000):
    """What was done to make good deaths of workers with copies, from all but one to all of them."""
    taken = []
    for seed in range(seeds):
        rng = random.Random(seed)
        wall = Wall(rng.randint(1, 4))
        rate, place = rng.choice([(0.02, None), (0.0, Progress(rng.randrange(STEPS), rng.choice(list(Stage))))])

        def fatal(worker, rng=rng, rate=rate, place=place):
            return rng.random() < rate or (worker.place == place and rng.random() < 0.6)

        fallen = wall.run(rng, fatal)
        if fallen:
            taken += Copies(wall, fallen, rng).finish()
    return set(taken)


@pytest.mark.long
def test_copies_lead_back_to_the_last_finished_step():
    """While one worker lives nothing is lost, and no step is done again; with all of them the snapshot counts."""
    assert copies_carried_out() == {
        Action.STOP, Action.RESUME, Action.TAKE_BACK, Action.GO_BACK, Action.DO_AGAIN, Action.LOSE
    }  # fmt: skip


def judged_by_the_dead(run):
    """The place of a worker that died tells of a state that nobody has."""
    return judge(run.progress)


@pytest.mark.parametrize("fault", ["judged", "saving"])
def test_a_judge_of_copies_that_is_wrong_is_caught(monkeypatch, fault):
    """Who listens to the dead, or trusts a snapshot that was being taken, ends in a wrong state."""
    if fault == "judged":
        monkeypatch.setattr(lifecycle, "judged", judged_by_the_dead)
    else:
        monkeypatch.setattr(Situation, "saving", False)
    with pytest.raises(AssertionError):
        copies_carried_out()


@pytest.mark.parametrize("places", list(itertools.product(range(2), repeat=3)))
@pytest.mark.parametrize(("due", "kept"), [(2, 1), (3, 1), (3, 3), (4, 3), (-1, -1)])
@pytest.mark.parametrize("portable", [True, False])
def test_nothing_is_lost_while_a_copy_is_left(places, due, kept, portable):
    """For each place of three workers in a step, and each choice of those that ended: a survivor is enough."""
    for stages in itertools.product(Stage, repeat=3):
        run = [Seen(Progress(3, stage), bool(fell), False) for stage, fell in zip(stages, places, strict=True)]
        facts = {**USUAL, "granted": range(0), "due": due, "kept": kept, "portable": portable}
        action = decide(Situation(run, **facts, copies=True)).action
        if 0 < sum(places) < 3:
            living = [worker.progress for worker in run if not worker.fallen]
            torn = judge(living).torn  # an optimizer raised in one of those that are left
            assert action is (Action.TAKE_BACK if torn else Action.RESUME)
        elif sum(places) == 3:
            assert action in ((Action.TAKE_BACK, Action.LOSE) if portable else (Action.LOSE,))


def test_snapshots_are_announced():
    """One is due after the interval, at once while the run is eager, and none while somebody reads the latest."""
    assert next_snapshot(7, 5, 3.0, eager=0, held=False) == 8
    assert next_snapshot(6, 5, 3.0, eager=0, held=False) == 5
    assert next_snapshot(6, 5, 3.0, eager=7, held=False) == 7
    assert next_snapshot(7, 5, 3.0, eager=9, held=True) == 5
    assert newest_whole(due=8, kept=5, torn=7) == 5  # announced for later: nobody has begun it
