"""Frozen weights, which all processes of a run hold once: the bits, also when they are thawed, and the memory."""

import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler

import phalanx
from phalanx.frameworks.registry import open_framework
from phalanx.plan.fold import place
from phalanx.shared.layout import ArenaPlan
from phalanx.shared.state import FrozenWeights
from tests.engines import held_once
from tests.engines.deaths import PLACES, Trapped, sprung
from tests.engines.moving import hurry, moves
from tests.families import ADAMW, SGD
from tests.hosts.worlds import world
from tests.sampling import cover

WIDTH, STEPS = 12, 8
X = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(0))
DATA = X, X.roll(1, 0)
LINUX = pytest.mark.skipif(not os.path.isdir("/proc/self/fd") or not hasattr(os, "memfd_create"), reason="needs memfd")


class Adapted(torch.nn.Module):
    """A frozen layer and a narrow one beside it that is trained."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.base = torch.nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(width, 2), torch.nn.Linear(2, width)
        self.rows = self.base.weight.detach()[1:]  # sees the weight, and is no parameter

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)) + self.rows.sum())


def stack(width=WIDTH):
    """Three of them, and a layer without weights to update whose statistics are buffers."""
    return torch.nn.Sequential(
        Adapted(width), torch.nn.BatchNorm1d(width, affine=False), Adapted(width), Adapted(width)
    )


class Thawing(LRScheduler):
    """Thaws some frozen weights after step 3, freezes them again after step 5, and thaws more after step 6."""

    def __init__(self, optimizer):
        frozen = [one for group in optimizer.param_groups for one in group["params"] if one.shape[0] == WIDTH]
        self.chosen = [one for one in frozen if one.shape[-1] == WIDTH]  # weights and biases of frozen layers, biases
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch in (3, 5):
            self.chosen[2].requires_grad_(self.last_epoch == 3)
        if self.last_epoch == 6:
            self.chosen[0].requires_grad_(True)
        return [group["lr"] for group in self.optimizer.param_groups]


def recipe(make_model=stack, **changes):
    """Three frozen layers, three replicas."""
    given = {"optimizer": ADAMW, "replicas": 3, "batch_size": 12, "steps": STEPS, "max_norm": 0.5}
    return phalanx.Recipe(make_model, DATA, F.mse_loss, **(given | changes))


@pytest.fixture(scope="module")
def wanted():
    """What one process comes to, with weights that are thawed and without."""
    return {scheduler: recipe(scheduler=scheduler).train(engine="inline") for scheduler in (None, Thawing)}


def same(one, other):
    return (one.digest, one.loss_history) == (other.digest, other.loss_history)


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("scheduler", [None, Thawing])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_frozen_and_thawed_weights_have_the_bits_of_one_process(wanted, scheduler, workers):
    """Also the losses, so also the steps between; thawed weights do change."""
    assert same(recipe(scheduler=scheduler).train(workers=workers, engine="processes"), wanted[scheduler])
    assert wanted[None].digest != wanted[Thawing].digest


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("fault", ["never copied", "read too early"])
def test_a_thawed_weight_that_is_not_moved_is_seen(monkeypatch, wanted, fault):
    """Negative twin: workers that leave a thawed weight where it was, or find nothing at its new place."""
    code = {
        "never copied": "FrozenWeights.thaw = lambda self, step, gradient: None",
        "read too early": "FrozenWeights._stretch = lambda self, *place: bytearray()",
    }[fault]

    def make():
        if os.getpid() != parent:
            exec(code, {"FrozenWeights": FrozenWeights})
        return stack()

    parent = os.getpid()
    result = recipe(make, scheduler=Thawing).train(workers=2, engine="processes")
    assert not same(result, wanted[Thawing])


@pytest.mark.long
@pytest.mark.parametrize(("place", "worker", "step"), cover("deaths of thawing", PLACES, [(0, 3), (2, 4)]))
def test_a_death_around_the_step_that_thaws(tmp_path, wanted, worker, place, step):
    """Also in the middle of that update, which is done again from a snapshot in which the weight was frozen."""
    if place == "half saved":
        step = 1
    trapped = recipe(Trapped(stack, tmp_path, worker, step, place), scheduler=Thawing)
    assert same(trapped.train(workers=3, engine="processes"), wanted[Thawing])
    assert sprung(tmp_path) == 1


@pytest.mark.long
@pytest.mark.parametrize("stopped", range(1, STEPS))
def test_a_run_with_thawed_weights_is_resumed(tmp_path, wanted, stopped):
    """After each step, on another number of workers."""
    recipe(scheduler=Thawing, steps=stopped).train(workers=2, engine="processes", run_dir=tmp_path)
    resumed = recipe(scheduler=Thawing).train(workers=3, engine="processes", run_dir=tmp_path)
    assert same(resumed, wanted[Thawing])
    assert resumed.resumed_from == stopped


@pytest.mark.long
def test_audits_and_moves_in_the_middle(monkeypatch, wanted):
    """Audited steps, and a run that moves into workers after some steps, come to the same; nothing is found wrong."""
    audited = recipe(scheduler=Thawing).train(workers=2, engine="processes", audit=1.0)
    assert same(audited, wanted[Thawing])
    assert not audited.incidents
    moved = recipe(scheduler=Thawing)
    hurry(monkeypatch, moved)
    counts, result = moves(moved)
    assert {1, 2} <= set(counts)
    assert same(result, wanted[Thawing])


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4])
def test_hosts_share_frozen_weights_within_each(wanted, workers):
    """Two processes as two hosts, each with one or two workers: thawed on both in the same step."""
    code = f"""
