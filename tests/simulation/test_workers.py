"""Workers of one host die at any action, and see memory in any order that the platform allows: same bits, no wait.

A failure prints a script. ``fails(script, case)`` replays it. PHALANX_SEED chooses other schedules.
"""

import os
import random
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest

from phalanx.engines.processes.worker import Worker
from phalanx.engines.recovery.supervisor import Supervisor
from phalanx.shared import counters
from phalanx.shared.counters import Barrier, Counters
from tests.sampling import SEED
from tests.simulation.schedule import shortened, spelled
from tests.simulation.workers import CALLER, Host

MOST_STEPS = 4
SCHEDULES = int(os.environ.get("PHALANX_SCHEDULES", "5000"))


@dataclass(frozen=True)
class Case:
    """A run, and how often deaths and late accesses are drawn at an action."""

    options: dict = field(default_factory=dict)
    kills: float = 0.0
    late: float = 0.0
    freezes: float = 0.0

    def draw(self, rng, schedule):
        """A fault, or None. Soon after a late access others act, as they may see that it is late."""
        drawn, struck = rng.random(), schedule.struck
        if struck and schedule.actions - struck[-1][0] < 5 and drawn < 0.2:
            return "turn", rng.randrange(1, 4)
        if drawn < self.kills:
            return "kill", rng.randrange(self.options["workers"])
        if drawn < self.kills + self.freezes:
            return "freeze", rng.randrange(self.options["workers"])
        return ("late", rng.randrange(1, 60)) if drawn > 1 - self.late else None


def drawn_case(seed):
    """A case that follows from a number."""
    rng = random.Random(f"case {seed}")
    options = {
        "workers": rng.choice([1, 2, 2, 3, 3]),
        "replicas": rng.choice([3, 4]),
        "steps": rng.randrange(2, MOST_STEPS + 1),
        "weak": rng.random() < 0.6,
        "share": rng.choice([0.005, 0.3, 2.0]),
        "captures": rng.choice([(), (0,), (0, 1)]),
        "restless": rng.choice([0.0, 0.01, 0.05, 0.2]),
        "hasty": rng.random() < 0.3,
    }
    steps, replicas = options["steps"], options["replicas"]
    options["brought"] = rng.choice([(), (), (steps - 1,), range(steps)])
    options["raises"] = rng.choice([None, None, None, (rng.randrange(steps), rng.randrange(replicas))])
    options["leaves"] = rng.choice([None, None, None, rng.randrange(steps)])
    options["portable"], options["most"] = rng.random() < 0.9, rng.choice([10, 10, 2])
    return Case(options, rng.choice([0.0, 0.0005, 0.002]), rng.choice([0.0, 0.01, 0.05]), rng.choice([0, 0, 0.0003]))


def fails(script, case, seed=None):
    """What is wrong with a run by this script, or None; and the host."""
    host = Host(script, seed, None if seed is None else case.draw, **case.options)
    try:
        host.run()
    except Exception as error:
        return error, host
    return None, host


def spell(script, case, seed=None):
    """A failure as lines that can be pasted into a test."""
    short = shortened(script, lambda less: fails(less, case)[0] is not None)
    lines = "\n".join(f"    {line}" for line in spelled(short))
    return short, f"seed {seed}; fails({{\n{lines}\n}}, Case({case.options!r}))"


def campaign(seeds, case=None):
    """Runs by seed; returns how many deaths and late accesses there were."""
    kills = late = 0
    for seed in seeds:
        chosen = case or drawn_case(seed)
        script = {}
        error, host = fails(script, chosen, seed)
        if error is not None:
            raise AssertionError(spell(script, chosen, seed)[1]) from error
        kills += host.kills
        late += len(host.schedule.struck) - host.kills
    return kills, late


@pytest.mark.long
def test_workers_that_die_and_see_memory_late():
    """Random schedules, deaths and orders of memory: every report once and in order, every state as in one process."""
    first = SEED * 1_000_000
    kills, late = campaign(range(first, first + 200))
    assert kills > 100
    assert late > 2000


def test_going_back_that_is_broken_off_leaves_no_whole_state():
    """Workers died too often while some had gone back to the snapshot, and the mixture counted as a state."""
    campaign([6511])


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(8))
def test_many_schedules(part):
    """The same, 4,000 times, or as PHALANX_SCHEDULES says."""
    first = SEED * 1_000_000 + 1000
    campaign(range(first + part, first + SCHEDULES, 8))


def turns(every, actions=8000):
    """A script in which everybody has some actions in turn."""
    return dict.fromkeys(range(every, actions, every), ("turn", 1))


def struck(case, base, faults):
    """Runs with some faults each; returns how many there were and how many faults came to something."""
    runs = kills = 0
    for each in faults:
        error, host = fails({**base, **each}, case)
        if error is not None:
            raise AssertionError(spell({**base, **each}, case)[1]) from error
        runs, kills = runs + 1, kills + host.kills
    return runs, kills


def length(case, base):
    """Actions of a run without faults."""
    error, host = fails(dict(base), case)
    assert error is None
    return host.schedule.actions


CASES = [
    Case({"workers": workers, "share": share, "captures": captures})
    for workers in (2, 3)
    for share, captures in ((2.0, (0,)), (0.005, ()))
]


def single(case, base, stride):
    """A death of each worker at every action, or every so many."""
    for at in range(1, length(case, base), stride):
        for worker in range(case.options["workers"]):
            yield {at: ("kill", worker)}


