"""Several devices are workers with a copy of the state each, on CPUs here: their number moves no bit.

Those of test_accelerators.py are none.
"""

import dataclasses
import functools
import os
import signal
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.engines.devices.exchanged import Exchanged
from phalanx.frameworks.torch import accelerators
from phalanx.frameworks.torch.optimizer_state import Averages
from tests.by_hand import answer
from tests.devices.planting import Planted
from tests.devices.ranks import (
    MLP,
    NORM,
    devices,
    equal_layers,
    slow,
    small_buckets,
    trained,
    two_phases,
)
from tests.families import DATA, FAMILIES, OPTIMIZERS, SCHEDULERS, Elsewhere
from tests.sampling import cover, sample

CASES = {
    **{name: (family, max(3, family.replicas[-1]), {}) for name, family in FAMILIES.items()},
    **{f"optimizer {name}": (MLP, 4, {"optimizer": OPTIMIZERS[name]}) for name in OPTIMIZERS},
    **{f"scheduler {name}": (MLP, 4, {"scheduler": SCHEDULERS[name]}) for name in SCHEDULERS},
    **{f"data {name}": (MLP, 4, DATA[name]) for name in DATA},
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_devices(name):
    """Two and three devices end in the bits and losses of the folded loop."""
    family, replicas, changes = CASES[name]
    wanted = answer(family.recipe(replicas, **changes))
    assert trained(family.recipe(replicas, **changes), 2) == wanted
    assert trained(family.recipe(replicas, **changes), 3) == wanted


@pytest.mark.long
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


@pytest.mark.long
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


WRONG = {
    "more than replicas": (
        {"devices": ["cpu"] * 4},
        "devices names 4 devices, but there are 3 replicas to compute; name at most 3, or raise replicas=",
    ),
    "meta": ({"devices": ["cpu", "meta"]}, "devices names 'meta', which torch cannot use here"),
    "nowhere": ({"devices": ["nowhere:0"]}, "devices names 'nowhere:0', which torch cannot use here"),
    "local": ({"devices": ["local"]}, "devices names 'local', but"),
    "inline": ({"engine": "inline"}, "engine is 'inline', but devices names cpu, cpu, each of which is a worker"),
    "3 workers": ({"workers": 3}, "workers is 3, but devices names cpu, cpu, each of which is a worker"),
    "1 worker": ({"workers": 1}, "workers is 1, but devices names cpu, cpu, each of which is a worker"),
    "3 processes": ({"engine": "processes", "workers": 3}, "workers is 3, but devices names cpu, cpu, each of which"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options(name):
    """Each is refused by name, with the way out: devices that are not there, and another number of workers."""
    given, message = WRONG[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(phalanx.UsageError, match=message):
            MLP.recipe(3).train(**{"devices": ["cpu"] * 2, **given})


READERS = [{"readers": 1}, {"readers": 3}]


@pytest.mark.long
@pytest.mark.parametrize(
    "given", [*READERS, {"workers": 2}, {"engine": "processes"}, {"engine": "processes", "workers": 2}]
)
def test_options_that_change_nothing(given):
    """Processes that read ahead hand the same samples out; who says how many workers there are gets the same bits."""
    recipe = MLP.recipe(4, **DATA["dataset"])
    assert trained(recipe, 2, **given) == trained(recipe, 1)


class Dropped(nn.Module):
    """Batch norm that a replica's forward uses or leaves out, as the random numbers say."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.norm(x) if torch.rand(()) < 0.5 else x)


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


def changing(named):
    """A factory that writes a parameter, freezes another and hooks a third one."""
    named = list(named)
    with torch.no_grad():
        named[0][1].mul_(0.5)
    named[1][1].requires_grad_(False)
    named[2][1].register_hook(lambda gradient: gradient * 0.5)
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def hooked():
    """A model with hooks, an attribute on a parameter, and a closure over itself."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model[0].weight.gain = 2.0
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] * model[0].weight.gain,))
    return model


HELD = []


def holding():
    HELD.append(nn.Linear(5, 3))
    return HELD[-1]


def of_the_held(output, target):
    """A loss that holds the model: that of its own worker."""
    return F.cross_entropy(output, target) + HELD[-1].weight.square().sum()


def in_small_buckets(replicas):
    """Each gradient travels in a bucket of its own."""
    return MLP.recipe(replicas, make_model=Planted(equal_layers, small_buckets))


class WithNothing(nn.Module):
    """Its first parameter is empty, and the last to travel."""

    def __init__(self, width):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))
        self.layer = nn.Linear(5, width, bias=False)

    def forward(self, x):
        return self.layer(x)[:, :3] + self.nothing.sum()


