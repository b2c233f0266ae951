"""Collectives that never end once a peer is gone, as NCCL's: survivors break them off before they look at their device.

Runs here have a long deadline: who hung is ended only when it is over. So no test waits for that: one death is one.
"""

import dataclasses
import json
import os
import subprocess
import threading

import pytest

from phalanx.engines.devices import transport
from phalanx.engines.devices.exchanged import Exchanged
from phalanx.engines.processes.tasks import HandOver
from phalanx.engines.processes.worker import Worker
from phalanx.plan.lifecycle import Stage
from tests import accelerator
from tests.accelerator import ccl
from tests.devices.accelerated import Noting, noisy, notes
from tests.devices.planting import Planted, in_worker, mark_caller
from tests.engines.deaths import Trapped, sprung
from tests.families import ADAMW, FAMILIES
from tests.hosts.worlds import BEGIN, END, ended, started
from tests.sampling import sample

pytestmark = pytest.mark.accelerator
MLP = FAMILIES["mlp"]
ON_THE_WAY = ["all_to_all", "gather"]  # places beside the named ones: others begin this, and it does not
PLACES = [*(stage.name for stage in Stage), *ON_THE_WAY]


class OfRank(Trapped):
    """A trap for the worker of one process of a world, whose recipes must be alike."""

    def __init__(self, *arguments, rank=None):
        super().__init__(*arguments)
        self.rank, self.parent = rank, None
        mark_caller()

    def set(self):
        if in_worker():
            super().set()

    def spring(self):
        if self.rank in (None, os.environ.get("RANK")):
            super().spring()


class NeverBegun(OfRank):
    """A trap that springs when something is to be begun between devices."""

    def set(self):
        super().set()
        trap, plain = self, getattr(transport.Transport, self.place)

        def begun(link, *arguments):
            if hasattr(trap, "seen"):  # not while workers meet
                trap.spring()
            return plain(link, *arguments)

        setattr(transport.Transport, self.place, begun)


def trapped(recipe, folder, worker, place, rank=None, fault=None, step=3):
    """A recipe whose worker ``worker`` is killed there, of process ``rank`` of a world; all workers have the fault."""
    trap = NeverBegun if place in ON_THE_WAY else OfRank
    make_model = recipe.make_model if fault is None else Planted(recipe.make_model, fault)
    return dataclasses.replace(recipe, make_model=trap(make_model, str(folder), worker, step, place, rank=rank))


def recipe(replicas=6, **changes):
    return MLP.recipe(replicas, steps=7, max_norm=0.1, optimizer=ADAMW, **changes)


def trained(made, count, **options):
    """Digest and losses, and what befell workers."""
    result = made.train(devices=[f"fake:{number}" for number in range(count)], **options)
    return (result.digest, result.loss_history), [each.kind for each in result.incidents]


def threads_and_hangs():
    """How many threads this process has, and how many of its collectives have hung."""
    return f"{threading.active_count()} {ccl.COUNTS['hangs']}"


@pytest.fixture(scope="module")
def wanted():
    accelerator.accelerator()
    return trained(recipe(), 1)[0]


CASES = [(place, count, worker) for place in PLACES for count in (2, 3) for worker in {0, count - 1}]


@pytest.mark.long
@pytest.mark.parametrize(("place", "count", "worker"), sample("hanging collectives", CASES, 3))
def test_a_death_at_every_point(fake, tmp_path, wanted, place, count, worker):
    """The others are on at once, to the same bits; nobody else dies, and no thread is left behind in them."""
    (tmp_path / "traps").mkdir()
    (tmp_path / "notes").mkdir()
    made = trapped(recipe(loss_fn=Noting(tmp_path / "notes", threads_and_hangs)), tmp_path / "traps", worker, place)
    found, incidents = trained(made, count)
    assert found == wanted
    assert (sprung(tmp_path / "traps"), incidents) == (1, ["death", "replaced"])
    last = [line.split() for lines in notes(tmp_path / "notes").values() for line in lines[-1:]]
    assert len({threads for threads, _ in last}) == 1
    assert place not in ON_THE_WAY or any(int(hangs) for _, hangs in last), "nothing hung"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ON_THE_WAY)
