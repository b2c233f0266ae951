"""Options of an optimizer after workers died: those of survivors and of newcomers are the caller's, bit for bit."""

import os
import signal

import pytest
import torch
from torch import nn

import phalanx

X = torch.randn(96, 12, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
STEPS, WORKERS = 12, 3


def linear():
    return nn.Linear(12, 2)


def recipe(optimizer=None, make_model=linear):
    return phalanx.Recipe(
        make_model, (X, Y), nn.functional.cross_entropy, replicas=3, batch_size=24, steps=STEPS, optimizer=optimizer
    )


def attacked(job, *moments, **options):
    """The result of a run whose last worker is killed after these steps."""
    with job.start(workers=WORKERS, engine="processes", **options) as run:
        for report in run:
            if report.step in moments:
                os.kill(run.worker_pids[-1], signal.SIGKILL)
        return run.result()


TENSORS = {
    "adam": lambda named: torch.optim.Adam(named, lr=torch.tensor(0.01)),
    "betas": lambda named: torch.optim.Adam(
        named, lr=torch.tensor(0.01), betas=(torch.tensor(0.9), torch.tensor(0.99))
    ),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=torch.tensor(0.01)),
    "groups": lambda named: torch.optim.AdamW(
        [{"params": [pair], "lr": torch.tensor(0.01 * (1 + number))} for number, pair in enumerate(named)]
    ),
}


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("optimizer", TENSORS)
def test_options_that_are_tensors(optimizer):
    """They once lay in memory that the next orders were written to, so survivors trained with other rates.

    No error came of that, but another digest.
    """
    job = recipe(TENSORS[optimizer])
    result = attacked(job, 0, 4)
    assert len([one for one in result.incidents if one.kind == "death"]) == 2
    assert result.digest == job.train(engine="inline").digest


class Gradual(nn.Module):
    """Trains its body from the fourth step on: a function of the step alone."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 8), nn.Linear(8, 2)

    def forward(self, x):
        self.body.requires_grad_(phalanx.current_step() >= 4)
        return self.head(self.body(x).relu())


class Thawed(Gradual):
    """Is made with a frozen body, and thaws it in forward."""

    def __init__(self):
        super().__init__()
        self.body.requires_grad_(False)


class Once(Gradual):
    """Freezes its body in one step. It is put back after that, as no worker that comes later would know."""

    def forward(self, x):
        if phalanx.current_step() == 4:
            self.body.requires_grad_(False)
        return self.head(self.body(x).relu())


TOLD = pytest.mark.filterwarnings("ignore:requires_grad of 'body.weight' was changed in forward")


@pytest.mark.long
@TOLD
@pytest.mark.cases(2)
@pytest.mark.parametrize("make_model", [Gradual, Thawed, Once])
@pytest.mark.parametrize("moments", [(2,), (6,), (2, 6)])
def test_what_forward_freezes(make_model, moments):
    """It holds for one pass in every worker, so one that is replaced goes on with the same bits."""
    job = recipe(make_model=make_model)
    assert attacked(job, *moments).digest == job.train(engine="inline").digest


@TOLD
def test_what_forward_freezes_is_resumed_by_workers(tmp_path):
    """A run that stopped inline goes on with workers."""
    job = recipe(make_model=Gradual)
    with job.start(engine="inline", run_dir=tmp_path / "run") as run:
        for report in run:
            if report.step == 2:
                break
    resumed = job.train(engine="processes", workers=WORKERS, run_dir=tmp_path / "run")
    assert resumed.resumed_from == 3
    assert resumed.digest == job.train(engine="inline").digest


@TOLD
def test_what_forward_freezes_changes_bits():
    """Twin: a flag that was lost in the tests above would show. What is thawed in forward is trained."""
    digests = [recipe(make_model=made).train(engine="inline").digest for made in (Gradual, Thawed, Once)]
    assert digests[0] == digests[1] != digests[2]


def test_what_forward_freezes_is_told_once():
    """A warning names the parameter and the ways that last; the flag is as before."""
    with pytest.warns(UserWarning, match="requires_grad of 'body.weight' .* run.freeze") as told:
        result = recipe(make_model=Once).train(engine="inline")
    assert len(told) == 1
    assert all(parameter.requires_grad for parameter in result.model.parameters())
