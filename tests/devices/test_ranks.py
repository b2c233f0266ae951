"""Several devices are workers with a copy of the state each, on CPUs here: neither number nor deaths move a bit.

Those of test_accelerators.py are none.
"""

import dataclasses
import functools
import os
import signal
import time
import types
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.engines import flat
from phalanx.engines.devices import buckets, spread, transport
from phalanx.engines.devices.early import Early
from phalanx.engines.devices.exchanged import Exchanged
from phalanx.engines.processes import driver
from phalanx.engines.processes.board import Shared
from phalanx.engines.processes.worker import Worker
from phalanx.engines.recovery.supervisor import Supervisor
from phalanx.frameworks.torch import accelerators
from phalanx.frameworks.torch.adapter import Torch
from phalanx.frameworks.torch.optimizer import Update
from phalanx.plan.lifecycle import Stage
from phalanx.shared.layout import Spec
from tests.by_hand import answer
from tests.devices.planting import Planted
from tests.engines.deaths import PLACES, Trapped, hunted, once, sprung, strike
from tests.families import ADAMW, DATA, FAMILIES, OPTIMIZERS, SCHEDULERS, Elsewhere, conv_norm, terms
from tests.proof.faults import flip
from tests.sampling import cover, generator, sample

MLP = FAMILIES["mlp"]
NORM = FAMILIES["conv_norm"]
CASES = {
    **{name: (family, max(3, family.replicas[-1]), {}) for name, family in FAMILIES.items()},
    **{f"optimizer {name}": (MLP, 4, {"optimizer": OPTIMIZERS[name]}) for name in OPTIMIZERS},
    **{f"scheduler {name}": (MLP, 4, {"scheduler": SCHEDULERS[name]}) for name in SCHEDULERS},
    **{f"data {name}": (MLP, 4, DATA[name]) for name in DATA},
}


def devices(count):
    """Options for so many devices; one is this process."""
    return {"devices": ["cpu"] * count} if count > 1 else {"engine": "inline"}


def trained(recipe, count, **options):
    """Digest and losses of a run on so many devices."""
    result = recipe.train(**devices(count), **options)
    return result.digest, result.loss_history


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_devices(name):
    """Two and three devices end in the bits and losses of the folded loop."""
    family, replicas, changes = CASES[name]
    wanted = answer(family.recipe(replicas, **changes))
    assert trained(family.recipe(replicas, **changes), 2) == wanted
    assert trained(family.recipe(replicas, **changes), 3) == wanted


@pytest.mark.parametrize("replicas", sample("cuts", range(2, 10), 1))
def test_any_cut(replicas):
    """However many replicas there are and wherever their blocks are cut, up to four devices."""
    recipe = MLP.recipe(replicas, batch_size=11, max_norm=0.1)
    wanted = answer(recipe)
    counts = range(2, min(replicas, 4) + 1)
    assert [trained(recipe, count) for count in counts] == [wanted] * len(counts)


@pytest.mark.long
def test_resumed_on_other_devices(tmp_path):
    """A run goes on with other devices, with workers, and with one device, to the digest of one that never stopped."""
    recipe = [NORM.recipe(4, steps=steps, optimizer=OPTIMIZERS["adamw"]) for steps in (2, 4, 5, 6)]
    recipe[0].train(devices=["cpu"] * 3, run_dir=tmp_path)
    recipe[1].train(devices=["cpu"] * 2, run_dir=tmp_path)
    recipe[2].train(workers=2, run_dir=tmp_path)
    result = recipe[3].train(devices=["cpu"] * 4, run_dir=tmp_path)
    assert (result.digest, result.loss_history) == trained(recipe[3], 1)


def test_between_steps():
    """Evaluation, snapshots in memory and batches that the caller brings are those of one device."""

    def look(count):
        with NORM.recipe(3, steps=4).start(**devices(count)) as run:
            seen = []
            for _ in run:
                seen.append(run.evaluate(lambda out, y: F.cross_entropy(out, y), NORM.data, batch_size=7))
                seen.append(run.result().digest)
            return seen

    assert look(2) == look(3) == look(1)


