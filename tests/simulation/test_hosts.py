"""Runs over simulated hosts: whatever befalls them, each step is told once, the state is right, one side goes on.

A test that fails prints a script. ``Simulation(size, STEPS, script)`` does the same again.
"""

import itertools
import os

import pytest

from phalanx.engines.hosts import driver, members
from phalanx.engines.hosts.driver import Distributed
from phalanx.engines.hosts.messages import OTHER_VERSION
from phalanx.errors import LeftError, PhalanxError
from phalanx.plan import membership
from tests.sampling import SEED
from tests.simulation.disk import MOUNTS
from tests.simulation.hosts import ALONE, FOLDER, ONE, Simulation
from tests.simulation.net import Process
from tests.simulation.schedule import Stuck, shortened, spelled
from tests.simulation.verdict import check, spelled_half

STEPS, DOUBLES = 3, 1500
SCHEDULES = int(os.environ.get("PHALANX_SCHEDULES", "2800"))  # of a campaign, for each number of hosts


def failure(script, size, seed=None):
    """What does not hold after a run, and the faults that struck."""
    simulation = Simulation(size, STEPS, script, seed)
    try:
        check(simulation.run())
    except (AssertionError, Stuck, PhalanxError, RuntimeError, TypeError, KeyError, OSError) as error:
        return f"{type(error).__name__}: {error}", simulation.schedule.struck
    return "", simulation.schedule.struck


def told(script, size, why):
    """A script that fails, without what it does not need, as lines for a test."""
    short = shortened(script, lambda less: bool(failure(less, size)[0]))
    return "\n".join([why, f"failure(script, {size}), where script is {{", *spelled(short), "}"])


def holds(scripts, size):
    """Try scripts, or seeds; returns how many faults struck."""
    struck = 0
    for given in scripts:
        script, seed = ({}, given) if isinstance(given, int) else (dict(given), None)
        why, faults = failure(script, size, seed)
        assert not why, f"seed {seed}: {told(script, size, why)}"
        struck += len(faults)
    return struck


def faults(size, mounts=()):
    """All faults that can befall so many hosts, and the mounts of a folder."""
    alone = [(fault, rank) for fault in (*ALONE, "start", *mounts) for rank in range(size)]
    cut = [("cut", *pair) for pair in itertools.combinations(range(size), 2)]
    pairs = itertools.product(("deaf", "slow", *ONE), itertools.permutations(range(size), 2))
    return [*alone, *cut, *[(fault, *pair) for fault, pair in pairs]]


def actions(size, script=()):
    """How many actions an undisturbed run has."""
    return Simulation(size, STEPS, dict(script)).run().schedule.actions


