"""What could go wrong between devices ends in other bits, or is noticed by workers: each fault is planted."""

import dataclasses
import types

import numpy as np
import pytest
import torch
from torch import nn

import phalanx
from phalanx.engines import flat
from phalanx.engines.devices import buckets, spread
from phalanx.engines.devices.exchanged import Exchanged
from phalanx.engines.processes.board import Shared
from phalanx.frameworks.torch.adapter import Torch
from phalanx.frameworks.torch.optimizer import Update
from phalanx.shared.layout import Spec
from tests.devices.planting import Planted
from tests.devices.ranks import (
    MLP,
    devices,
    dropping,
    equal_layers,
    trained,
)
from tests.families import FAMILIES, terms
from tests.proof.faults import flip


def in_order_of_arrival(patch):
    """Additions from the last to the first."""
    patch.setattr(flat, "added", lambda count, nodes, there: [(there[0], other) for other in there[1:][::-1]])


def folded_at_the_wrong_offset(patch):
    """Every worker takes its slice for the first one."""
    fold = flat.fold_stretches
    patch.setattr(flat, "fold_stretches", lambda mean, rows, stretches, _, **how: fold(mean, rows, stretches, 0, **how))


def buckets_in_one_room(patch):
    """A bucket's memory is used again before it was looked at."""
    patch.setattr(buckets, "BUCKET", 64)
    scratch = flat.scratch
    patch.setattr(flat, "scratch", lambda rooms, name, *size: scratch(rooms, name[0], *size))


def absent_on_one(patch):
    """The second worker says that it has no gradient of the first parameter."""
    publish = Exchanged._publish  # planted

    def published(sums):
        if sums._station.worker == 1:  # planted
            for partial in sums._sums.partials():  # planted
                partial.value[0] = None
        return publish(sums)

    patch.setattr(Exchanged, "_publish", published)


def zeros_for_absent(patch):
    """Where there is no gradient a zero is added."""
    masks = Shared.masks
    patch.setattr(Shared, "masks", lambda board: [b"\1" * len(mask) for mask in masks(board)])


def unaligned(patch):
    """Gradients lie one after another."""
    patch.setattr(buckets, "ALIGNED", 1)


def buffers_of_the_first(patch):
    """Buffers are those that the first replica left, not the mean."""
    update = Torch.update

    def first(framework, step, gradient, buffers):
        update(framework, step, gradient, buffers[:1])

    patch.setattr(Torch, "update", first)


def buffers_of_one_for_all(patch):
    """Every replica's buffers are taken from the first place in what came."""
    total = spread.Spread.total

    def first(*facts):
        rows, losses = total(*facts)
        return rows[:1] * len(rows), losses

    patch.setattr(spread.Spread, "total", first)


def without_seeding(patch):
    """Random numbers of a replica begin where those of the one before ended."""
    patch.setattr("phalanx.frameworks.torch.replica.feed.Feed.seed", lambda *_: None)
    patch.setattr("phalanx.engines.twice.Twice.begin", lambda *_: None)  # it would be found there


class Halves(nn.Module):
    """The first replica alone uses the second half, which lies first in a bucket."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(1000))

    def forward(self, x):
        weights = self.first + self.second if x[0, 0] < 1 else self.first
        return (weights * x.mean()).sum()


class Aligned(torch.optim.SGD):
    """Looks at where gradients lie, as kernels do that load several numbers at a time."""

    def step(self, closure=None):
        lies = [parameter.grad.data_ptr() % 64 == 0 for group in self.param_groups for parameter in group["params"]]
        for group in self.param_groups:
            group["lr"] = 0.1 * (1 + lies.count(False))
        return super().step(closure)


def aligned(named):
    return Aligned([parameter for _, parameter in named], lr=0.1)


NOISY = MLP.recipe(6, batch_size=18, steps=3, drop_last=True, make_model=dropping)
APART = MLP.recipe(
    2, make_model=Halves, data=(torch.arange(8.0)[:, None] + 0.5, torch.zeros(8)), loss_fn=lambda output, _: output,
    batch_size=2, steps=3, shuffle=False,
)  # fmt: skip
FAULTS = {
    in_order_of_arrival: terms(6),
    folded_at_the_wrong_offset: APART,
    buckets_in_one_room: MLP.recipe(4, make_model=equal_layers),
    absent_on_one: MLP.recipe(4),
    zeros_for_absent: FAMILIES["negative_zero"].recipe(3),
    unaligned: MLP.recipe(4, optimizer=aligned),
    buffers_of_the_first: NOISY,
    buffers_of_one_for_all: NOISY,
    without_seeding: NOISY,
}
SLOW = {unaligned}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[pytest.mark.long] * (fault in SLOW), id=fault.__name__) for fault in FAULTS]
)
def test_faults_are_seen(fault):
    """These tests can fail: each fault ends in other bits, or workers notice it, on every processor."""
    recipe = FAULTS[fault]
    wanted = trained(recipe, 1)
    count = min(recipe.replicas, 3)
    assert trained(recipe, count) == wanted
    faulty = dataclasses.replace(recipe, make_model=Planted(recipe.make_model, fault))
    try:
        found = trained(faulty, count)
    except phalanx.RunError as error:  # memory that is used too early may differ from worker to worker
        found = str(error)
    assert "computes or copies wrongly" in found or (isinstance(found, tuple) and found != wanted)


class OfTwoDtypes(nn.Module):
    """Half of its parameters are in float64."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 32), nn.Linear(32, 3).double()

    def forward(self, x):
        return self.second(torch.relu(self.first(x)).double()).float()