class Remembering(nn.Module):
    """Keeps what it saw last in training where nobody looks for state."""

    def __init__(self):
        super().__init__()
        self.last, self.seen = nn.Linear(5, 3), 0.0

    def forward(self, x):
        if self.training:
            self.seen = x.mean().detach()
        return self.last(x) + self.seen


def test_a_chunk_is_always_measured_on_the_same_device():
    """Two evaluations of one state agree, also of a model with state that devices do not share."""
    with MLP.recipe(4, make_model=Remembering).start(devices=["cpu"] * 2) as run:
        next(run)
        values = {run.evaluate(F.cross_entropy, MLP.data, batch_size=len(MLP.data[0])) for _ in range(4)}
    assert len(values) == 1


@pytest.mark.long
def test_skipped_steps_and_weights():
    """A step that is not finite is skipped, and replicas of weight 0 are left out, on several devices as on one."""
    x, y = torch.arange(24.0).reshape(12, 2) / 24, torch.arange(12) % 3
    spoiled = x.clone()
    spoiled[7] = torch.inf

    def recipe(data, loss_fn, **more):
        return phalanx.Recipe(lambda: nn.Linear(2, 3), data, loss_fn, replicas=4, batch_size=6, steps=5, **more)

    counted = phalanx.weighted(lambda out, t: F.cross_entropy(out, t), lambda out, t: (t != 1).sum())
    for made in (
        recipe((spoiled, y), F.cross_entropy, on_nonfinite="skip", max_norm=1.0),
        recipe((x, y), counted),
        recipe((x, y.clamp(max=1)), counted, shuffle=False),
    ):
        assert repr(trained(made, 2)) == repr(trained(made, 4)) == repr(trained(made, 1))


def test_what_user_code_raises_has_its_replica():
    """Replicas are begun ahead of their turn, but an error names the replica that it belongs to."""

    def loss_fn(output, target):
        if bool((target == 5).any()):
            raise KeyError("five")
        return output.mean()

    data = torch.ones(12, 2), torch.arange(12)
    recipe = phalanx.Recipe(lambda: nn.Linear(2, 1), data, loss_fn, replicas=6, batch_size=12, steps=1, shuffle=False)
    with pytest.raises(phalanx.WorkerError) as caught:
        recipe.train(devices=["cpu"] * 3)
    assert (caught.value.replica, list(caught.value.samples)) == (2, [4, 5])


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            ["cpu"] * 4,
            "devices names 4 devices, but there are 3 replicas to compute; name at most 3, or raise replicas=",
        ),
        (["cpu", "meta"], "devices names 'meta', which torch cannot use here"),
        (["nowhere:0"], "devices names 'nowhere:0', which torch cannot use here"),
        (["local"], "devices names 'local', but"),
    ],
)
def test_wrong_devices(devices, message):
    """Each is refused by name, with the way out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(phalanx.UsageError, match=message):
            MLP.recipe(3).train(devices=devices)


class Dropped(nn.Module):
    """Batch norm that a replica's forward uses or leaves out, as the random numbers say."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.norm(x) if torch.rand(()) < 0.5 else x)


@pytest.mark.long
def test_buffers_that_are_written_uncounted():
    """Batch norm counts no write of its statistics: they are settled wherever and whenever it is used first."""
    recipe = MLP.recipe(6, make_model=Dropped, batch_size=18, steps=8, drop_last=True)
    assert trained(recipe, 3) == trained(recipe, 2) == trained(recipe, 1)


def test_after_an_error_in_the_first_step():
    """What the first replicas wrote into buffers before user code raised is undone."""
    calls = iter(range(1000))

    def loss_fn(output, target):
        if next(calls) == 1:
            raise KeyError("once")
        return F.cross_entropy(output, target)

    recipe = NORM.recipe(4, loss_fn=loss_fn)
    with recipe.start(devices=["cpu"] * 2) as run:
        with pytest.raises(phalanx.WorkerError):
            next(run)
        run.finish()
        assert run.result().digest == trained(NORM.recipe(4), 1)[0]