from tests.engines.test_frozen import Thawing, recipe
for scheduler in (None, Thawing):
    result = recipe(scheduler=scheduler, replicas=4, batch_size=12).train(workers={workers})
    told.append(result.digest)
"""
    alone = [recipe(scheduler=scheduler, replicas=4).train(engine="inline").digest for scheduler in (None, Thawing)]
    assert world(code) == [alone, alone]


@pytest.mark.long
def test_a_frozen_weight_of_another_class_is_looked_at():
    """One that is made from other things than a tensor, and knows how to be copied."""
    with recipe(Named).start(workers=2, engine="processes") as run:
        for _ in run:
            assert (type(run.model.own), run.model.own.called) == (Label, "scales")
        assert torch.equal(run.model.own, run.result().model.own)


class Label(torch.nn.Parameter):
    """A weight with a name."""

    def __new__(cls, name):
        made = super().__new__(cls, torch.ones(WIDTH), requires_grad=False)
        made.called = name
        return made

    def __deepcopy__(self, memo):
        return Label(self.called)


class Named(Adapted):
    """A model that has one."""

    def __init__(self):
        super().__init__()
        self.own = Label("scales")


@pytest.mark.long
def test_what_the_caller_writes_stays_with_the_caller(wanted):
    """A looked-at model's frozen weights are the caller's: workers do not see what is written there."""
    with recipe().start(workers=2, engine="processes") as run:
        mine = next(iter(run))
        assert mine.step == 0
        result = run.result()
        with torch.no_grad():
            for parameter in result.model.parameters():
                parameter.zero_()
        run.finish()
        assert same(run.result(), wanted[None])


@pytest.mark.long
@pytest.mark.parametrize("how", ["in place", "unseen", "elsewhere"])
def test_what_is_written_into_the_base_meanwhile_is_not_in_the_result(tmp_path, wanted, how):
    """Nor in snapshots: workers trained beside the base as it was, which a model of the caller's may share."""
    bases = []

    def make():
        model = stack()
        if os.getpid() == parent:
            bases.append(model[0].base.weight)
        return model

    parent = os.getpid()
    with recipe(make).start(workers=2, engine="processes", run_dir=tmp_path, snapshot_every=1) as run:
        for _ in itertools.islice(run, STEPS - 1):
            if how == "elsewhere":
                bases[-1].data = bases[-1].data.clone()
            written = bases[-1].data if how == "unseen" else bases[-1].detach()
            written.add_(1)
        run.finish()
        assert same(run.result(), wanted[None])
    assert torch.equal(phalanx.load(tmp_path).weights["0.base.weight"], run.result().model[0].base.weight)


