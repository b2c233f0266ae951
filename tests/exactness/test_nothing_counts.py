"""A batch with nothing to average over: skipped, as a step whose loss is not finite is, in every engine."""

import dataclasses
import os
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx
from tests.engines.moving import hurry, moves

IGNORED = -100
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = torch.where((torch.arange(48) // 8) % 3 == 1, IGNORED, (X[:, 0] > 0).long())  # batches 1 and 4 have no label


class Net(nn.Module):
    """Batch norm has buffers, which a forward pass writes before anybody knows that nothing counts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def mean(output, target):
    return F.cross_entropy(output, target, ignore_index=IGNORED)


def count(output, target):
    return (target != IGNORED).sum()


def named(output, target):
    return {"loss": (mean(output, target), count(output, target)), "entropy": (output.mean(), count(output, target))}


def recipe(**changes):
    given = {
        "make_model": Net, "data": (X, Y), "loss_fn": phalanx.weighted(mean, count), "shuffle": False,
        "replicas": 4, "batch_size": 8, "steps": 8, "optimizer": lambda named: torch.optim.Adam(named, lr=0.1),
        "scheduler": halving, "on_nonfinite": "skip",
    }  # fmt: skip
    return phalanx.Recipe(**(given | changes))


def samples():
    yield from zip(X, Y, strict=True)


KINDS = {
    "plain": {},
    "one replica": {"replicas": 1},
    "micro-batches": {"micro_batches": 2, "replicas": 2},
    "named losses": {"loss_fn": named},
    "stream": {"data": phalanx.Stream(samples), "shuffle": True, "steps": 6},
    "clipped": {"max_norm": 0.5},
}


class Gradients:
    """Asks for the gradients of all parameters."""

    gradients = ("*",)

    def step(self, report):
        """Called after each step."""


def seen(made, **options):
    """What a user can see of a run, bit for bit: losses, norms, rates, weights and buffers after each step."""
    rows = []
    with made.start(progress=False, callbacks=[Gradients()], **options) as run:
        for report in run:
            state = phalanx.digest(run.model)
            rates = repr((report.loss, report.grad_norm, report.lr, report.losses, sorted(report.gradients)))
            rows.append((rates, state))
        digest = run.result().digest
    return digest, rows


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:loss_fn seems to ignore targets")
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_in_which_nothing_counts_is_skipped(kind):
    """Weights and buffers stay, the step and the schedule advance, the loss is NaN; workers and devices do the same."""
    made = recipe(**KINDS[kind])
    digest, rows = wanted = seen(made, engine="inline")
    empty = [step for step in range(len(rows)) if step % 3 == 1]
    assert [step for step, (rates, _) in enumerate(rows) if rates.startswith("(nan, nan")] == empty
    assert [step for step in range(1, len(rows)) if rows[step][1] == rows[step - 1][1]] == empty
    if made.replicas > 1:
        assert seen(made, workers=2, engine="processes") == wanted
        assert seen(made, devices=["cpu"] * 2) == wanted
    counted = dataclasses.replace(made, loss_fn=mean, on_nonfinite="ignore")  # negative twin: NaN is taken
    assert seen(counted, engine="inline")[0] != digest


def test_the_loop_by_hand():
    """With one replica, it is the plain loop that puts buffers back and goes on where the mean is 0/0."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.1)
    scheduler = halving(optimizer)
    for step in range(8):
        rows = torch.arange(8) + 8 * (step % 6)
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        loss = mean(model(X[rows]), Y[rows])
        if loss.isfinite():
            loss.backward()
            optimizer.step()
        else:
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        optimizer.zero_grad()
        scheduler.step()
    result = recipe(replicas=1).train(engine="inline")
    assert phalanx.digest(result.model) == phalanx.digest(model)


@pytest.mark.long
def test_a_phase_in_which_nothing_counts_is_skipped():
    """Only the phase without labels leaves its parameters as they were; the other phase of the step is done."""
    labels = phalanx.Phase(phalanx.weighted(mean, count), "layers.0", name="labels")
    always = phalanx.Phase(lambda output, target: output.square().mean(), "layers.2")
    made = recipe(phases=[labels, always], loss_fn=None, optimizer=None, scheduler=None)
    wanted = seen(made, engine="inline")
    assert seen(made, workers=2, engine="processes") == wanted
    _, rows = wanted
    assert [step for step, (rates, _) in enumerate(rows) if rates.startswith("(nan, nan")] == [1, 4, 7]
    assert all(rows[step][1] != rows[step - 1][1] for step in range(1, 8))


@pytest.mark.long
def test_with_auto(monkeypatch):
    """A run that moves from this process to workers skips the same steps."""
    made = recipe(steps=12)
    hurry(monkeypatch, made)
    wanted = made.train(engine="inline")
    counts, result = moves(made, workers="auto")
    assert counts[-1] == 2
    assert (result.digest, repr(result.loss_history)) == (wanted.digest, repr(wanted.loss_history))


@pytest.mark.long
def test_a_worker_that_is_killed_around_it():
    """A kill before and after such a step changes nothing."""
    made = recipe()
    with made.start(workers=2, engine="processes", progress=False) as run:
        for report in run:
            if report.step in (0, 1, 4):
                os.kill(run.worker_pids[report.step % 2], signal.SIGKILL)
        assert {incident.kind for incident in run.incidents} >= {"death", "replaced"}
        assert run.result().digest == made.train(engine="inline").digest


@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2, "engine": "processes"}])
@pytest.mark.parametrize("way", ["stop", "ignore"])
def test_where_it_ends_the_run(way, options):
    """Without 'skip' there is no mean to update with: the error names the step and the way, which works."""
    with pytest.raises(phalanx.RunError, match=r"every replica of step 1 has weight 0.*on_nonfinite='skip'") as caught:
        recipe(on_nonfinite=way).train(**options)
    assert (type(caught.value), caught.value.step) == (phalanx.RunError, 1)
    assert caught.value.result.digest == recipe(steps=1).train(engine="inline").digest
    assert np.isfinite(caught.value.result.loss_history).all()


@pytest.mark.long
def test_diff_compares_such_a_step(tmp_path):
    """Two runs that first differ in a step in which nothing counts in one of them: that step is named."""
    labels = torch.where(Y == IGNORED, 0, Y)
    full, lacking = (
        recipe(data=(X, labels)),
        recipe(data=(X, torch.where(torch.arange(48) // 8 == 1, IGNORED, labels))),
    )
    for name, made in (("full", full), ("lacking", lacking)):
        made.train(engine="inline", run_dir=tmp_path / name, snapshot_every=1)
    difference = phalanx.diff(tmp_path / "full", tmp_path / "lacking", recipes=(full, lacking))
    assert "differ first in step 1" in str(difference)