def double(case, base, count):
    """Two deaths: evenly many of all pairs, the second soon after the first, in the recovery, or later."""
    actions, workers = length(case, base), case.options["workers"]
    rng = random.Random(f"{actions} {workers}")
    for number in range(count):
        at = 1 + number * actions // count
        later = at + int(2 ** rng.uniform(0, 10.5))
        yield {at: ("kill", rng.randrange(workers)), later: ("kill", rng.randrange(workers))}


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_death_and_two(case):
    """A death at some actions of a round of turns, and two at some pairs of actions."""
    base = turns(7)
    runs, kills = struck(case, base, single(case, base, 97))
    assert kills > 0.9 * runs
    runs, kills = struck(case, base, double(case, base, 30))
    assert kills > 1.4 * runs


@pytest.mark.long
@pytest.mark.parametrize("case", CASES[::2], ids=["two workers", "three workers"])
def test_a_death_at_every_action_and_two(case):
    """A death of every worker at every second action of a round of turns; two at 250 of all pairs."""
    base = turns(7)
    runs, kills = struck(case, base, single(case, base, 2))
    assert kills > 0.9 * runs
    runs, kills = struck(case, base, double(case, base, 250))
    assert kills > 1.4 * runs


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
def test_a_run_that_is_broken_off_in_the_last_barrier_of_a_step(workers):
    """Some have passed it and others leave there: the step is done, and counts, as its weights are in the state."""
    options = {"workers": workers, "leaves": 2, "hasty": True, "restless": 0.02}
    assert fails({}, Case(options))[0] is None  # failed with two workers when nobody was told that it was done
    campaign(range(60), Case(options))


def test_an_update_that_is_broken_off_is_not_called_whole():
    """If only some updated, and the optimizer has state of its own, nobody can go back: the state is lost."""
    options = {"workers": 2, "leaves": 1, "hasty": True, "restless": 0.05, "portable": False, "share": 2.0}
    case, lost = Case(options), 0
    for seed in range(60):
        error, host = fails({}, case, seed)
        assert error is None  # it was, when the state was called whole
        lost += host.lost
    assert lost


def looked_late(self, workers=None, look=Counters.all_idle):
    """Before the caller sees whether workers are idle, they do all that they can."""
    schedule = self._words.words.schedule
    if schedule.process == CALLER:
        schedule.wait(seconds=1e-5)
    return look(self, workers)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_that_come_to_rest_between_two_looks(workers):
    """The caller sees that a step is not done, and then idle workers: they have done it, and no other is granted."""
    case = Case({"workers": workers, "hasty": True, "restless": 0.02})
    with mock.patch.object(Counters, "all_idle", looked_late):
        campaign(range(40), case)
    script = {357: ("turn", 1), 361: ("turn", 1), 434: ("turn", 1), 462: ("turn", 1), 552: ("turn", 1)}
    assert fails(script, Case({"workers": 1, "steps": 2, "hasty": True}))[0] is None  # it did a third one


def wait_blindly(barrier, other, mine):
    """A barrier that does not look for trouble."""
    while other.arrived < mine:
        counters.os.sched_yield()


announce = Worker._announce
go_back = Supervisor._go_back


def announce_early(worker, *facts):
    """A snapshot that is called whole as soon as it is announced."""
    announce(worker, *facts)
    worker._counters.snapshot_step = worker._counters.snapshot_due


def finish_unordered(self, step, ended):
    """A report that may be seen after its count."""
    self.reports.correct_end(step, ended)
    self.reported = max(self.reported, step + 1)


def go_back_once(supervisor, kept, fallen):
    """A supervisor that forgets, when a worker dies meanwhile, that it was going back."""
    go_back(supervisor, kept, fallen)
    supervisor._repair = None


DEATHS = Case({"workers": 2, "restless": 0.01}, kills=0.002)
LATE = Case({"workers": 2, "restless": 0.01, "weak": True, "hasty": True}, late=0.1)
PLANTED = {
    "a barrier that does not look for trouble": (Barrier, "_wait_for", wait_blindly, DEATHS),
    "a snapshot that is called whole a step early": (Worker, "_announce", announce_early, DEATHS),
    "a report that is not ordered before its count": (Counters, "finish", finish_unordered, LATE),
    "a repair that is forgotten": (Supervisor, "_go_back", go_back_once, DEATHS),
}


def hunted(case, seeds):
    """The first seed of some that fails, and its script."""
    for seed in seeds:
        script = {}
        if fails(script, case, seed)[0] is not None:
            return seed, script
    return None, {}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name):
    """Each is found within a minute, by a script of at most 30 entries: the shortest that two seeds come to."""
    owner, method, planted, case = PLANTED[name]
    with mock.patch.object(owner, method, planted):
        first, script = hunted(case, range(2000))
        second, other = hunted(case, range((first or 0) + 1, 4000))
        assert None not in (first, second)
        short, spelled_out = min(spell(script, case, first), spell(other, case, second), key=lambda pair: len(pair[0]))
    print(name, spelled_out)
    assert len(short) <= 30
    assert fails(dict(short), case)[0] is None  # the real code bears it


@pytest.mark.long
def test_a_report_out_of_order_needs_weak_memory():
    """On x86 writes are seen in order, so a missing ``order`` changes nothing there."""
    owner, method, planted, case = PLANTED["a report that is not ordered before its count"]
    with mock.patch.object(owner, method, planted):
        campaign(range(100), replace(case, options={**case.options, "weak": False}))