@pytest.mark.long
def test_two_runs_over_one_base_of_which_one_thaws_it():
    """The other's result has the base as it was: it does not matter where the later run has put it."""
    base = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    beside = recipe(lambda: torch.nn.Sequential(base, torch.nn.Linear(WIDTH, WIDTH)))
    thawing = recipe(beside.make_model, scheduler=Thaw)
    alone = beside.train(engine="inline")
    with beside.start(workers=2, engine="processes") as one, thawing.start(workers=2, engine="processes") as other:
        other.finish()
        assert other.result().digest != alone.digest
        one.finish()
        assert same(one.result(), alone)


class Thaw(LRScheduler):
    """Thaws everything."""

    def __init__(self, optimizer):
        self.all = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        super().__init__(optimizer)

    def get_lr(self):
        for parameter in self.all:
            parameter.requires_grad_(self.last_epoch > 0 or parameter.requires_grad)
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.long
def test_the_trained_model_is_the_callers_own(wanted):
    """After the run its frozen weights can be written, copied, saved and trained on like any others."""
    result = recipe().train(workers=2, engine="processes")
    frozen = result.model[0].base.weight
    before = frozen.detach().clone()
    with torch.no_grad():
        frozen.add_(1)
    assert torch.equal(frozen, before + 1)
    assert torch.equal(result.model[0].rows, frozen[1:])  # still a view of it
    again = recipe().train(workers=2, engine="processes")
    assert same(again, wanted[None])
    assert torch.equal(frozen, before + 1)


@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_a_lone_replica_may_write_what_is_frozen(engine):
    """With R = 1 forward may update a weight without a gradient, as an average of others, on any engine."""

    class Following(Adapted):
        def forward(self, x):
            with torch.no_grad():
                self.base.weight.lerp_(self.up.weight @ self.down.weight, 0.1)
            return super().forward(x)

    lone = recipe(Following, replicas=1, max_norm=math.inf)
    with lone.start(engine=engine, workers=1) as run:
        run.finish()
        result = run.result()
    torch.manual_seed(lone.seed)
    assert not torch.equal(result.model.base.weight, Following().base.weight)
    assert result.digest == lone.train(engine="inline").digest


@pytest.mark.long
def test_an_optimizer_from_elsewhere_may_write_what_is_frozen():
    """One that is not torch's own may change weights without a gradient, so they stay where all share them."""

    class Shrinking(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.99)

    elsewhere = functools.partial(Shrinking, lr=0.01)
    results = [
        recipe(optimizer=elsewhere, max_norm=math.inf).train(workers=workers, engine=engine).digest
        for workers, engine in ((1, "inline"), (2, "processes"))
    ]
    assert results[0] == results[1]


@pytest.mark.long
def test_tied_and_flattened_weights():
    """A storage with one trained parameter is trained; a frozen one may hold several parameters, and views."""

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.nn.Parameter(torch.randn(2 * WIDTH * WIDTH), requires_grad=False)
            self.left = torch.nn.Parameter(flat.data[: WIDTH * WIDTH].view(WIDTH, WIDTH), requires_grad=False)
            self.right = torch.nn.Parameter(flat.data[WIDTH * WIDTH :].view(WIDTH, WIDTH).t(), requires_grad=False)
            self.whole = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.other = torch.nn.Parameter(self.whole.data[: WIDTH // 2], requires_grad=False)
            self.none = torch.nn.Parameter(torch.empty(0, WIDTH), requires_grad=False)

        def forward(self, x):
            return x @ self.left @ self.right @ self.whole + (x @ self.other.t()).sum() + self.none.sum()

    odd = recipe(Odd, optimizer=SGD)
    assert same(odd.train(workers=2, engine="processes"), odd.train(engine="inline"))


@pytest.mark.long
def test_conjugates_of_a_weight_move_with_it():
    """A view that is a weight's conjugate, or the negative of a part of it, goes on being that where it lies later."""

    class Complex(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64), requires_grad=False)
            self.other = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64).conj(), False)
            self.turned, self.imaginary = self.base.detach().conj(), self.base.detach().conj().imag
            self.trained = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.trained(x) + x @ (self.imaginary + (1j * self.turned).real + self.other.imag)

    mixed = recipe(Complex)
    assert same(mixed.train(workers=2, engine="processes"), mixed.train(engine="inline"))