def test_a_death_in_the_first_step_with_buffers(fake, tmp_path, place):
    """What a step prepares on a device once only is there before a collective can hang: nobody waits for the device."""
    made = noisy()
    wanted = trained(made, 1)
    assert trained(trapped(made, tmp_path, 1, place, step=0), 2) == (wanted[0], ["death", "replaced"])


def never_left(patch):
    """Nobody breaks the exchange off."""
    patch.setattr(Exchanged, "leave", lambda sums: None)


def copied_before(patch):
    """The exchange is broken off only once the state was handed over."""
    patch.setattr(Worker, "_fail", lambda worker: setattr(worker._counters, "trouble", 1))
    do = HandOver.do

    def late(task, worker):
        state = do(task, worker)
        worker._link.leave()
        return state

    patch.setattr(HandOver, "do", late)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [never_left, copied_before], ids=lambda fault: fault.__name__)
def test_who_does_not_leave_hangs(fake, tmp_path, wanted, fault):
    """Negative twin: a survivor that looks at its device before it has left hangs until the deadline ends it, too."""
    made = trapped(recipe(), tmp_path, 1, "FOLDING", fault=fault)
    found, incidents = trained(made, 2, deadline_seconds=4)
    assert found == wanted
    assert incidents.count("death") > 1 or "hung" in incidents, incidents


WORLD = """
from tests import accelerator
from tests.devices import test_hanging
from phalanx.engines.hosts import world
accelerator.accelerator()
accelerator.accelerators.MENTIONED.add("local")
os.environ["LOCAL_RANK"] = str(rank)
world.host_name = lambda: f"host {{rank // {each}}}"
recipe = test_hanging.trapped(test_hanging.recipe(8, batch_size=16), {folder!r}, 0, {place!r},
    rank="{victim}", fault=getattr(test_hanging, "{fault}", None))
def finish():
    result = recipe.train(devices=[f"fake:{{rank}}"], deadline_seconds={deadline}, lost_after=2.0)
    return [result.digest, result.loss_history, [each.kind for each in result.incidents]]
tried(finish)
"""


def world_struck(folder, place, size, each, victim, fault=None, deadline=60):
    """What processes tell, ``each`` of them on a host, one's worker killed at ``place``; None of one that failed."""
    program = BEGIN + WORLD.format(**locals() | {"folder": str(folder)}) + END
    processes = started(program, size, {}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        found = [process.communicate(timeout=240) for process in processes]
    finally:
        ended(processes)
    ends = zip(processes, found, strict=True)
    return [None if process.returncode else json.loads(out.splitlines()[-1])[0] for process, (out, _) in ends]


WORLDS = [(place, size, each) for place in PLACES for size, each in ((2, 2), (3, 3), (2, 1), (4, 2))]


@pytest.mark.longest
@pytest.mark.parametrize(("place", "size", "each"), WORLDS)
def test_a_death_at_every_point_under_a_launcher(fake, tmp_path, place, size, each):
    """On one host, on two, and with two levels: all go on at once to the same bits, and no other worker dies."""
    digest, losses = trained(recipe(8, batch_size=16), 1)[0]
    told = world_struck(tmp_path, place, size, each, size - 1)
    assert len(os.listdir(tmp_path)) == 1
    assert [one[:2] for one in told] == [[digest, losses]] * size
    assert [one[2].count("death") for one in told] == [0] * (size - 1) + [1], told


def one_by_one(patch):
    """Communicators are aborted one after another, where each waits for the others' kernels."""
    patch.setattr(transport, "_abort", lambda groups, _: [group.abort() for group in groups])


@pytest.mark.longest
def test_communicators_that_are_aborted_one_by_one_hang(fake, tmp_path):
    """Negative twin: with two levels that never ends, and processes are lost that nobody killed."""
    told = world_struck(tmp_path, "all_to_all", 4, 2, 3, fault="one_by_one", deadline=4)
    assert not all(told) or any("lost" in one or "lost" in one[2] for one in told), told
