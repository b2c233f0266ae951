"""Accelerators that are real to torch: bits, choices and faults, on the fake one of ``tests.accelerator``.

One is driven by this process, several by a worker each.
"""

import ast
import dataclasses
import functools
import os
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.definition import generators
from phalanx.engines import flat
from phalanx.engines.devices import buckets
from phalanx.engines.devices.transport import Transport
from phalanx.frameworks.torch import accelerators
from phalanx.frameworks.torch.arithmetic import DeviceArithmetic
from phalanx.frameworks.torch.replica import feed
from tests.devices.accelerated import (
    MLP,
    Done,
    Noting,
    dropping,
    gathered_and_not_waited_for,
    named,
    noisy,
    notes,
    trained,
)
from tests.devices.planting import Planted
from tests.engines.deaths import Trapped, sprung
from tests.exactness.test_written_by_optimizers import KEPT
from tests.exactness.test_written_by_optimizers import recipe as written
from tests.families import DATA, FAMILIES, OPTIMIZERS, SCHEDULERS, terms
from tests.sampling import sample

pytestmark = pytest.mark.accelerator
LEFT_OUT = {"odd_tensors"}  # complex parameters do not run on the fake device
CASES = {
    **{name: (family, max(3, family.replicas[-1]), {}) for name, family in FAMILIES.items() if name not in LEFT_OUT},
    **{f"optimizer {name}": (MLP, 4, {"optimizer": OPTIMIZERS[name]}) for name in OPTIMIZERS},
    **{f"scheduler {name}": (MLP, 4, {"scheduler": SCHEDULERS[name]}) for name in SCHEDULERS},
    **{f"data {name}": (MLP, 4, DATA[name]) for name in DATA},
}


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_devices(fake, name):
    """One, two and three devices end in the same bits and losses."""
    family, replicas, changes = CASES[name]
    wanted = trained(family.recipe(replicas, **changes), 1)
    assert trained(family.recipe(replicas, **changes), 2) == wanted
    assert trained(family.recipe(replicas, **changes), 3) == wanted


def used():
    """The process, and between which places it copied."""
    return os.getpid(), sorted({place for pair in torch.fake.counts() for place in pair.split(">")})


@pytest.mark.long
def test_each_worker_computes_on_its_own_device(fake, tmp_path):
    """Every device is used by one process, which is not the caller's, and uses no other device."""
    recipe = MLP.recipe(6, steps=3, loss_fn=Noting(tmp_path, used))
    assert trained(recipe, 3) == trained(MLP.recipe(6, steps=3), 1)
    noted = {device: [ast.literal_eval(line) for line in lines] for device, lines in notes(tmp_path).items()}
    assert noted.keys() == set(named(3))
    pids = {pid for lines in noted.values() for pid, _ in lines}
    assert len(pids - {os.getpid()}) == 3
    assert all(lines[-1] == (lines[0][0], ["cpu", device]) for device, lines in noted.items())


@pytest.mark.long
def test_one_worker(fake, tmp_path):
    """Asked for, one device is driven by a process of its own, to the same bits; it may die."""
    recipe = noisy()
    wanted = trained(recipe, 1)
    assert trained(recipe, 1, engine="processes") == wanted
    make_model = Trapped(dropping, tmp_path, 0, 2, "COMPUTING")
    assert trained(dataclasses.replace(recipe, make_model=make_model), 1, engine="processes") == wanted
    assert sprung(tmp_path) == 1


def named_by_use(patch):
    """Names of devices are looked up by using them."""
    patch.setattr(accelerators, "listed_device", accelerators.named_device)


@pytest.mark.long
@pytest.mark.parametrize(("fault", "opened"), [(None, []), (named_by_use, [0, 1])], ids=["as it is", "named by use"])
def test_who_starts_workers_uses_no_device(fake, monkeypatch, fault, opened):
    """Each device is opened by its worker alone: half a gigabyte of it would go, and no child could be forked."""
    if fault is not None:
        fault(monkeypatch)
    wanted = trained(MLP.recipe(4), 1)
    fake.reset()
    assert trained(MLP.recipe(4), 2) == wanted
    assert fake.opened() == opened


