"""Accelerators that run out of memory, fail or are lost, and workers of theirs that die; on the fake one."""

import functools
import itertools
import os
import signal
import time

import pytest
import torch
from torch.nn import functional as F

import phalanx
from tests.devices.accelerated import deep, deep_norm, deep_recipe, dropping, named, noisy_adam, trained
from tests.devices.planting import in_worker, mark_caller
from tests.engines.deaths import Trapped, once, sprung
from tests.sampling import sample

pytestmark = pytest.mark.accelerator


class Failing:
    """A loss that, once, in step ``step`` of whoever computes on ``device``, breaks the device."""

    def __init__(self, folder, device, step, how, *facts):
        self.folder, self.device, self.step, self.how, self.facts = str(folder), device, step, how, facts

    def __call__(self, output, target):
        if str(output.device) == self.device and phalanx.current_step() == self.step and once(self.folder, "broken"):
            getattr(torch.fake, self.how)(self.device, *self.facts)
        return F.cross_entropy(output, target)


@pytest.mark.parametrize("count", [1, 2])
def test_out_of_memory(fake, tmp_path, count):
    """The error names the device, the replica and the choices; the run ends with the state before the step."""
    device, replica = f"fake:{count - 1}", 0 if count == 1 else 2
    failing = deep_recipe(4, loss_fn=Failing(tmp_path, device, 1, "fail_allocation", 1))
    with failing.start(devices=named(count)) as run:
        next(run)
        with pytest.raises(phalanx.RunError, match=rf"out of memory on {device} .* replicas=") as caught:
            next(run)
        told = str(caught.value) + "".join(caught.value.__notes__)
        assert f"step 1, replica {replica}" in told
        assert "samples" in told
        assert run.result().digest == deep_recipe(4, steps=1).train(devices="fake:0").digest


@pytest.mark.long
@pytest.mark.parametrize(("how", "count"), sample("lost devices", itertools.product(["lose", "fault"], [1, 3]), 1))
def test_a_lost_device(fake, tmp_path, how, count):
    """The error names it, though its buffers cannot be put back; a run_dir goes on on the devices that are left."""
    made = functools.partial(deep_recipe, 4, make_model=deep_norm)
    wanted, device = trained(made(), 1), f"fake:{count - 1}"
    recipe, folder = made(loss_fn=Failing(tmp_path, device, 2, how)), tmp_path / "run"
    with pytest.raises(phalanx.RunError, match=f"{device} failed"):
        recipe.train(devices=named(count), run_dir=folder, snapshot_every=1, deadline_seconds=10)
    fake.reset()
    assert trained(recipe, 2, run_dir=folder) == wanted


@pytest.mark.long
def test_the_state_after_a_lost_device(fake, tmp_path):
    """The other workers have it; the run itself cannot go on."""
    failing = deep_recipe(4, loss_fn=Failing(tmp_path, "fake:2", 2, "lose"))
    with failing.start(devices=named(3), deadline_seconds=10) as run:
        with pytest.raises(phalanx.RunError, match="fake:2 failed"):
            run.finish()
        assert run.result().digest == deep_recipe(4, steps=2).train(devices="fake:0").digest
        with pytest.raises(phalanx.RunError, match=r"cannot go on.*fake:2 failed"):
            run.finish()
    assert run.result().digest == deep_recipe(4, steps=2).train(devices="fake:0").digest


def alone_with_a_lost_device(folder, output, target):
    """The second worker's device is lost in step 2; then the first worker is killed."""
    if phalanx.current_step() == 2 and str(output.device) == "fake:1":
        (folder / "lost").touch()
        torch.fake.lose("fake:1")
    elif phalanx.current_step() == 2:
        while not (folder / "lost").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(output, target)


@pytest.mark.timeout(120)
def test_no_device_answers_any_more(fake, tmp_path):
    """Whoever is left cannot hand the state over, so the run ends; it does not ask again and again."""
    failing = deep_recipe(4, loss_fn=functools.partial(alone_with_a_lost_device, tmp_path))
    with pytest.raises(phalanx.RunError, match=r"no worker that is left can hand over the state.*fake:1 failed"):
        failing.train(devices=named(2))


@pytest.mark.long
def test_slow_kernels_are_no_user_code(fake):
    """Workers that are told to stop wait for their devices first; none of them is ended for that."""
    slow = Slow(functools.partial(deep, 24, 2))
    with deep_recipe(4, make_model=slow, data=(torch.randn(48, 24), torch.arange(48) % 3), steps=30).start(
        devices=named(2)
    ) as run:
        for _ in range(3):
            next(run)
            run.evaluate(F.cross_entropy, (torch.randn(4, 24), torch.arange(4) % 3))
        assert [each.kind for each in run.result().incidents] == []


class Slow:
    """Products take a tenth of a second in workers."""

    def __init__(self, make_model):
        self.make_model = make_model
        mark_caller()

    def __call__(self):
        if in_worker():
            torch.fake.set_kernel_seconds(0.1, "aten::addmm")
        return self.make_model()


@pytest.mark.long
def test_deaths(fake, tmp_path):
    """Workers that are killed are replaced on their devices: all but one, and all."""
    wanted = trained(noisy_adam(), 1)
    for number, (places, count) in enumerate(
        [([(1, "COMPUTING")], 2), ([(0, "FOLDING"), (1, "FOLDING")], 3), ([(0, "UPDATING"), (1, "UPDATING")], 2)]
    ):
        make_model = dropping
        (tmp_path / str(number)).mkdir()
        for worker, where in places:
            make_model = Trapped(make_model, tmp_path / str(number), worker, 2, where)
        assert trained(noisy_adam(make_model), count) == wanted
        assert sprung(tmp_path / str(number)) >= 1