@pytest.mark.long
@pytest.mark.parametrize("scheduler", [None, Thawing])
def test_a_make_model_that_freezes_the_garbage_collector(wanted, scheduler):
    """What ``gc.freeze`` hides from it moves to where all processes have it all the same."""

    def make():
        model = stack()
        gc.freeze()
        return model

    assert same(recipe(make, scheduler=scheduler).train(workers=2, engine="processes"), wanted[scheduler])
    gc.unfreeze()


@pytest.mark.long
def test_tensors_without_memory_are_left_alone(wanted):
    """Tensors that outlive ``vmap`` and ``grad`` have no memory to look at: in the caller's process and in workers."""

    def make():
        model = stack()
        model.kept = leftovers()
        return model

    kept = leftovers()
    assert same(recipe(make).train(workers=2, engine="processes"), wanted[None])
    assert len(kept) == 2


def leftovers():
    """Tensors of function transforms that have ended."""
    kept = []
    torch.func.vmap(lambda row: kept.append(row) or row)(torch.zeros(2, 2))
    torch.func.grad(lambda row: kept.append(row) or row.sum())(torch.zeros(2))
    return kept


# Memory.


@pytest.mark.long
@LINUX
def test_a_frozen_base_is_held_once():
    """Not in the caller's process, nor in the workers', nor in the snapshot; the rest is what small ones take."""
    done = subprocess.run([sys.executable, held_once.__file__], capture_output=True, text=True, check=True, timeout=300)
    small, large = json.loads(done.stdout)
    assert 0.9 * held_once.SIZE < large["shared"] < 1.3 * held_once.SIZE
    for one, other in zip(small["own"], large["own"], strict=True):
        assert other - one < 0.5 * held_once.SIZE  # activations, gradients of what is narrow


def test_what_is_frozen_is_not_counted_as_room_that_a_run_needs():
    """The check before the start adds what will be written: a frozen base is there already."""
    touched = {}
    for trained in (False, True):
        made = Adapted(2048)
        made.base.requires_grad_(trained)
        job = phalanx.Recipe(made, (X, X), F.mse_loss, replicas=4, steps=1)
        touched[trained] = ArenaPlan(open_framework(job).sharing, place(4, 2)).layout.touched
    size = 4 * 2048 * 2048
    assert touched[False] < size
    assert touched[True] > 6 * size


@pytest.mark.long
def test_without_a_memfd_frozen_weights_lie_in_a_file(monkeypatch, tmp_path, wanted):
    """Without a name, like all shared memory there; nothing is left of it."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("phalanx.shared.memory.tempfile.tempdir", str(tmp_path))
    assert same(recipe(scheduler=Thawing).train(workers=2, engine="processes"), wanted[Thawing])
    assert list(tmp_path.iterdir()) == []


def test_what_a_worker_inherited_stays_frozen():
    """A worker that moves its model looks at objects of its own alone: to list all others takes 60 ms a start."""

    def thawed(output, target):
        return F.mse_loss(output, target) * (1 if gc.get_freeze_count() else 2)

    x = torch.arange(32.0).reshape(8, 4) / 32
    recipe = phalanx.Recipe(torch.nn.Linear(4, 1), (x, x[:, :1]), thawed, replicas=2, batch_size=4, steps=2)
    plain = dataclasses.replace(recipe, loss_fn=F.mse_loss)
    assert recipe.train(workers=2, engine="processes").digest == plain.train(engine="inline").digest