@pytest.mark.long
@pytest.mark.parametrize("replicas", sample("four devices", [4, 5, 7, 8], 1))
def test_four_devices(fake, replicas):
    """Four devices, with blocks of one or several nodes of the tree, end as one."""
    assert trained(noisy(replicas), 4) == trained(noisy(replicas), 1)


def test_a_loop_by_hand_is_seeded(fake):
    """``plan.seeded`` keys the generators of every accelerator in use, whatever its kind, and puts them back."""
    plan = noisy().plan
    devices = [f"fake:{number}" for number in range(2)]

    def drawn(step):
        with plan.seeded(step, 1):
            return [torch.rand(3, device=device).cpu().tolist() for device in devices]

    torch.ones(1, device=devices[0])  # from here on accelerators are in use
    before = [torch.fake.get_rng_state(device).tolist() for device in devices]
    assert drawn(0) == drawn(0) != drawn(1)
    assert [torch.fake.get_rng_state(device).tolist() for device in devices] == before


def generator_of_the_first(patch):
    """Only the host's generator and the first device's are seeded."""
    original = generators.FRAMEWORKS["torch"]
    patch.setitem(generators.FRAMEWORKS, "torch", lambda: original()[:2])
    patch.setattr("phalanx.engines.twice.Twice.begin", lambda *_: None)  # it would be found there


def in_order_of_arrival(patch):
    """Additions from the last to the first."""
    patch.setattr(flat, "added", lambda count, nodes, there: [(there[0], other) for other in there[1:][::-1]])


def not_waited_for(patch):
    """What has been sent is taken for what has come."""
    patch.setattr(Transport, "wait", lambda *_: None)


def a_room_used_too_early(patch):
    """All buckets are folded in the same memory, which the first one's result is still sent from."""
    scratch = flat.scratch
    patch.setattr(buckets, "BUCKET", 64)
    patch.setattr(flat, "scratch", lambda rooms, name, *size: scratch(rooms, name[0], *size))


def pinned_memory_used_again(patch):
    """A batch's pinned memory is written while the device reads it."""

    def overwritten(own, leaf, *, pins=True):
        pinned = leaf.pin_memory()
        arrived = pinned.to(own._device, non_blocking=True)  # planted
        pinned.zero_()
        return arrived

    patch.setattr(feed.DeviceFeed, "_to_device", overwritten)


FAULTS = [
    generator_of_the_first, in_order_of_arrival, not_waited_for, gathered_and_not_waited_for, a_room_used_too_early,
    pinned_memory_used_again,
]  # fmt: skip
RACES = not_waited_for, gathered_and_not_waited_for, a_room_used_too_early, pinned_memory_used_again


@pytest.mark.long
@pytest.mark.parametrize("fault", sample("faults of devices", FAULTS, 2))
def test_faults_are_seen(fake, fault):
    """These tests can fail: each fault ends in other bits, or the device finds it."""
    recipe = terms(6) if fault is in_order_of_arrival else noisy()
    assert trained(recipe, 3) == trained(recipe, 1)
    faulty = dataclasses.replace(recipe, make_model=Planted(recipe.make_model, fault))
    if fault in RACES:
        with pytest.raises((phalanx.PhalanxError, RuntimeError), match=r"race|overwritten"):
            trained(faulty, 3)
    else:
        assert trained(faulty, 3) != trained(recipe, 1)


def of_several_models(patch):
    """The second device says that it is another."""
    patch.setattr(torch.fake, "get_device_name", lambda device=None: "newer" if str(device) == "fake:1" else "older")


def zeros_arrive(patch):
    """Copies between devices write nothing, and say so to nobody."""

    def alltoall_base(own, came, *_):
        came.zero_()
        return Done()

    patch.setattr("tests.accelerator.ccl.Collectives.alltoall_base", alltoall_base)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (of_several_models, phalanx.UsageError, r"worker 1 has another device than worker 0 \(newer.*; older"),
        (zeros_arrive, phalanx.RunError, "arrived with other bytes"),
    ],
)
def test_devices_that_do_not_go_together(fake, fault, error, message):
    """Devices of several models, and links that lose what is sent, are found before the first update."""
    recipe = dataclasses.replace(noisy(), make_model=Planted(dropping, fault))
    with pytest.raises(error, match=message):
        trained(recipe, 2)


