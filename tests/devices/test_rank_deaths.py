"""Workers with a copy of the state each die at any point, some or all of them: no bit is another."""

import dataclasses
import functools
import os
import signal
import time
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import phalanx
from phalanx.engines.devices import transport
from phalanx.engines.processes import driver
from phalanx.engines.processes.worker import Worker
from phalanx.engines.recovery.supervisor import Supervisor
from phalanx.plan.lifecycle import Stage
from tests.devices.planting import Planted
from tests.devices.ranks import (
    MLP,
    NORM,
    devices,
    trained,
)
from tests.engines.deaths import PLACES, Trapped, hunted, once, sprung, strike
from tests.families import ADAMW, SCHEDULERS, conv_norm
from tests.sampling import cover, generator, sample


def norm_recipe(make_model=conv_norm, **changes):
    """Buffers, clipping and a schedule: everything that has to be put back right."""
    given = {"optimizer": ADAMW, "scheduler": SCHEDULERS["cosine"], "max_norm": 0.5, "steps": 8}
    return NORM.recipe(4, make_model=make_model, **(given | changes))


@pytest.fixture(scope="module")
def wanted():
    """What the run would have been."""
    return trained(norm_recipe(), 1)


@pytest.mark.long
@pytest.mark.parametrize(("place", "worker"), cover("deaths of ranks", PLACES, (0, 1, 2)))
def test_a_death_at_every_named_point(tmp_path, wanted, worker, place):
    """SIGKILL of each worker at each point of a step: a survivor has the state, and every step is told of once."""
    step, seen = 1 if place == "half saved" else 4, []
    recipe = norm_recipe(Trapped(conv_norm, tmp_path, worker, step, place))
    assert trained(recipe, 3, callbacks=[lambda report: seen.append(report.step)]) == wanted
    assert seen == list(range(8))
    assert sprung(tmp_path) == 1


class Unannounced(Trapped):
    """The first worker ends before it has written the report of a step that the others may have done."""

    def set(self):

        trap, announce = self, Worker._announce

        def late(worker, step, *facts):
            if step == trap.step and once(trap.folder, "unannounced"):
                end, others = time.monotonic() + 1, worker._counters.workers[1:]
                while time.monotonic() < end and any(other.progress.stage < Stage.UPDATED for other in others):
                    time.sleep(0.001)
                strike(signal.SIGKILL)
            announce(worker, step, *facts)

        Worker._announce = late


@pytest.mark.long
def test_no_step_is_done_before_it_can_be_told_of(tmp_path, wanted):
    """Nobody updates before the first worker has written the report: nobody else could."""
    assert trained(norm_recipe(Unannounced(conv_norm, tmp_path, 0, 4, "")), 2) == wanted
    assert sprung(tmp_path) == 1


@pytest.mark.long
@pytest.mark.parametrize("place", sample("all but one", ["COMPUTING", "FOLDING", "FOLDED", "UPDATING", "UPDATED"], 1))
def test_all_workers_but_one(tmp_path, wanted, place):
    """The last one hands its state over."""
    make_model = conv_norm
    for number in (0, 1):
        make_model = Trapped(make_model, tmp_path, number, 4, place)
    assert trained(norm_recipe(make_model), 3) == wanted
    assert sprung(tmp_path) >= 1


@pytest.mark.parametrize("place", sample("all of them", ["COMPUTING", "FOLDING", "UPDATING", "UPDATED"], 1))
def test_all_workers(tmp_path, wanted, place):
    """With all of them the newest state is gone: the run goes back to the snapshot in memory."""
    make_model = conv_norm
    for number in (0, 1):
        make_model = Trapped(make_model, tmp_path, number, 4, place)
    assert trained(norm_recipe(make_model), 2) == wanted
    assert sprung(tmp_path) >= 1