def test_a_batch_instead_of_the_planned_one():
    """What was read ahead for a planned step is not taken for a batch that the caller brings."""
    x, y = MLP.data

    def look(count):
        with MLP.recipe(4, steps=6).start(**devices(count)) as run:
            return [
                next(run).loss,
                run.step((x[:9], y[:9])),
                next(run).loss,
                run.step((x[3:8], y[3:8])),
                run.result().digest,
            ]

    assert look(2) == look(3) == look(1)


def test_what_the_optimizer_s_factory_changes():
    """Parameters that it writes or freezes are the same on all devices."""

    def factory(named):
        named = list(named)
        with torch.no_grad():
            named[0][1].mul_(0.5)
        named[1][1].requires_grad_(False)
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

    recipe = MLP.recipe(4, optimizer=factory)
    assert trained(recipe, 3) == trained(recipe, 2) == trained(recipe, 1)


def test_hooks_and_closures_over_the_model():
    """What make_model hangs on parameters, and closures over its model, are each device's own."""

    def make():
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        model[0].weight.gain = 2.0
        model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] * model[0].weight.gain,))
        return model

    recipe = MLP.recipe(4, make_model=make)
    assert trained(recipe, 3) == trained(recipe, 2) == trained(recipe, 1)


@pytest.mark.long
def test_an_optimizer_that_torch_does_not_know():
    """One that keeps state of its own goes on in each worker as it would in one process."""
    recipe = MLP.recipe(3, optimizer=Elsewhere)
    assert trained(recipe, 3) == trained(recipe, 2) == trained(recipe, 1)


def test_hooks_of_the_optimizer_s_factory():
    """Each worker calls it, so that hooks which it registers on parameters are there on all devices."""

    def factory(named):
        named = list(named)
        named[0][1].register_hook(lambda gradient: gradient * 0.5)
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

    recipe = MLP.recipe(4, optimizer=factory)
    assert trained(recipe, 3) == trained(recipe, 2) == trained(recipe, 1)


def test_a_loss_that_holds_the_model():
    """It holds the one of its own worker, as in one process."""
    held = []

    def make():
        held.append(nn.Linear(5, 3))
        return held[-1]

    def loss_fn(output, target):
        return F.cross_entropy(output, target) + held[-1].weight.square().sum()

    recipe = MLP.recipe(4, make_model=make, loss_fn=loss_fn)
    assert trained(recipe, 2) == trained(recipe, 1)


def test_other_weights_in_a_worker():
    """The weights are those that make_model made first, whatever it makes in workers; the shapes must be the same."""
    caller = os.getpid()

    def make(grow):
        model = nn.Linear(5, 3, bias=not grow or os.getpid() == caller)
        if os.getpid() != caller:
            nn.init.ones_(model.weight)
        return model

    recipe = MLP.recipe(4, make_model=functools.partial(make, False))
    assert trained(recipe, 2) == trained(recipe, 1)
    with pytest.raises(phalanx.UsageError, match="make_model returned another model in a worker process"):
        trained(MLP.recipe(4, make_model=functools.partial(make, True)), 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "inline"}, "engine is 'inline', but devices names cpu, cpu, each of which is a worker"),
        ({"workers": 3}, "workers is 3, but devices names cpu, cpu, each of which is a worker"),
        ({"workers": 1}, "workers is 1, but devices names cpu, cpu, each of which is a worker"),
        ({"engine": "processes", "workers": 3}, "workers is 3, but devices names cpu, cpu, each of which is a worker"),
    ],
)
def test_each_device_is_a_worker(given, message):
    """Another number of workers, or one process for all, is refused with the way out."""
    with pytest.raises(phalanx.UsageError, match=message):
        MLP.recipe(4).train(devices=["cpu"] * 2, **given)


@pytest.mark.parametrize("given", [{"workers": 2}, {"engine": "processes"}, {"engine": "processes", "workers": 2}])
def test_as_many_workers_as_devices(given):
    """Who says what is so anyway gets the same bits."""
    assert MLP.recipe(4).train(devices=["cpu"] * 2, **given).digest == trained(MLP.recipe(4), 1)[0]


def test_each_device_has_a_process():
    """There are as many workers as devices, none is the caller, and all end with the run."""
    with MLP.recipe(4).start(devices=["cpu"] * 3) as run:
        next(run)
        pids = run.worker_pids
        assert len(set(pids) - {os.getpid()}) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# ---- what runs hand out


