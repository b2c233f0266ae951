"""Several devices of one process, on CPUs: their number moves no bit. Those of test_accelerators.py are none."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.engines import links
from phalanx.frameworks.torch import accelerators, lanes
from tests.by_hand import answer
from tests.families import DATA, FAMILIES, OPTIMIZERS, SCHEDULERS, terms

MLP = FAMILIES["mlp"]
NORM = FAMILIES["conv_norm"]
CASES = {
    **{name: (family, max(3, family.replicas[-1]), {}) for name, family in FAMILIES.items()},
    **{f"optimizer {name}": (MLP, 4, {"optimizer": OPTIMIZERS[name]}) for name in OPTIMIZERS},
    **{f"scheduler {name}": (MLP, 4, {"scheduler": SCHEDULERS[name]}) for name in SCHEDULERS},
    **{f"data {name}": (MLP, 4, DATA[name]) for name in DATA},
}


def trained(recipe, count, **options):
    """Digest and losses of a run on so many devices."""
    result = recipe.train(devices=["cpu"] * count, engine="inline", **options)
    return result.digest, result.loss_history


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_devices(name):
    """Two and three devices end in the bits and losses of the folded loop."""
    family, replicas, changes = CASES[name]
    wanted = answer(family.recipe(replicas, **changes))
    assert trained(family.recipe(replicas, **changes), 2) == wanted
    assert trained(family.recipe(replicas, **changes), 3) == wanted


@pytest.mark.parametrize("replicas", range(2, 10))
def test_any_cut(replicas):
    """However many replicas there are and wherever their blocks are cut, up to one device per replica."""
    recipe = MLP.recipe(replicas, batch_size=11, max_norm=0.1)
    wanted = answer(recipe)
    assert [trained(recipe, count) for count in range(2, replicas + 1)] == [wanted] * (replicas - 1)


def in_order_of_arrival(monkeypatch):
    monkeypatch.setattr(links, "added", lambda count, nodes, there: [(there[0], other) for other in there[1:][::-1]])


def not_spread(monkeypatch):
    monkeypatch.setattr(lanes.Exchange, "spread", lambda *_: None)


def buffers_of_the_first(monkeypatch):
    original = lanes.TorchLanes._settle  # planted
    monkeypatch.setattr(lanes.TorchLanes, "_settle", lambda own, buffers: original(own, buffers[:1]))


def without_seeding(monkeypatch):
    monkeypatch.setattr("phalanx.frameworks.torch.replica.feed.Feed.seed", lambda *_: None)


def dropping():
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))


@pytest.mark.usefixtures("computed_once")
@pytest.mark.parametrize("fault", [in_order_of_arrival, not_spread, buffers_of_the_first, without_seeding])
def test_faults_are_seen(monkeypatch, fault):
    """These tests can fail: sums in another order, stale copies, one replica's buffers, or seeds left out differ."""
    noisy = MLP.recipe(6, batch_size=18, steps=3, drop_last=True, make_model=dropping)
    recipe = terms(6) if fault is in_order_of_arrival else noisy
    wanted = trained(recipe, 1)
    assert trained(recipe, 3) == wanted
    fault(monkeypatch)
    assert trained(recipe, 3) != wanted


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
        with NORM.recipe(3, steps=4).start(devices=["cpu"] * count, engine="inline") as run:
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


def test_data_is_read_a_step_ahead_only_where_nobody_can_change_it():
    """A callback may change a dataset of samples between steps, so those are read in their own step then."""

    class Growing(torch.utils.data.Dataset):
        factor = 1.0

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.full((2,), float(index)) * self.factor, index % 3

    def run(count):
        data = Growing()

        def grow(report):
            data.factor += 1

        recipe = phalanx.Recipe(lambda: nn.Linear(2, 3), data, F.cross_entropy, replicas=4, batch_size=4, steps=6)
        return trained(recipe, count, callbacks=[grow])

    assert run(2) == run(1)


def test_a_state_that_torch_does_not_know():
    """An optimizer from elsewhere has all parameters on the first device: it may look at several at once."""
    recipe = (
        FAMILIES["elsewhere"].recipe(3) if "elsewhere" in FAMILIES else MLP.recipe(3, optimizer=OPTIMIZERS["adamw"])
    )
    with recipe.start(devices=["cpu"] * 3) as run:
        run.finish()
        assert run.result().digest == answer(recipe)[0]


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


def test_workers_have_one_device():
    """Several devices are lanes of one process: with worker processes they are refused."""
    with pytest.raises(phalanx.UsageError, match="which are devices of one process, but worker processes"):
        MLP.recipe(3).train(devices=["cpu", "cpu"], workers=2)


class Dropped(nn.Module):
    """Batch norm that a replica's forward uses or leaves out, as the random numbers say."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.norm(x) if torch.rand(()) < 0.5 else x)


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
        with MLP.recipe(4, steps=6).start(devices=["cpu"] * count, engine="inline") as run:
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


def test_hooks_of_the_optimizer_s_factory():
    """It has one device's parameters, so hooks that it registers on them are refused."""

    def factory(named):
        named = list(named)
        named[0][1].register_hook(lambda gradient: gradient * 0.5)
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

    with pytest.raises(phalanx.UsageError, match="optimizer registers hooks on parameters"):
        MLP.recipe(4, optimizer=factory).train(devices=["cpu"] * 2)


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


def test_a_loss_that_holds_the_model_is_refused():
    """A closure over one device's model would compute with the wrong one on others."""
    held = []

    def make():
        held.append(nn.Linear(5, 3))
        return held[-1]

    def loss_fn(output, target):
        return F.cross_entropy(output, target) + held[-1].weight.square().sum()

    recipe = MLP.recipe(4, make_model=make, loss_fn=loss_fn)
    with pytest.raises(phalanx.UsageError, match=r"loss_fn.* each of several devices has a model of its own"):
        recipe.train(devices=["cpu"] * 2)


def test_another_model_for_another_device_is_refused():
    """make_model must return the same parameters each time it is called."""
    numbers = iter(range(10))

    def make():
        model = nn.Linear(5, 3)
        model.bias.data.fill_(next(numbers))
        return model

    with pytest.raises(phalanx.UsageError, match="another model for the second device"):
        MLP.recipe(4, make_model=make).train(devices=["cpu"] * 2)


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
