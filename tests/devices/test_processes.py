"""Processes of a launcher, which each drive one device, end in the digest of one process; so do those on CPUs."""

import json
import os
import subprocess

import pytest

from phalanx.callbacks import EMA
from tests.by_hand import answer
from tests.families import FAMILIES, OPTIMIZERS, terms
from tests.hosts.worlds import BEGIN, END, ended, started, world

FAKE = """
from tests import accelerator
accelerator.accelerator()
accelerator.accelerators.MENTIONED.add("local")
os.environ["LOCAL_RANK"] = str(rank)
device = [f"fake:{rank}"]
"""


def wanted(family, replicas, **changes):
    digest, losses = answer(FAMILIES[family].recipe(replicas, **changes))
    return [digest, losses]


@pytest.mark.longest
@pytest.mark.accelerator
@pytest.mark.parametrize("size", [2, 3])
def test_a_device_for_each_process(fake, size):
    """Named, as the launcher's, or by its kind: blocks of several sums, absent gradients and buffers end as in one."""
    given = {"optimizer": OPTIMIZERS["adamw"], "max_norm": 0.1, "batch_size": 13}
    cases = [("mlp", 4), ("conv_norm", 6), ("partly_unused", 5), ("mlp", 7)]
    found = world(
        FAKE
        + f"""
from tests.families import OPTIMIZERS
for name, replicas in {cases}:
    recipe = FAMILIES[name].recipe(replicas, optimizer=OPTIMIZERS["adamw"], max_norm=0.1, batch_size=13)
    for devices in (device, "local", "fake") if (name, replicas) == ("mlp", 4) else (device,):
        def trained():
            result = recipe.train(devices=devices, deadline_seconds=30)
            return [result.digest, result.loss_history]
        tried(trained)
""",
        size,
    )
    alone = [FAMILIES[name].recipe(replicas, **given).train(devices="fake:0") for name, replicas in cases]
    assert found == [[[result.digest, result.loss_history] for result in [alone[0]] * 2 + alone]] * size


@pytest.mark.longest
@pytest.mark.accelerator
def test_devices_of_two_hosts(fake):
    """Four processes on two hosts add up within each first, also what is sent early: the digest of one device."""
    found = world(
        FAKE
        + """
from phalanx.engines.hosts import world
world.host_name = lambda: f"host {rank // 2}"
rendezvous = world.World.rendezvous
world.World.rendezvous = lambda own, blocks: told.append(rendezvous(own, blocks).hosts) or rendezvous(own, blocks)
for name, replicas in [("mlp", 4), ("conv_norm", 7)]:
    result = FAMILIES[name].recipe(replicas, batch_size=13, steps=8).train(devices=device, deadline_seconds=30)
    told.append([result.digest, result.loss_history])
""",
        4,
    )
    given = {"batch_size": 13, "steps": 8}
    cases = [("mlp", 4), ("conv_norm", 7)]
    alone = [FAMILIES[name].recipe(replicas, **given).train(devices="fake:0") for name, replicas in cases]
    assert found == [[part for one in alone for part in (2, [one.digest, one.loss_history])]] * 4


@pytest.mark.longest
@pytest.mark.accelerator
def test_between_steps_on_devices(fake):
    """Evaluations, brought batches, weights between steps and averages are those of one process, in all of them."""
    program = """
import phalanx
def look(**options):
    x, y = FAMILIES["conv_norm"].data
    with FAMILIES["conv_norm"].recipe(4, steps=3).start(callbacks=[phalanx.callbacks.EMA(0.5)], **options) as run:
        seen = [next(run).loss, run.step((x[:9], y[:9])), next(run).grad_norm]
        seen.append(run.evaluate(torch.nn.functional.cross_entropy, (x, y), batch_size=7))
        averaged = {name: value.tolist() for name, value in run.averaged.items()}
        return [*seen, averaged, run.result().digest]
"""
    names = {}
    exec("import torch\nfrom tests.families import FAMILIES\n" + program, names)
    found = world(FAKE + program + "tried(lambda: look(devices=device, deadline_seconds=30))")
    alone = json.loads(json.dumps(names["look"](devices="fake:0")))
    assert found == [[alone], [alone]]


@pytest.mark.longest
def test_the_cpu_means_workers():
    """In a world, processes on the CPU have workers as they had without naming it, to the bits of one process."""
    found = world("""
for given in ({"devices": "cpu"}, {"devices": ["cpu"], "workers": 4}, {"workers": 2}):
    tried(lambda: (lambda result: [result.digest, result.loss_history])(
        family.recipe(4).train(deadline_seconds=30, **given)))
""")
    assert found == [[wanted("mlp", 4)] * 3] * 2