def two_phases(replicas=4, **options):
    def first(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def second(model, batch):
        return model(batch[0]).square().mean()

    phases = [
        phalanx.Phase(first, parameters="0", loss_takes="model"),
        phalanx.Phase(second, parameters="2", loss_takes="model"),
    ]
    return phalanx.Recipe(
        MLP.make_model, MLP.data, phases=phases, replicas=replicas, batch_size=8, lr=0.1, **{"steps": 4, **options}
    )


def test_phases():
    """Losses that train a part of the model each are those of one device."""
    assert trained(two_phases(), 3) == trained(two_phases(), 2) == trained(two_phases(), 1)


def test_micro_batches():
    """A replica that is computed in pieces has the same bits on any device."""
    recipe = MLP.recipe(4, batch_size=16, micro_batches=2)
    assert trained(recipe, 3) == trained(recipe, 2) == trained(recipe, 1)


def samples():
    return zip(*MLP.data, strict=True)


@pytest.mark.long
def test_streams():
    """Samples that are read in order go to the replicas that they would have gone to."""
    recipe = MLP.recipe(4, data=phalanx.Stream(samples), steps=2)
    assert trained(recipe, 3) == trained(recipe, 2) == trained(recipe, 1)


@pytest.mark.parametrize("readers", [1, 3])
def test_readers(readers):
    """Processes that read ahead hand the same samples out."""
    recipe = MLP.recipe(4, **DATA["dataset"])
    assert trained(recipe, 2, readers=readers) == trained(recipe, 1)


def named(output, target):
    loss = F.cross_entropy(output, target)
    return {"loss": loss, "confidence": output.softmax(1).amax(1).mean()}


class Watching:
    """Keeps what a callback is told."""

    gradients = ("*.weight",)

    def __init__(self):
        self.seen = []

    def __call__(self, report):
        gradients = {name: value.numpy().tobytes() for name, value in report.gradients.items()}
        self.seen.append(
            (report.step, report.loss, report.lr, report.grad_norm, report.samples, report.losses, gradients)
        )


def test_callbacks_named_losses_and_gradients():
    """Reports have the losses by name and the gradients that a callback asks for, to the bit; so has an average."""

    def look(count):
        watching = Watching()
        recipe = MLP.recipe(4, loss_fn=named, max_norm=0.1, scheduler=SCHEDULERS["cosine"])
        result = recipe.train(**devices(count), callbacks=[watching, phalanx.callbacks.EMA(0.5)])
        averaged = {name: value.tolist() for name, value in result.averaged.items()}
        return watching.seen, averaged, result.digest

    alone = look(1)
    assert len(alone[0]) == MLP.steps
    assert alone[0][0][-1].keys() == {"0.weight", "2.weight"}
    assert look(2) == look(3) == alone


def averaged(recipe, count, **options):
    """The digest, and the average to the bit."""
    result = recipe.train(**devices(count), callbacks=[phalanx.callbacks.EMA(0.5)], **options)
    return result.digest, {name: value.numpy().tobytes() for name, value in result.averaged.items()}


class Foreign(torch.optim.SGD):
    """Not one of torch's own."""


def slow(cases, *quick):
    """All cases; those that are not ``quick`` are for the long tests."""
    return [pytest.param(case, marks=[] if case in quick else pytest.mark.long) for case in cases]


AVERAGED = {
    "conv": lambda: NORM.recipe(4, steps=6),
    "phases": lambda: two_phases(),
    "foreign": lambda: MLP.recipe(4, optimizer=functools.partial(Foreign, lr=0.1)),
    "skipped": lambda: MLP.recipe(4, loss_fn=infinite_once, on_nonfinite="skip"),
}


def infinite_once(output, target):
    """The second step is skipped, and its weights count once more."""
    return F.cross_entropy(output, target) / float(phalanx.current_step() != 1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", slow(AVERAGED, "conv", "phases"))
def test_averages_are_kept_by_workers(name):
    """They have the bits of one device's, after all phases, beside any optimizer."""
    wanted = averaged(AVERAGED[name](), 1)
    assert averaged(AVERAGED[name](), 2) == averaged(AVERAGED[name](), 3) == wanted


class Late(phalanx.callbacks.EMA):
    """Averages from the third step on; other callbacks may have attributes of any name."""

    given = "something of its own"

    def step(self, report):
        if report.step >= 2:
            super().step(report)


def test_an_average_of_a_class_of_its_own():
    """What a subclass does in ``step`` is done on any number of devices."""

    def look(count):
        averaged = NORM.recipe(4, steps=5).train(**devices(count), callbacks=[Late(0.5)]).averaged
        return {name: value.tolist() for name, value in averaged.items()}

    plain = NORM.recipe(4, steps=5).train(**devices(1), callbacks=[phalanx.callbacks.EMA(0.5)]).averaged
    assert look(2) == look(1) != {name: value.tolist() for name, value in plain.items()}


@pytest.mark.parametrize(("first", "then"), cover("averages", [1, 2], [1, 2, 3]))
def test_averages_go_on(tmp_path, first, then):
    """A resumed run goes on with the average, on any number of devices; evaluations in between use it."""
    recipe = NORM.recipe(4, steps=6)
    wanted = averaged(recipe, 1)
    with recipe.start(**devices(first), callbacks=[phalanx.callbacks.EMA(0.5)], run_dir=tmp_path) as run:
        for _ in range(3):
            next(run)
        outputs = run.predict(NORM.data[0])
    with recipe.start(callbacks=[phalanx.callbacks.EMA(0.5)]) as run:
        for _ in range(3):
            next(run)
        assert torch.equal(run.predict(NORM.data[0]), outputs)
    assert averaged(recipe, then, run_dir=tmp_path) == wanted


@pytest.mark.long
def test_replacements_have_the_average():
    """A killed worker's successor takes it from a survivor, as it takes the optimizer's state."""
    recipe = NORM.recipe(4, steps=6)
    with recipe.start(**devices(3), callbacks=[phalanx.callbacks.EMA(0.5)]) as run:
        for report in run:
            if report.step in (1, 3):
                os.kill(run.worker_pids[report.step // 2], signal.SIGKILL)
        result = run.result()
    found = result.digest, {name: value.numpy().tobytes() for name, value in result.averaged.items()}
    assert found == averaged(recipe, 1)
    assert len(result.incidents) >= 2


def unaveraged(patch):
    """The last worker averages nothing in the third step."""
    average = Worker._average

    def skipped(worker, update):
        if worker.number < 2 or update != 2:  # planted
            average(worker, update)

    patch.setattr(Worker, "_average", skipped)


@pytest.mark.long
def test_an_average_that_is_not_everybody_s():
    """These tests can fail: what the last worker hands over has other bits then."""
    recipe = NORM.recipe(4, steps=4)
    faulty = dataclasses.replace(recipe, make_model=Planted(recipe.make_model, unaveraged))
    assert averaged(faulty, 3) != averaged(recipe, 1)
    assert averaged(faulty, 3)[0] == averaged(recipe, 1)[0]


def test_weights_between_steps():
    """They are those of one device, on the CPU."""

    def look(count):
        with NORM.recipe(3).start(**devices(count)) as run:
            next(run)
            return {name: value.tolist() for name, value in run.params.items()}

    assert look(2) == look(1)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_audits(share):
    """A replica that is computed again by another worker has the same gradient."""
    recipe = NORM.recipe(4)
    result = recipe.train(devices=["cpu"] * 2, audit=share)
    assert result.digest == trained(recipe, 1)[0]
    assert (result.audited == result.steps) == (share == 1)


# ---- faults


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


def small_buckets(patch):
    """No fault."""
    patch.setattr(buckets, "BUCKET", 64)


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


def dropping():
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))


class Halves(nn.Module):
    """The first replica alone uses the second half, which lies first in a bucket."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(1000))

    def forward(self, x):
        weights = self.first + self.second if x[0, 0] < 1 else self.first
        return (weights * x.mean()).sum()


def equal_layers():
    return nn.Sequential(*[nn.Linear(5, 5, bias=False) for _ in range(4)])


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


@pytest.mark.cases(3)
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


# ---- sent early


class Sending:
    """Notes in a file for each step of the first worker whether what it sent early was what there is: "+", "-" or ".".

    ``fault(patch)`` is planted, too.
    """

    def __init__(self, file, fault=None):
        self.file, self.fault = str(file), fault

    def __call__(self, patch):
        sent_early = Exchanged._sent_early

        def noted(sums, masks, over):
            early = sums._early is not None
            mean = sent_early(sums, masks, over)
            if sums._station.worker == 0:
                with open(self.file, "a") as file:
                    file.write("." if not early else "-" if mean is None else "+")
            return mean

        patch.setattr(Exchanged, "_sent_early", noted)
        if self.fault is not None:
            self.fault(patch)


class Again(nn.Module):
    """A part that is computed again in the backward pass: weights that both parts use get gradients one by one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        inner = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        return self.last(self.first(inner))


def in_full(**changes):
    return MLP.recipe(6, batch_size=12, steps=7, drop_last=True, **changes)


EARLY = {  # the recipe, and what is sent in each step
    "whole batches": (lambda: in_full(), "..+++++"),
    "weights": (lambda: MLP.recipe(4, batch_size=10, steps=7, drop_last=True), "..+++++"),
    "returned weights": (lambda: in_full(loss_fn=half), "..---.."),
    "another in some steps": (lambda: in_full(make_model=Changing), "..++-.."),
    "parts": (lambda: in_full(make_model=Again), "..---.."),
    "micro-batches": (lambda: in_full(micro_batches=2), "......."),
    "phases": (lambda: two_phases(steps=4), "." * 8),
    "small buckets": (lambda: in_full(make_model=equal_layers, loss_fn=F.mse_loss, data=NUMBERS), "..+++++"),
}
NUMBERS = (torch.arange(240.0).reshape(48, 5) / 240, torch.arange(240.0).reshape(48, 5) / 480)


def half(output, target):
    return F.cross_entropy(output, target), 0.5


class Changing(nn.Module):
    """From the fifth step on the second half has no gradient in every other step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        step = phalanx.current_step()
        return self.first(x) + (self.second(x) if step < 4 or step % 2 else 0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", slow(EARLY, "whole batches", "weights", "parts"))
def test_gradients_are_sent_early(tmp_path, name):
    """While others are computed, where they can be foreseen; the bits are those of one device in any case."""
    make, sent = EARLY[name]
    recipe = make()
    fault = small_buckets if name == "small buckets" else None
    planted = dataclasses.replace(recipe, make_model=Planted(recipe.make_model, Sending(tmp_path / "sent", fault)))
    assert trained(planted, 3) == trained(recipe, 1)
    assert (tmp_path / "sent").read_text() == sent


def sent_too_soon(patch):
    """A bucket goes as soon as one gradient of it is there."""
    patch.setattr(Early, "arrived", lambda own, index, gradient: (arrived(own, index, gradient), send_all(own)))


arrived = Early.arrived


def send_all(early):
    while len(early._journeys) < len(early._buckets):
        early._send()


def parts_unseen(patch):
    """A gradient that comes in parts is taken as it was when its first part came."""

    def first(own, index, gradient):
        if index not in own.came:
            arrived(own, index, gradient)

    patch.setattr(Early, "arrived", first)
    uncompared(patch)


def uncompared(patch):
    """Nobody sees that a gradient is another one than that which was sent; no fault where none is planted."""
    patch.setattr(Early, "compare", lambda own, gradient: None)


def unscaled(patch):
    """The weight of the last replica is forgotten."""
    uncompared(patch)
    begin = Early.__init__
    patch.setattr(Early, "__init__", lambda own, *facts: begin(own, *facts[:-1], 1))


def left_out(patch):
    """The last replica is added to nothing."""
    patch.setattr(Early, "expect", lambda own, sums: setattr(own, "_sums", [(lefts[:0], last) for lefts, last in sums]))


EARLY_FAULTS = {
    sent_too_soon: "whole batches",
    parts_unseen: "parts",
    unscaled: "weights",
    left_out: "whole batches",
}


@pytest.mark.parametrize("fault", slow(EARLY_FAULTS, sent_too_soon, unscaled), ids=lambda fault: fault.__name__)
def test_faults_of_sending_early_are_seen(tmp_path, fault):
    """The test above can fail: each ends in other bits."""
    recipe = EARLY[EARLY_FAULTS[fault]][0]()
    planted = dataclasses.replace(recipe, make_model=Planted(recipe.make_model, Sending(tmp_path / "sent", fault)))
    assert trained(planted, 3) != trained(recipe, 1)


class Unsteady(nn.Linear):
    """Computes something else each time, on purpose."""

    calls = 0

    def forward(self, x):
        Unsteady.calls += 1
        return super().forward(x) * (1 + Unsteady.calls / 1000)


class OfTwoDtypes(nn.Module):
    """Half of its parameters are in float64."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 32), nn.Linear(32, 3).double()

    def forward(self, x):
        return self.second(torch.relu(self.first(x)).double()).float()


def test_the_norm_of_several_dtypes_is_that_of_workers():
    """Clipped on CPUs named as devices, in workers and in one process, a run ends in the same digest and norms."""

    def ended(make_model=OfTwoDtypes, **options):
        with MLP.recipe(4, make_model=make_model, max_norm=0.05).start(**options) as run:
            norms = [report.grad_norm for report in run]
            return norms, run.result().digest

    wanted = ended(**devices(1))
    assert ended(**devices(2)) == ended(workers=2) == wanted
    assert ended(Planted(OfTwoDtypes, of_one_dtype), **devices(2)) != wanted


def of_one_dtype(patch):
    """The norm is that of the gradients in float64 alone."""
    norm = Update.norm

    def alone(own, gradient):
        return norm(own, [entry if entry is not None and entry.itemsize == 8 else None for entry in gradient])

    patch.setattr(Update, "norm", alone)


class Halving(nn.Module):
    """At the end of each backward pass all gradients are halved, in place or by others in their place."""

    def __init__(self, other):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
        self.other = other

    def forward(self, x):
        output = self.layers(x)
        if output.requires_grad:
            output.register_hook(lambda _: Variable._execution_engine.queue_callback(self.halve))
        return output

    def halve(self):
        for parameter in self.parameters():
            if self.other:
                parameter.grad = parameter.grad / 2
            else:
                parameter.grad.div_(2)


@pytest.mark.parametrize("other", [False, True], ids=["in place", "others"])
@pytest.mark.parametrize("batch_size", [12, 11], ids=["even", "weighted"])
def test_gradients_that_change_after_they_were_sent(other, batch_size):
    """They are sent again, to the bits of one process."""
    recipe = MLP.recipe(4, steps=8, batch_size=batch_size, make_model=functools.partial(Halving, other))
    wanted = answer(recipe)
    assert trained(recipe, 2) == trained(recipe, 1) == wanted
    unseen = dataclasses.replace(recipe, make_model=Planted(recipe.make_model, uncompared))
    assert trained(unseen, 2) != wanted


class WithNothing(nn.Module):
    """Its first parameter is empty, and the last to travel."""

    def __init__(self, width):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))
        self.layer = nn.Linear(5, width, bias=False)

    def forward(self, x):
        return self.layer(x)[:, :3] + self.nothing.sum()


