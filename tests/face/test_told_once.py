"""A step that was done is told whole: what an exception or Ctrl-C left of it is done before anything else."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

import phalanx
from phalanx.callbacks import EMA, EarlyStopping, Log, SaveBest

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(48, 1, generator=torch.Generator().manual_seed(1))
STEPS = 24
WAYS = {"inline": {"engine": "inline"}, "W2": {"workers": 2}, "auto": {"workers": "auto"}}
PLACES = ["metric", "step", "evaluated", "function", "loss"]


class Once:
    """Does something at its ``number``-th call in all processes together, and never again."""

    def __init__(self, path, act, number):
        self.path, self.act, self.number, self.caller = path, act, number, os.getpid()

    def __call__(self):
        if self.act is None:
            return
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b".")
        count = os.lseek(descriptor, 0, os.SEEK_CUR)  # behind what this call has written
        os.close(descriptor)
        if count == self.number:
            self.act(self.caller)


def refuse(caller):
    raise OSError("no server")


def press(caller):
    os.kill(caller, signal.SIGINT)
    if os.getpid() == caller:
        time.sleep(0.01)  # until the main thread hears of it


def metric(once, output, target):
    once()
    return (output - target).abs().mean()


def loss(once, output, target):
    once()
    return (output - target).square().mean()


def no_metric(output, target):
    raise ValueError("no metric today")


class Witness:
    """Writes down what it is told; something may happen on the way."""

    def __init__(self, once_in_step, once_in_evaluated):
        self.steps, self.values = [], []
        self.once_in_step, self.once_in_evaluated = once_in_step, once_in_evaluated

    def step(self, report):
        self.steps.append(report.step)
        self.once_in_step()

    def evaluated(self, values):
        self.values.append(next(iter(values.values())))
        self.once_in_evaluated()


def scheduler(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.3)


class Job:
    """A run with everything that depends on a step being told whole."""

    def __init__(self, folder, place=None, act=None, number=0):
        acts = {name: Once(folder / name, act if name == place else None, number) for name in PLACES}
        self.folder, self.acts, self.metric = folder, acts, functools.partial(metric, acts["metric"])
        self.witness, self.seen = Witness(acts["step"], acts["evaluated"]), []
        self.ema, self.best = EMA(0.9), SaveBest("error", mode="min")

    def function(self, report):
        self.seen.append((report.step, report.metric))
        self.acts["function"]()

    def begin(self, **options):
        loss_fn = functools.partial(loss, self.acts["loss"])
        recipe = phalanx.Recipe(
            functools.partial(nn.Linear, 6, 1), (X, Y), loss_fn, replicas=2, batch_size=12, steps=STEPS, lr=0.1,
            scheduler=scheduler, schedule_every="epoch", schedule_on="error",
        )  # fmt: skip
        callbacks = [self.ema, self.witness, self.function, self.best, Log("csv"), EarlyStopping("error", patience=3)]
        evaluation = phalanx.Evaluation({"error": self.metric}, (X, Y), batch_size=16, every_steps=2)
        return recipe.start(
            run_dir=self.folder, callbacks=callbacks, evaluation=evaluation, chain="every", snapshot_every=4, **options
        )

    def end(self, run):
        """All that can be told of the run."""
        result = run.result()
        averaged = phalanx.digest(torch.nn.ParameterDict(result.averaged))
        best = {name: tensor.tolist() for name, tensor in result.best.weights.items()}
        return {
            "digest": result.digest, "chain": result.chain, "steps": result.steps, "losses": result.loss_history,
            "metrics": [(item.steps, item.value) for item in result.metric_history], "averaged": averaged,
            "best": (result.best.steps, best), "stopped": result.stopped_early,
            "log": [line.split(",")[:3] for line in (self.folder / "log.csv").read_text().splitlines()],
        }  # fmt: skip

    def told(self):
        return {"steps": self.witness.steps, "values": self.witness.values, "seen": self.seen}


def undisturbed(folder, **options):
    job = Job(folder)
    with job.begin(**options) as run:
        run.finish()
        return job.end(run), job.told()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("whole"), engine="inline")


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("act", [refuse, press], ids=["raises", "Ctrl-C"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_whoever_goes_on_is_told_every_step_once(way, place, act, number, whole, tmp_path):
    """A run that is broken off once anywhere, and goes on, ends and is told of like an undisturbed one."""
    job, breaks = Job(tmp_path, place, act, number), 0
    with job.begin(**WAYS[way]) as run:
        for _ in range(3):
            try:
                run.finish()
                break
            except (OSError, KeyboardInterrupt, phalanx.WorkerError):
                breaks += 1
        assert breaks == 1, "it was broken off"
        assert (job.end(run), job.told()) == whole


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("act", [refuse, press], ids=["raises", "Ctrl-C"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_call_again_ends_as_if_nothing_had_been(way, place, act, number, whole, tmp_path):
    """A run that is broken off once anywhere, and called for again in its directory, ends like an undisturbed one."""
    job = Job(tmp_path, place, act, number)
    with (
        contextlib.suppress(KeyboardInterrupt, OSError, phalanx.WorkerError),
        job.begin(**WAYS[way]) as run,
    ):
        run.finish()
        raise AssertionError("nothing was broken off")
    again = Job(tmp_path, place, act, number)  # all calls that it counts are over
    with again.begin(**WAYS[way]) as run:
        run.finish()
        assert again.end(run) == whole[0]


def test_an_evaluation_that_is_left_out_would_be_seen(whole, tmp_path):
    """Negative twin: a schedule that misses one evaluation, and a callback that misses one step, end otherwise."""
    job = Job(tmp_path)
    with job.begin(engine="inline") as run:
        for report in run:
            if report.step == 1:
                run._loop._observers[1].advanced = lambda report: None  # planted
            if report.step == 2:
                run._engine.schedule = lambda value, epoch: None  # planted
        ended, told = job.end(run), job.told()
    assert ended["digest"] != whole[0]["digest"] or ended["losses"] != whole[0]["losses"]
    assert told["steps"] != whole[1]["steps"]
    assert hashlib.sha256(str(ended).encode()).digest() != hashlib.sha256(str(whole[0]).encode()).digest()


@pytest.mark.parametrize("way", WAYS)
def test_no_snapshot_is_written_of_a_step_whose_evaluation_is_due(way, tmp_path):
    """While an evaluation fails every verb that goes on fails, and neither ``save`` nor the end writes the step."""
    job = Job(tmp_path / "run")
    job.metric = no_metric
    with contextlib.suppress(phalanx.WorkerError), job.begin(**WAYS[way]) as run:
        for ask in (run.finish, run.step, run.finish, lambda: run.save(tmp_path / "apart"), lambda: next(run)):
            with pytest.raises(phalanx.WorkerError, match="no metric today"):
                ask()
            assert run.steps == 2
    assert not (tmp_path / "apart").exists()
    assert [path.name for path in sorted((tmp_path / "run" / "snapshots").iterdir())] == ["step-000000000000"]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_may_be_used_in_begin(way):
    """An object that looks at the run in ``begin`` leaves it as usable as before, from other threads too."""

    class Looks:
        def begin(self, run):
            self.value = run.evaluate(nn.functional.l1_loss, (X, Y))

    looks, found = Looks(), []
    recipe = phalanx.Recipe(functools.partial(nn.Linear, 6, 1), (X, Y), nn.functional.mse_loss, replicas=2, steps=3)
    with recipe.start(callbacks=[looks], **WAYS[way]) as run:
        assert not run.turn.mine
        thread = threading.Thread(target=lambda: found.append(run.evaluate(nn.functional.l1_loss, (X, Y))))
        thread.start()
        thread.join(60)
        assert found == [looks.value]
        run.finish()
        assert run.result().digest == recipe.train(engine="inline").digest
