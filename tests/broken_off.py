"""A run with all that depends on a step being told whole, which is broken off once where that is asked for."""

from __future__ import annotations

import functools
import os
import signal
import time

import torch
from torch import nn

import phalanx
from phalanx.callbacks import EMA, EarlyStopping, Log, SaveBest

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(48, 1, generator=torch.Generator().manual_seed(1))
STEPS = 24
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
    if output.requires_grad:  # else it is only asked whether it is a mean, in the first step
        once()
    return (output - target).square().mean()


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
        """All that can be told of a run that is closed."""
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