@pytest.mark.parametrize(("width", "count"), [(51, 2), (76, 3)])
def test_an_empty_parameter_travels_with_the_others(width, count):
    """Also early, where it begins at the very end of a bucket: 255 elements fill one of two slices of 128."""
    recipe = MLP.recipe(4, steps=6, make_model=functools.partial(WithNothing, width))
    assert trained(recipe, count) == trained(recipe, 1)


class Deciding:
    """Notes for each worker and step whether it sends early."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self, patch):
        foresee = Exchanged._foresee

        def noted(sums, early):
            foresee(sums, early)
            with open(f"{self.folder}/{sums._station.worker}", "a") as file:
                file.write("." if sums._early is None else "+")

        patch.setattr(Exchanged, "_foresee", noted)


@pytest.mark.filterwarnings("ignore:replica 0 of step")
def test_workers_decide_alike_where_replicas_may_differ(tmp_path):
    """The worker that warns of another outcome still knows in which steps the others compute a replica twice."""
    recipe = MLP.recipe(4, make_model=Planted(functools.partial(Unsteady, 5, 3), Deciding(tmp_path)), steps=13)
    recipe.train(**devices(2), nondeterministic="allow")
    first, second = ((tmp_path / name).read_text() for name in "01")
    assert first == second
    assert "+" in first


def test_flags_of_a_worker_that_is_gone():
    """A replica without samples sends no buffers, though a dead worker said of the step before that they changed."""
    between = spread.Spread([Spec((2,), (1,), "float32", 4)], [range(2)], 0, "cpu")
    nobody = types.SimpleNamespace(gather=lambda whole, mine: whole.copy_(mine), wait=lambda work: None)
    rows, losses = between.total(nobody, np.array([[True], [True]]), {0: [torch.tensor([1.0, 2.0])]}, [0.5, 0.0])
    assert rows[0][0].tolist() == [1, 2]
    assert losses == [0.5, 0.0]


class BrokenOff:
    """In the fourth step the last worker's memory is short once, when half of the exchange is done."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self, patch):
        travel = flat.Flat.travel

        def failing(own, carriers, number, *facts, **how):
            last = own._among[0].position == 2
            for at, whole in enumerate(travel(own, carriers, number, *facts, **how)):
                if last and number == at == 1 and phalanx.current_step() == 3 and once(self.folder, "short"):
                    raise MemoryError("planted")
                yield whole

        small_buckets(patch)
        patch.setattr(flat.Flat, "travel", failing)