class Growing(torch.utils.data.Dataset):
    """Samples that a callback changes, in an array: that is not seen."""

    def __init__(self):
        self.factor = torch.ones(1)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((2,), float(index)) * self.factor, index % 3


def test_data_is_read_a_step_ahead_only_where_nobody_can_change_it(fake):
    """A callback may change a dataset of samples between steps, so those are read in their own step then."""

    def run(device):
        data = Growing()

        def grow(report):
            data.factor += 1

        recipe = phalanx.Recipe(lambda: nn.Linear(2, 3), data, F.cross_entropy, replicas=4, batch_size=4, steps=6)
        return recipe.train(devices=device, engine="inline", callbacks=[grow]).loss_history

    assert run("fake:0") == pytest.approx(run("cpu"))


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_instead_of_the_planned_one(fake, count):
    """What was read ahead for a planned step is not taken for a batch that the caller brings."""
    x, y = MLP.data

    def look(count, **options):
        with MLP.recipe(4, steps=6).start(devices=named(count), **options) as run:
            losses = [next(run).loss, run.step((x[:9], y[:9])), next(run).loss, run.step((x[3:8], y[3:8]))]
            return losses, run.result().digest

    assert look(count) == look(2)


@pytest.mark.long
def test_resumed_elsewhere(fake, tmp_path):
    """A run goes on with another number of devices, and on the CPU, whose kernels are the same here, and back."""
    recipes = [FAMILIES["conv_norm"].recipe(4, steps=steps, optimizer=OPTIMIZERS["adamw"]) for steps in (2, 4, 5, 6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(recipes[0], 3, run_dir=tmp_path)
        trained(recipes[1], 1, run_dir=tmp_path)
        recipes[2].train(engine="inline", devices="cpu", run_dir=tmp_path)
        assert trained(recipes[3], 4, run_dir=tmp_path) == trained(recipes[3], 1)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 3])
def test_chunks_are_measured_on_all_devices(fake, tmp_path, count):
    """Chunks of an evaluation are shared among the devices; the value is that of one device, and so is an error."""
    recipe = noisy()

    def metric_fn(output, target):
        (tmp_path / str(output.device)).touch()
        return F.cross_entropy(output, target)

    with recipe.start(devices=named(count)) as run, recipe.start(devices="fake:0") as alone:
        next(run), next(alone)
        value = run.evaluate(metric_fn, recipe.data, batch_size=5)
        assert {path.name for path in tmp_path.iterdir()} == set(named(count))
        assert value == alone.evaluate(metric_fn, recipe.data, batch_size=5)
        with pytest.raises(phalanx.UsageError, match="metric_fn returned a Tensor"):
            run.evaluate(lambda output, target: output, recipe.data, batch_size=5)


def test_generators_and_settings_are_the_callers_afterwards(fake):
    """Every device's generator, the current device and deterministic settings are left as they were found."""
    torch.fake.manual_seed_all(5)
    torch.fake.set_device(1)
    before = torch.fake.get_rng_state_all()
    trained(noisy(), 1)
    trained(noisy(), 3)
    assert all(map(torch.equal, before, torch.fake.get_rng_state_all()))
    assert torch.fake.current_device() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    torch.fake.set_device(0)


@pytest.mark.long
def test_names(fake):
    """A kind means all its devices, at most one per replica, and says if more are there; "local" is torchrun's."""
    recipe = MLP.recipe(3)
    wanted = trained(recipe, 1)
    accelerators.MENTIONED.discard("more than replicas")
    with pytest.warns(UserWarning, match="3 of 4 devices are used"):
        result = recipe.train(devices="fake")
    assert (result.digest, result.loss_history) == wanted
    with pytest.raises(phalanx.UsageError, match="names a device more than once"):
        recipe.train(devices=["fake:0", "fake"])
    with pytest.raises(phalanx.UsageError, match="several kinds"):
        recipe.train(devices=["fake:0", "cpu"])
    with pytest.raises(phalanx.UsageError, match="which torch cannot use here"):
        recipe.train(devices=["fake:9"])
    with pytest.raises(phalanx.UsageError, match="workers is 2, but devices names fake:0, each of which is a worker"):
        recipe.train(devices=["fake:0"], workers=2)