def with_nothing(width):
    """An empty parameter travels with the others, early, too: 255 elements fill one of two slices of 128."""
    return MLP.recipe(4, steps=6, make_model=functools.partial(WithNothing, width))


def samples():
    return zip(*MLP.data, strict=True)


QUICK = {
    "a factory that changes parameters": lambda: MLP.recipe(4, optimizer=changing),
    "hooks and closures over the model": lambda: MLP.recipe(4, make_model=hooked),
    "a loss that holds the model": lambda: MLP.recipe(4, make_model=holding, loss_fn=of_the_held),
    "phases": two_phases,
    "micro-batches": lambda: MLP.recipe(4, batch_size=16, micro_batches=2),
    "buckets of 4 replicas": lambda: in_small_buckets(4),
    "buckets of 7 replicas": lambda: in_small_buckets(7),
    "an empty parameter at the end of a bucket for two": lambda: with_nothing(51),
    "an empty parameter at the end of a bucket for three": lambda: with_nothing(76),
}
LONG = {
    "buffers that are written uncounted": lambda: MLP.recipe(
        6, make_model=Dropped, batch_size=18, steps=8, drop_last=True
    ),
    "an optimizer that torch does not know": lambda: MLP.recipe(3, optimizer=Elsewhere),
    "a stream": lambda: MLP.recipe(4, data=phalanx.Stream(samples), steps=2),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", slow(QUICK | LONG, *QUICK))
def test_whatever_recipes_do(name):
    """What they hang on models, keep in closures, or cut otherwise is each device's own: two and three end as one."""
    recipe = (QUICK | LONG)[name]()
    assert trained(recipe, 3) == trained(recipe, 2) == trained(recipe, 1)


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


def test_each_device_has_a_process():
    """There are as many workers as devices, none is the caller, and all end with the run."""
    with MLP.recipe(4).start(devices=["cpu"] * 3) as run:
        next(run)
        pids = run.worker_pids
        assert len(set(pids) - {os.getpid()}) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


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


@pytest.mark.long
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


def infinite_once(output, target):
    """The second step is skipped, and its weights count once more."""
    return F.cross_entropy(output, target) / float(phalanx.current_step() != 1)


AVERAGED = {
    "conv": lambda: NORM.recipe(4, steps=6),
    "phases": lambda: two_phases(),
    "foreign": lambda: MLP.recipe(4, optimizer=functools.partial(Foreign, lr=0.1)),
    "skipped": lambda: MLP.recipe(4, loss_fn=infinite_once, on_nonfinite="skip"),
}


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.cases(1)
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
    commit = Exchanged.commit

    def skipped(sums, step, *rest):
        with patch.context() as once:
            if (sums._station.worker, step) == (2, 2):  # planted
                once.setattr(Averages, "step", lambda *_: None)  # planted
            commit(sums, step, *rest)

    patch.setattr(Exchanged, "commit", skipped)


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


@pytest.mark.long
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_audits(share):
    """A replica that is computed again by another worker has the same gradient."""
    recipe = NORM.recipe(4)
    result = recipe.train(devices=["cpu"] * 2, audit=share)
    assert result.digest == trained(recipe, 1)[0]
    assert (result.audited == result.steps) == (share == 1)


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
