"""What observers see is the state of each step, as inline, through every kind of change of who computes."""

import os
import signal

import pytest
import torch
from torch import nn

import phalanx
from phalanx.callbacks import EMA, Log, SaveBest
from phalanx.shared.state import Mirror
from tests.engines.moving import hurry, turn_back
from tests.seen import END, Seen, compare, logged

STEPS, ROWS = 12, 48
X = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


class Net(nn.Module):
    """Frozen weights with a view, statistics in buffers, dropout."""

    def __init__(self):
        super().__init__()
        self.base, self.other = nn.Linear(8, 16).requires_grad_(False), nn.Linear(8, 16).requires_grad_(False)
        self.norm, self.drop, self.head = nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 2)
        self.row = self.base.weight.detach()[0]

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.base(x) + self.other(x) + self.row.sum()))))


def accuracy(output, target):
    return (output.argmax(1) == target).double().mean()


def certainty(output, target):
    return output.double().softmax(1).amax(1).mean()


class Happens:
    """What happens after some steps: ``kill`` workers by their number, ``freeze`` and ``thaw`` by name."""

    everywhere = True

    def __init__(self, kill=(), **changes):
        self.killed, self.changes = list(kill), changes

    def begin(self, run):
        self.run = run

    def step(self, report):
        for verb, names in self.changes.items():
            if report.step in names:
                getattr(self.run, verb)(names[report.step])
        for step, number in self.killed:
            pids = self.run.worker_pids
            if step == report.step and pids:
                os.kill(pids[number % len(pids)], signal.SIGKILL)


def seen_by(happens=None, make_model=Net, steps=STEPS, decay=0.5, **options):
    """A run's Seen, with an average, the best weights, two metrics and a log; what happens is after it."""
    average, best = EMA(decay), SaveBest("certainty", mode="max")
    seen = Seen(average, best, predict=X[:5])
    recipe = phalanx.Recipe(make_model, (X, Y), nn.functional.cross_entropy, replicas=4, batch_size=12, steps=steps)
    evaluation = phalanx.Evaluation([accuracy, certainty], (X, Y), batch_size=9, every_steps=2)
    logs = [Log("csv")] if options.get("run_dir") else []
    callbacks = [*logs, average, best, seen, *([happens] if happens else [])]
    recipe.train(evaluation=evaluation, callbacks=callbacks, progress=False, **options)
    return seen


FREEZE = {"freeze": {4: "head.bias"}, "thaw": {2: "base", 7: "head", 8: "other.weight"}}
KILLS = [(1, 0), (3, 1), (8, 0), (9, 1)]


@pytest.fixture(scope="module")
def wanted():
    """What is seen inline: with nothing, and with parameters that are frozen and thawed."""
    return {changed: seen_by(Happens(**(FREEZE if changed else {})), engine="inline") for changed in (False, True)}


@pytest.mark.long
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_that_are_killed(wanted, workers, changed):
    """Around steps that freeze and thaw, and without."""
    happens = Happens(KILLS, **(FREEZE if changed else {}))
    assert compare(seen_by(happens, workers=workers, engine="processes"), wanted[changed]) == []


@pytest.mark.long
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_a_run_that_moves(monkeypatch, wanted, back, changed):
    """From this process to workers, one of which is killed there, and back."""
    hurry(monkeypatch, phalanx.Recipe(Net, (X, Y), nn.functional.cross_entropy, steps=1))
    if back:
        turn_back(monkeypatch)
    happens = Happens([] if back else KILLS, **(FREEZE if changed else {}))
    counts = []
    happens.evaluated = lambda values: counts.append(happens.run._engine.workers)  # planted
    assert compare(seen_by(happens), wanted[changed]) == []
    assert len(set(counts)) > 1


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_is_resumed(tmp_path, wanted, workers):
    """From its directory, with other workers; also its log, and the best weights in its files."""
    alone, stopped = tmp_path / "alone", 8
    whole = seen_by(Happens(**FREEZE), engine="inline", run_dir=alone)
    assert compare(whole, wanted[True]) == []
    cut = {"run_dir": tmp_path / "cut", "engine": "processes"}
    first = seen_by(Happens(**FREEZE), steps=stopped, workers=2, **cut)
    first.rows.pop(END)
    assert compare(first, {step: row for step, row in whole.rows.items() if step != END and step < stopped}) == []
    assert compare(seen_by(Happens(**FREEZE), workers=workers, **cut), whole, since=stopped) == []
    assert logged(tmp_path / "cut") == logged(alone)


@pytest.mark.long
def test_devices(wanted):
    """Two workers with a copy of the state each, which keep the average themselves."""
    assert compare(seen_by(Happens(**FREEZE), devices=["cpu", "cpu"]), wanted[True]) == []


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("fault", ["stale", "average"])
def test_what_is_seen_beside_the_digest(monkeypatch, wanted, fault):
    """Negative twin: weights of an earlier step, or another average, are found by name, with the digest as it was."""
    looked, first = Mirror.look, []

    def stale(mirror):
        first.append(looked(mirror))
        first[0].params.update({name: value.clone() for name, value in first[0].params.items() if len(first) == 1})
        return first[0]

    if fault == "stale":
        monkeypatch.setattr(Mirror, "look", stale)
    found = compare(seen_by(decay=0.25 if fault == "average" else 0.5, workers=2), wanted[False])
    assert any("averaged.head.weight" in text for text in found)
    assert any(text.startswith("step 6: params.head.weight") for text in found) == (fault == "stale")
    assert not any("digest" in text for text in found)