def spread(cases, count):
    """So many of the cases, evenly."""
    return cases[:: max(1, len(cases) // count)]


def singles(size):
    """Each fault at each action; nobody has to be started again yet."""
    alone = [fault for fault in faults(size) if fault[0] != "start"]
    return [{at: fault} for fault in alone for at in range(1, actions(size) + 1)]


def doubles(size, count):
    """Two faults, evenly over all pairs of faults and of actions."""
    pairs, last = list(itertools.product(faults(size), repeat=2)), actions(size)
    scripts = []
    for number in range(count):
        one, other = pairs[number * len(pairs) // count]
        at = 1 + number * 7919 % last
        scripts.append({at: one, at + 1 + number * 104_729 % (last + 100): other})
    return scripts


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_a_fault_at_some_actions(size):
    """One fault, at actions all over a run, leaves all that must hold."""
    assert holds(spread(singles(size), 60), size) > 30


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_two_faults(size):
    """A second fault while the first is dealt with, too."""
    assert holds(doubles(size, 60), size) > 60


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_schedules(size):
    """Up to three faults at any time, and turns in any order."""
    assert holds(range(1000 * SEED, 1000 * SEED + 50), size) > 50


def halves(size, count):
    """With a folder, hosts fall apart into halves; another fault comes a little earlier or later."""
    befalling, last = [each for each in faults(size, MOUNTS) if each[0] != "start"], actions(size, FOLDER)
    apart = [("cut", 0, 1)] if size == 2 else [("halve", 0, rank) for rank in range(1, size)]
    scripts = []
    for number in range(count):
        at, later = 30 + number * 7919 % (last - 30), number * 104_729 % 120 - 20
        scripts.append(FOLDER | {at: apart[number % len(apart)], at + later: befalling[number % len(befalling)]})
    return scripts


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_halves_that_see_one_folder(size):
    """Whatever befalls hosts, links and mounts, the half that goes on is the one that has claimed that."""
    assert holds(halves(size, 40), size) > 40


@pytest.mark.parametrize("size", [2, 3])
def test_ctrl_c_twice(size):
    """Nothing waits after a second one, and all others that are not done learn that the run was closed."""
    told = 0
    for at in range(1, actions(size), 10):
        simulation = Simulation(size, STEPS, {at: ("interrupt", 0), at + 1: ("interrupt", 0)}).run()
        check(simulation)
        first = simulation.runs.pop(Process(0, 0))
        if first.end == "interrupted" and first.engine is not None:
            left = [run.end for run in simulation.runs.values() if run.end != "done"]
            assert all(isinstance(end, LeftError) for end in left), f"action {at}: {left}"
            told += len(left)
    assert told > 5


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(11))
@pytest.mark.parametrize("size", [2, 3])
def test_a_fault_at_every_action(size, part):
    """One fault at every action of a run."""
    scripts = singles(size)[part::11]
    assert holds(scripts, size) > len(scripts) / 2


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("size", [2, 3])
def test_many_pairs_of_faults(size, part):
    """Pairs of faults, evenly over all of them."""
    assert holds(doubles(size, DOUBLES)[part::4], size) > DOUBLES // 4


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("size", [2, 4])
def test_many_halves(size, part):
    """Halves that see one folder, at many actions."""
    assert holds(halves(size, DOUBLES)[part::4], size) > DOUBLES // 4


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_random_schedules(size, part):
    """As many random schedules as PHALANX_SCHEDULES says."""
    first = 1_000_000 * (SEED + 1)
    assert holds(range(first + part, first + SCHEDULES, 4), size) > 0


# What broke once, and the faults that showed it. An action may have moved since, so several are tried.
ONCE = {
    "a member that was behind at the first step was not told of it": (3, ("deaf", 2, 0), range(208, 232)),
    "a host that fell while workers started ended the run everywhere": (3, ("kill", 1), range(160, 206)),
    "a store that ended while facts were told was an error of torch": (3, ("kill", 0), range(58, 92)),
    "who was stopped after its last step was lost, and left its workers": (3, ("freeze", 1), range(240, 400)),
}


# The same for several faults.
SEVERAL = {
    "who was left behind in an evaluation said that it closed the run": (
        4, {391: ("freeze", 1), 626: ("thaw", 1), 650: ("freeze", 2)}
    ),
    "who could not list its folder any more ended by an error of the system": (2, FOLDER | {126: ("unread", 0)}),
    "both halves went on, as one made its link where nothing was mounted any more": (
        2, FOLDER | {185: ("cut", 0, 1), 197: ("unmount", 0)}
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("what", SEVERAL)
def test_what_several_faults_broke_once(what):
    """Faults that once led to something wrong together, at their distance, some actions earlier and later."""
    size, script = SEVERAL[what]
    moved = [{at and at + later: fault for at, fault in script.items()} for later in range(-10, 11)]
    assert holds(moved, size) >= len(moved)


@pytest.mark.long
@pytest.mark.parametrize("what", ONCE)
def test_what_broke_once(what):
    """A fault that once led to something wrong, at each action around the one that showed it."""
    size, fault, moments = ONCE[what]
    assert holds([{at: fault} for at in moments], size) > 0


def test_an_agreement_is_quiet():
    """Members that agree over slow links speak at every tick. They once did at every message, and flooded the net."""
    simulation = Simulation(3, STEPS, {185: ("slow", 0, 1), 213: ("slow", 1, 0), 225: ("kill", 2)}).run()
    check(simulation)
    assert len(simulation.schedule.struck) == 3
    assert simulation.schedule.actions < 1300


def test_a_script_replays():
    """The decisions of a seed, without the seed, lead to the same actions and ends."""
    script = {}
    first = Simulation(3, STEPS, script, seed=5).run()
    again = Simulation(3, STEPS, dict(script)).run()
    assert first.schedule.struck == again.schedule.struck
    assert first.schedule.actions == again.schedule.actions
    assert [repr((run.told, run.end)) for run in first.runs.values()] == [
        repr((run.told, run.end)) for run in again.runs.values()
    ]


def test_a_process_that_starts_again_joins():
    """It is told of the steps from where it joined on, to the same state."""
    simulation = Simulation(3, 6, {255: ("kill", 2), 265: ("start", 2)}).run()
    check(simulation)
    joined = max(process for process in simulation.runs if process.rank == 2)
    assert joined.life == 1
    assert simulation.runs[joined].end == "done"


def test_a_message_of_another_version():
    """It is dropped and counted, and ends nothing, though its MAC is right."""
    counted = 0
    for at in range(1, actions(2), 20):
        simulation = Simulation(2, STEPS, {at: ("outdate", 0, 1)}).run()
        check(simulation)
        assert {run.end for run in simulation.runs.values()} == {"done"}
        counted += simulation.runs[Process(1, 0)].world.members.door.dropped[OTHER_VERSION]
    assert counted > 5


def test_either_half_goes_on():
    """Where all see one folder, the half that is first does all steps, whichever that is; the other one ends."""
    claims = set()
    for at in range(600, 760, 20):
        simulation = Simulation(4, STEPS, FOLDER | {at: ("halve", 0, 1)}).run()
        check(simulation)
        (claim,) = {simulation.disk.claim(run.world.members.run, 0) for run in simulation.runs.values()}
        done = [process.rank for process, run in simulation.runs.items() if run.end == "done"]
        assert spelled_half(done) == claim
        claims.add(claim)
    assert claims == {"0 1", "2 3"}


def any_half(some, chosen):
    """Planted: any half may go on."""
    return 2 * len(set(some) & set(chosen)) >= len(some)


def split(monkeypatch):
    """Planted: an agreement without a majority."""
    for module in (membership, members):
        monkeypatch.setattr(module, "quorum", any_half)


def each_first(monkeypatch):
    """Planted: whoever claims to go on is told that it is the first."""
    monkeypatch.setattr(members, "first", lambda path, word: word)


def late(monkeypatch):
    """Planted: who joins takes the state with one step fewer."""
    unpacked = driver.unpacked

    def fewer(content):
        captured, history = unpacked(content)
        history["losses"], history["observed"] = history["losses"][:-1], history.get("observed", 1) - 1
        history["reports"] = []
        return captured, history

    monkeypatch.setattr(driver, "unpacked", fewer)


def forgotten(monkeypatch):
    """Planted: a member that falls while the next incarnation begins is not dealt with."""

    def once(self, chosen):
        if chosen is not None:
            self._world.next(chosen)
            self._share(chosen)
        return chosen, self._on_this_host()

    monkeypatch.setattr(Distributed, "_entered", once)


def stale(monkeypatch):
    """Planted: after that, the value that was chosen before is taken again."""
    agreed = Distributed._agreed

    def kept(self):
        self.value = getattr(self, "value", None) or agreed(self)
        return self.value

    monkeypatch.setattr(Distributed, "_agreed", kept)


def unrepeated(monkeypatch):
    """Planted: an evaluation that a fall breaks off is not done again."""
    monkeypatch.setattr(Distributed, "evaluate", lambda self, *facts: self.engine.evaluate(*facts))


def twice(monkeypatch):
    """Planted: a step that was done while an incarnation ended is told, and told again."""
    advanced = Distributed._advanced

    def again(self, step, batch, horizon):
        kept, unseen = vars(self).setdefault("kept", set()), self.progress.unseen
        if unseen and unseen[0].step not in kept:
            kept.add(unseen[0].step)
            return unseen[0]
        return advanced(self, step, batch, horizon)

    monkeypatch.setattr(Distributed, "_advanced", again)


@pytest.mark.long
@pytest.mark.parametrize("plant", [split, each_first, late, forgotten, stale, twice, unrepeated])
def test_planted_faults_are_found(plant, monkeypatch):
    """Each is found by some of the first seeds, or by a second fall soon after the first; its script is short."""
    plant(monkeypatch)
    size = 2 if plant in (split, each_first) else 3
    falls = [({330: ("kill", 2), 330 + later: ("kill", 1)}, None) for later in range(10, 300, 6)]
    for script, seed in falls if plant is forgotten else [({}, seed) for seed in range(1000)]:
        if failure(script, size, seed)[0]:
            break
    short = shortened(script, lambda less: bool(failure(less, size)[0]))
    print(f"{plant.__name__}: seed {seed}, {len(script)} decisions, {len(short)} are needed")
    assert failure(dict(short), size)[0]
    assert len(short) <= 30