def saving_each_step(patch):
    """No fault: a snapshot in memory is due before every step."""
    patch.setattr("phalanx.engines.processes.worker.next_snapshot", lambda t, *_, **__: t + 1)


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("place", ["UPDATED", "COMPUTING"])
def test_all_workers_before_a_snapshot_that_is_due(tmp_path, place):
    """One that was announced, and not begun when all ended, is not gone back to; one that all have finished is."""
    make_model = MLP.make_model
    for number in (0, 1):
        make_model = Trapped(make_model, tmp_path, number, 4, place)
    recipe = MLP.recipe(4, steps=8, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    faulty = dataclasses.replace(recipe, make_model=Planted(make_model, saving_each_step))
    assert trained(faulty, 2) == trained(recipe, 1)
    assert sprung(tmp_path) == 2


@pytest.mark.long
def test_all_workers_while_the_snapshot_is_taken(tmp_path):
    """There is one snapshot in memory; if all end while it is written, the run ends, and a run_dir goes on."""
    make_model = MLP.make_model
    for number in (0, 1):
        make_model = Trapped(make_model, tmp_path, number, 4, "SAVING")
    recipe = MLP.recipe(4, steps=8, make_model=Planted(make_model, saving_each_step))
    folder = tmp_path / "run"
    with pytest.raises(phalanx.RunError, match="while their state was being copied"):
        trained(recipe, 2, run_dir=folder, snapshot_every=1)
    assert trained(recipe, 2, run_dir=folder) == trained(MLP.recipe(4, steps=8), 1)


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("whom", ["the source", "another"])
def test_a_death_while_the_state_is_handed_over(tmp_path, wanted, monkeypatch, whom):
    """The survivor that was to hand its state over dies, or another one: the next one does it."""
    handed_over, struck = Supervisor._handed_over, []

    def fatal(supervisor):
        if not struck:
            alive = sorted(supervisor._pool.alive)  # planted
            struck.append(before[alive[0 if whom == "the source" else -1]])
            os.kill(struck[0], signal.SIGKILL)
        return handed_over(supervisor)

    monkeypatch.setattr(Supervisor, "_handed_over", fatal)
    with norm_recipe(Trapped(conv_norm, tmp_path, 1, 4, "FOLDING")).start(devices=["cpu"] * 3) as run:
        before = run.worker_pids
        run.finish()
        result = run.result()
    assert len(struck) == 1
    assert (result.digest, result.loss_history) == wanted


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_kills_at_random(count):
    """Workers that are killed at any time, one after another, move no bit."""
    draw = generator(f"kills of {count} ranks")
    recipe = norm_recipe(steps=60)
    with recipe.start(devices=["cpu"] * count, max_failures=1000) as run:
        with hunted(run, lambda: draw.uniform(0, 0.2), most=8) as ended:
            run.finish()
        result = run.result()
    assert ended
    assert (result.digest, result.loss_history) == trained(recipe, 1)


def dying(flag, patch):
    """A worker that ends when it is to meet the others, the first one of all."""
    make = transport.Gloo

    def meet(*facts):
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return make(*facts)
        return os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(transport, "Gloo", meet)


@pytest.mark.long
@pytest.mark.timeout(100)
def test_a_death_while_workers_meet(wanted, tmp_path):
    """The others go on at once. They waited in torch until it gave up, which is after an hour here."""
    recipe = norm_recipe()
    recipe = dataclasses.replace(
        recipe, make_model=Planted(recipe.make_model, functools.partial(dying, str(tmp_path / "flag")))
    )
    with mock.patch.object(driver, "CONNECTING", 3600.0):
        result = recipe.train(devices=["cpu"] * 3, deadline_seconds=3600.0)
    assert (result.digest, result.loss_history) == wanted
    assert [incident.kind for incident in result.incidents][:1] == ["death"]


@pytest.mark.long
def test_a_death_in_an_evaluation(wanted):
    """It is done again by everybody, and the run goes on."""
    with norm_recipe().start(devices=["cpu"] * 2) as run:
        next(run)
        before = run.evaluate(F.cross_entropy, NORM.data, batch_size=7)
        for pid in run.worker_pids:
            os.kill(pid, signal.SIGKILL)
            assert run.evaluate(F.cross_entropy, NORM.data, batch_size=7) == before
        run.finish()
        result = run.result()
    assert (result.digest, result.loss_history) == wanted


@pytest.mark.long
@pytest.mark.parametrize("place", sample("brought to ranks", ["COMPUTING", "UPDATING", "half updated", "UPDATED"], 1))
@pytest.mark.parametrize("whom", [(1,), (0, 1)])
def test_batches_that_the_caller_brought(tmp_path, whom, place):
    """They are kept until a snapshot covers them, also if all workers end."""
    x, y = MLP.data

    def look(make_model, count):
        recipe = phalanx.Recipe(make_model, None, F.cross_entropy, replicas=3, optimizer=ADAMW)
        with recipe.start(**devices(count)) as run:
            losses = [run.step((x[at : at + 9], y[at : at + 9])) for at in range(7)]
            return losses, run.result().digest

    make_model = MLP.make_model
    for number in whom:
        make_model = Trapped(make_model, tmp_path, number, 5, place)
    assert look(make_model, 2) == look(MLP.make_model, 1)
    assert sprung(tmp_path) >= 1


@pytest.mark.long
def test_a_worker_that_hangs(tmp_path, wanted):
    """It counts as dead after ``deadline_seconds``, also for those that wait for its gradients."""
    recipe = norm_recipe(Trapped(conv_norm, tmp_path, 1, 4, "FOLDING", signal.SIGSTOP))
    assert trained(recipe, 2, deadline_seconds=2.0) == wanted
    assert sprung(tmp_path) == 1