def of_one_dtype(patch):
    """The norm is that of the gradients in float64 alone."""
    norm = Update.norm

    def alone(own, gradient):
        return norm(own, [entry if entry is not None and entry.itemsize == 8 else None for entry in gradient])

    patch.setattr(Update, "norm", alone)


@pytest.mark.long
def test_the_norm_of_several_dtypes_is_that_of_workers():
    """Clipped on CPUs named as devices, in workers and in one process, a run ends in the same digest and norms."""

    def ended(make_model=OfTwoDtypes, **options):
        with MLP.recipe(4, make_model=make_model, max_norm=0.05).start(**options) as run:
            norms = [report.grad_norm for report in run]
            return norms, run.result().digest

    wanted = ended(**devices(1))
    assert ended(**devices(2)) == ended(workers=2) == wanted
    assert ended(Planted(OfTwoDtypes, of_one_dtype), **devices(2)) != wanted


def test_flags_of_a_worker_that_is_gone():
    """A replica without samples sends no buffers, though a dead worker said of the step before that they changed."""
    between = spread.Spread([Spec((2,), (1,), "float32", 4)], [range(2)], 0, "cpu")
    nobody = types.SimpleNamespace(gather=lambda whole, mine: whole.copy_(mine), wait=lambda work: None)
    rows, losses = between.total(nobody, np.array([[True], [True]]), {0: [torch.tensor([1.0, 2.0])]}, [0.5, 0.0])
    assert rows[0][0].tolist() == [1, 2]
    assert losses == [0.5, 0.0]


def other_bits_on_one(patch):
    """The last worker gets one bit of the mean wrong."""
    total = flat.Flat.total

    def flipped(own, *facts, **how):
        mean = total(own, *facts, **how)
        if own._among[0].position == 2:  # planted
            flip(mean[0])
        return mean

    patch.setattr(flat.Flat, "total", flipped)


@pytest.mark.long
def test_a_mean_that_is_not_everybody_s():
    """Copies of the state would part unseen; the norm shows it before the update."""
    recipe = dataclasses.replace(MLP.recipe(4), make_model=Planted(MLP.make_model, other_bits_on_one))
    with recipe.start(devices=["cpu"] * 3) as run:
        with pytest.raises(phalanx.RunError, match="gradients or weights differ"):
            run.finish()
        assert run.steps == 0
    assert trained(MLP.recipe(4), 3) == trained(MLP.recipe(4), 1)


def other_weights_on_one(patch):
    """After the second update one weight of the last worker has another bit."""
    commit = Exchanged.commit

    def flipped(own, step, *facts):
        commit(own, step, *facts)
        if own._station.worker == 2 and step == 1:  # planted
            flip(next(iter(own._framework.export(step, copy=False, digest=False).params.values())))

    patch.setattr(Exchanged, "commit", flipped)
    patch.setattr("phalanx.engines.devices.exchanged.CHECK_STEPS", 3)


def test_weights_that_are_not_everybody_s():
    """A device whose memory changes is named when weights are compared, which is now and then."""
    recipe = dataclasses.replace(MLP.recipe(4, steps=6), make_model=Planted(MLP.make_model, other_weights_on_one))
    with recipe.start(devices=["cpu"] * 3) as run:
        with pytest.raises(phalanx.RunError, match="gradients or weights differ"):
            run.finish()
        assert run.steps == 3