def test_idle_devices_are_mentioned_once(fake):
    """A run that leaves accelerators alone says so, once in a process."""
    accelerators.MENTIONED.discard("idle")
    with pytest.warns(UserWarning, match="4 fake devices are idle"):
        MLP.recipe(1).train(engine="inline")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MLP.recipe(1).train(engine="inline")


def test_a_model_made_on_a_device(fake):
    """Where no device is named, the model stays where ``make_model`` puts it; that device's generator is seeded."""

    def make():
        model = nn.Linear(5, 3, device="fake:1")
        with torch.no_grad():
            model.weight.normal_()
        return model

    with pytest.raises(phalanx.UsageError, match="workers is 2, but devices names fake:1, each of which is a worker"):
        MLP.recipe(3, make_model=make).train(workers=2)
    results = [MLP.recipe(3, make_model=make).train(**given) for given in ({"engine": "inline"}, {})]
    assert results[0].digest == results[1].digest
    assert results[0].params["weight"].device == torch.device("fake:1")


class Summing(nn.Linear):
    """Uses an operation without a deterministic kernel."""

    def forward(self, x):
        return super().forward(x).cumsum(0)


def nondeterministic(patch):
    """No fault: an operation says that it has no deterministic kernel."""
    torch.fake.set_nondeterministic("aten::cumsum")


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_operations_without_a_deterministic_kernel(fake, count):
    """They are an error that names the operation and the way out, unless they are allowed."""
    fake.set_nondeterministic("aten::cumsum")
    recipe = MLP.recipe(2, make_model=Planted(functools.partial(Summing, 5, 3), nondeterministic))
    with pytest.raises(
        phalanx.UsageError, match=r"cumsum.* has no deterministic kernel on fake:0.*nondeterministic='allow'"
    ):
        recipe.train(devices=named(count))
    assert recipe.train(devices=named(count), nondeterministic="allow").digest


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("count", [1, 2])
def test_hooks_see_buffers_as_on_the_cpu(fake, make, count):
    """What an optimizer or its hook writes into buffers, it writes over those that were settled in this step."""
    wanted = written(4, make).train(engine="inline", progress=False)
    found = written(4, make).train(devices=named(count), progress=False)
    assert found.digest == wanted.digest
    assert [value.tolist() for value in found.model.buffers()] == [value.tolist() for value in wanted.model.buffers()]


def test_tied_parameters_stay_tied(fake):
    """Torch gives some kinds of devices new parameters; those that modules share are one again: the CPU's bits."""
    recipe = FAMILIES["tied"].recipe(3)
    assert trained(recipe, 2)[0] == recipe.train(engine="inline", devices="cpu").digest


def test_checksums_are_computed_where_tensors_are(fake):
    """The bytes and their places decide: a bit, words that change places, changes that make up for each other."""
    own = DeviceArithmetic()
    for size in (13, 16, 23):
        plain = torch.arange(1, size + 1, dtype=torch.uint8)
        bit, swapped, both = plain.clone(), torch.cat([plain.roll(1)[:1], plain[1:-1], plain[:1]]), plain.clone()
        bit[-1] ^= 1
        both[0] += 1
        both[-1] -= 1
        sums = [own.checksum([each.to("fake:0")]) for each in (plain, bit, swapped, both)]
        assert len(set(sums)) == 4
        assert sums == [own.checksum([each]) for each in (plain, bit, swapped, both)]
        assert own.checksum([plain, None]) != own.checksum([None, plain])
    several = [torch.ones(100, device="fake:0") for _ in range(20)]
    fake.trace(True)
    own.checksum(several)
    assert [event[0] for event in fake.take_trace()].count("host") == 1
