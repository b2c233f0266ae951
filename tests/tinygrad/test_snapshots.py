"""Snapshots name no device: a run goes on elsewhere, also after it was killed."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import phalanx
from tests.state.runs import ROOT
from tests.tinygrad.conftest import CLANG
from tests.tinygrad.families import FAMILIES, FEATURES, OPTIMIZERS

TWO = ["CPU", "CPU:1"]


def recipe(steps=4, **changes):
    """BatchNorm, an optimizer with a state, and shares of one size."""
    given = {"steps": steps, "batch_size": 8, "drop_last": True, "optimizer": OPTIMIZERS["adamw"], "max_norm": 0.5}
    return FAMILIES["norm"].recipe(4, **(given | changes))


@pytest.fixture(scope="module")
def wanted():
    """What an undisturbed run on one device ends in."""
    return recipe().train()


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(["CPU"], TWO), (TWO, ["CPU:2"])])
def test_going_on_on_other_devices(tmp_path, wanted, before, after):
    """One device, then two, or two and then another one: the bits of a run that was never interrupted."""
    recipe(2).train(devices=before, run_dir=tmp_path)
    resumed = recipe().train(devices=after, run_dir=tmp_path)
    assert resumed.resumed_from == 2
    assert (resumed.digest, resumed.loss_history) == (wanted.digest, wanted.loss_history)
    assert {str(tensor.device) for tensor in resumed.params.values()} == {after[0]}


@pytest.mark.long
def test_what_is_lost_is_noticed(tmp_path, wanted, monkeypatch):
    """Negative twin: without the optimizer's state a resumed run ends in another digest."""
    from phalanx.frameworks.tinygrad import adapter

    recipe(2).train(run_dir=tmp_path)
    write = adapter.Tinygrad.write  # planted

    def forgetful(self, state):
        state.optimizer = {name: np.zeros_like(array) for name, array in state.optimizer.items()}
        write(self, state)

    monkeypatch.setattr(adapter.Tinygrad, "write", forgetful)  # planted
    assert recipe().train(run_dir=tmp_path).digest != wanted.digest


@pytest.mark.long
def test_a_stream(tmp_path):
    """A stream has the bits of its samples in order: on two devices, and resumed."""
    x, y = FEATURES

    def made(steps=4, data=None, **changes):
        data = data or phalanx.Stream(lambda: zip(x, y, strict=True), **changes)
        return FAMILIES["mlp"].recipe(2, data=data, steps=steps, shuffle=bool(changes))

    wanted = made(data=FEATURES).train()
    one, two = made().train(), made().train(devices=TWO)
    made(2).train(run_dir=tmp_path)
    again = made().train(run_dir=tmp_path)
    assert again.resumed_from == 2
    assert {result.digest for result in (one, two, again)} == {wanted.digest}
    assert made(shuffle_buffer=8).train().digest != wanted.digest


@pytest.mark.long
def test_loading(tmp_path, wanted):
    """A snapshot's weights are numpy arrays, equal to the result's, and a run may begin from them."""
    with recipe().start() as run:
        run.finish()
        run.save(tmp_path / "end")
    loaded = phalanx.load(tmp_path / "end")
    assert loaded.digest == wanted.digest
    for name, tensor in wanted.params.items():
        assert np.array_equal(loaded.weights[name], tensor.numpy())
    with recipe().start(warm_start=tmp_path / "end") as run:
        assert np.array_equal(run.result().params["first.weight"].numpy(), wanted.params["first.weight"].numpy())


@pytest.mark.long
def test_another_environment(tmp_path, monkeypatch):
    """Another compiler, driver or version is told, as bits may differ; a snapshot of another framework is refused."""
    from phalanx.frameworks.tinygrad import adapter

    recipe(1).train(run_dir=tmp_path)
    monkeypatch.setattr(adapter, "recorded", lambda device: {"device": "another"})
    with pytest.warns(UserWarning, match="device is another, was CPU Clang"):
        recipe(2).train(run_dir=tmp_path)
    monkeypatch.undo()
    torch_run = tmp_path / "torch"
    with phalanx.Recipe(_linear, (np.ones((4, 2), np.float32),) * 2, _mean, replicas=1, steps=1).start() as run:
        run.save(torch_run)
    with pytest.raises(phalanx.UsageError, match="warm_start does not fit the model"):
        recipe(1).start(warm_start=torch_run)


def _linear():
    import torch

    return torch.nn.Linear(2, 2)


def _mean(output, target):
    return (output - target).square().mean()