def test_an_exchange_that_was_broken_off(tmp_path):
    """All connect anew after an error of one worker in the middle of it; the step is done again."""
    recipe = in_full()
    faulty = dataclasses.replace(recipe, make_model=Planted(recipe.make_model, BrokenOff(tmp_path)))
    with faulty.start(**devices(3)) as run:
        with pytest.raises(MemoryError, match="planted"):
            run.finish()
        assert run.steps == 3
        run.finish()
        assert run.result().digest == trained(recipe, 1)[0]


@pytest.mark.long
def test_an_error_while_gradients_are_under_way(tmp_path):
    """A replica that raises leaves the others waiting for what it would have sent; the step can be done again."""
    recipe = in_full()
    raising = in_full(loss_fn=Raising(tmp_path))
    with raising.start(**devices(3)) as run:
        with pytest.raises(phalanx.WorkerError, match="only once"):
            run.finish()
        assert run.steps == 4
        run.finish()
        assert run.result().digest == trained(recipe, 1)[0]


class Raising:
    """The first replica's loss raises once, in the fifth step."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self, output, target):
        if phalanx.current_step() == 4 and once(self.folder, "raised"):
            raise ValueError("only once")
        return F.cross_entropy(output, target)


def other_bits_on_one(patch):
    """The last worker gets one bit of the mean wrong."""
    total = flat.Flat.total

    def flipped(own, *facts, **how):
        mean = total(own, *facts, **how)
        if own._among[0].position == 2:  # planted
            flip(mean[0])
        return mean

    patch.setattr(flat.Flat, "total", flipped)


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


@pytest.mark.parametrize("replicas", [4, 7])
def test_many_small_buckets(replicas):
    """Gradients that travel in a bucket each come to the same bits."""
    recipe = MLP.recipe(replicas, make_model=equal_layers)
    wanted = trained(recipe, 1)
    assert trained(dataclasses.replace(recipe, make_model=Planted(equal_layers, small_buckets)), 3) == wanted


# ---- deaths


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
        from phalanx.engines.processes.worker import Worker

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


class OneDevice:
    """A device module as mps has it: one device, whose generator is named by nothing."""

    state = 0

    def is_available(self):
        return True

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        self.state = seed

    def get_rng_state(self):
        return self.state

    def set_rng_state(self, state):
        self.state = state


def test_a_kind_of_one_device(monkeypatch):
    """Its generator is seeded and put back, though it takes no device and has no seed for all."""
    module = OneDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(accelerators, "MENTIONED", {"idle"})
    seeds = []

    def make():
        seeds.append(module.state)
        return nn.Linear(5, 3)

    module.manual_seed(42)
    MLP.recipe(2, make_model=make, seed=7).train(engine="inline")
    assert (seeds, module.state) == ([7], 42)