@pytest.mark.longest
@pytest.mark.accelerator
def test_several_devices_in_a_process_are_refused(fake):
    """A sentence says how to start a process for each; so it does for several CPUs."""
    found = world(
        FAKE
        + """
for devices in (["fake:0", "fake:1"], ["cpu", "cpu"]):
    tried(lambda: family.recipe(4).train(devices=devices, deadline_seconds=20).digest)
tried(lambda: family.recipe(4).train(devices=device if rank else "cpu", deadline_seconds=20).digest)
"""
    )
    for told in found:
        assert all("devices names 2 devices in each of 2 processes; start a process" in one for one in told[:2])
        assert "Error" in told[2]
        assert "fake" in told[2]


@pytest.mark.longest
@pytest.mark.accelerator
def test_what_one_process_raises_ends_all(fake):
    """The error of user code reaches its own process, and the others hear who left and why."""
    found = world(
        FAKE
        + """
def loss(output, target):
    if rank == 1:
        raise KeyError("seven")
    return family.loss_fn(output, target)
tried(lambda: family.recipe(4, loss_fn=loss).train(devices=device, deadline_seconds=20).digest)
"""
    )
    assert "KeyError in user code at step 0, replica 2" in found[1][0]
    assert "process 1" in found[0][0]
    assert "KeyError" in found[0][0]


@pytest.mark.longest
@pytest.mark.accelerator
@pytest.mark.parametrize("whole", [False, True])
def test_others_go_on(fake, whole):
    """A worker that is killed, or its process: the others go on, with the average of weights that devices keep, too."""
    recipe = f"""
from phalanx.callbacks import EMA
def finish():
    recipe = family.recipe(6, steps=60)
    with recipe.start(devices=device, deadline_seconds=20, lost_after=3.0, callbacks=[EMA(0.9)]) as run:
        for report in run:
            if rank == 1 and report.step == 30:
                os.kill(os.getpid() if {whole} else run.worker_pids[0], 9)
        result = run.result()
    averaged = [value.tolist() for value in result.averaged.values()]
    return [result.digest, averaged, [each.kind for each in result.incidents if each.kind in ("lost", "again")]]
tried(finish)
"""
    processes = started(BEGIN + FAKE + recipe + END, 3, {}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        found = [process.communicate(timeout=100) for process in processes]
    finally:
        ended(processes)
    alone = FAMILIES["mlp"].recipe(6, steps=60).train(devices="fake:0", callbacks=[EMA(0.9)])
    averaged = [value.tolist() for value in alone.averaged.values()]
    for number in [0, 2] if whole else [0, 1, 2]:
        assert processes[number].returncode == 0, found[number]
        told = json.loads(found[number][0].splitlines()[-1])[0]
        assert told == [alone.digest, averaged, ["lost" if whole else "again"]], found[number]


@pytest.mark.longest
@pytest.mark.accelerator
def test_resumed_by_one_process(fake, tmp_path):
    """What two processes with a device each began, one with three devices goes on with."""
    program = f"tried(lambda: family.recipe(4, steps=3).train(devices=device, run_dir={str(tmp_path)!r}).steps)"
    assert world(FAKE + program) == [[3], [3]]
    recipe = FAMILIES["mlp"].recipe(4, steps=6)
    devices = [f"fake:{number}" for number in range(3)]
    assert recipe.train(devices=devices, run_dir=tmp_path).digest == recipe.train(devices="fake:0").digest


@pytest.mark.longest
@pytest.mark.accelerator
def test_faults_are_seen(fake):
    """Sums in another order end in another digest; a mean of its own in one process is found in the next step.

    Negative twin: where norms are not compared it is not found, and the processes end in two digests.
    """
    found = world(
        FAKE
        + """
from tests.families import terms
from tests.devices.planting import Planted
from tests.devices.test_processes import in_order_of_arrival, norms_uncompared, other_mean_on_one
for plant in (None, in_order_of_arrival, other_mean_on_one, norms_uncompared):
    recipe = terms(6)
    make_model = recipe.make_model if plant is None else Planted(recipe.make_model, plant)
    tried(lambda: dataclasses.replace(recipe, make_model=make_model).train(devices=device, deadline_seconds=20).digest)
"""
    )
    right = terms(6).train(devices="fake:0").digest
    assert [told[0] for told in found] == [right, right]
    assert all(told[1] != right for told in found)
    assert all("CorruptionError: process" in told[2] and "in its norm" in told[2] for told in found), found
    assert len({told[3] for told in found}) == 2, found


def in_order_of_arrival(patch):
    """Additions from the last to the first."""
    from phalanx.engines import flat

    patch.setattr(flat, "added", lambda count, nodes, there: [(there[0], other) for other in there[1:][::-1]])


def other_mean_on_one(patch):
    """One process's device computes another mean."""
    from phalanx.engines.devices.exchanged import Exchanged

    plain = Exchanged.mean

    def mean(sums, *facts):
        vector = plain(sums, *facts)
        if os.environ["RANK"] == "1":
            next(entry for entry in vector if entry is not None).view(-1)[0] += 1  # planted
        return vector

    patch.setattr(Exchanged, "mean", mean)


def norms_uncompared(patch):
    """The same, and nobody compares norms."""
    from phalanx.engines.hosts.board import Network

    other_mean_on_one(patch)
    patch.setattr(Network, "note", lambda board, norm: None)
