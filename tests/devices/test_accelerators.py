"""Accelerators that are real to torch: bits, bytes, waits and failures, on the fake one of ``tests.accelerator``."""

import gc
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.definition import generators
from phalanx.frameworks.torch import accelerators, lanes
from phalanx.frameworks.torch.replica import feed
from phalanx.plan.fold import place, remaining
from tests import accelerator
from tests.families import DATA, FAMILIES, OPTIMIZERS, SCHEDULERS, terms

pytestmark = pytest.mark.accelerator
MLP = FAMILIES["mlp"]
LEFT_OUT = {"odd_tensors"}  # complex parameters do not run on the fake device
CASES = {
    **{name: (family, max(3, family.replicas[-1]), {}) for name, family in FAMILIES.items() if name not in LEFT_OUT},
    **{f"optimizer {name}": (MLP, 4, {"optimizer": OPTIMIZERS[name]}) for name in OPTIMIZERS},
    **{f"scheduler {name}": (MLP, 4, {"scheduler": SCHEDULERS[name]}) for name in SCHEDULERS},
    **{f"data {name}": (MLP, 4, DATA[name]) for name in DATA},
}


@pytest.fixture
def fake():
    """The device module, as after loading."""
    return accelerator.accelerator()


def named(count):
    return [f"fake:{number}" for number in range(count)]


def trained(recipe, count, **options):
    """Digest and losses of a run on so many devices."""
    result = recipe.train(devices=named(count), **options)
    return result.digest, result.loss_history


def deep(width=48, layers=8):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)], nn.Linear(width, 3))


def deep_recipe(replicas, **more):
    x = torch.randn(48, 48, generator=torch.Generator().manual_seed(0))
    more = {"batch_size": 24, "steps": 6, **more}
    return phalanx.Recipe(deep, (x, torch.arange(48) % 3), F.cross_entropy, replicas=replicas, **more)


def dropping():
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))


def noisy(replicas=6):
    return MLP.recipe(replicas, batch_size=18, steps=3, drop_last=True, make_model=dropping, max_norm=0.1)


@pytest.mark.cases(20)
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_devices(fake, name):
    """One, two and three devices end in the same bits and losses."""
    family, replicas, changes = CASES[name]
    wanted = trained(family.recipe(replicas, **changes), 1)
    assert trained(family.recipe(replicas, **changes), 2) == wanted
    assert trained(family.recipe(replicas, **changes), 3) == wanted


@pytest.mark.parametrize("replicas", [4, 5, 7, 8])
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


def generator_of_the_first(monkeypatch):
    original = generators.FRAMEWORKS["torch"]
    monkeypatch.setitem(generators.FRAMEWORKS, "torch", lambda: original()[:2])  # the host's, and the first device's


def in_order_of_arrival(monkeypatch):
    def additions(replicas, nodes, there):
        return [(there[0], other) for other in there[1:][::-1]]

    monkeypatch.setattr("phalanx.engines.links.added", additions)


def not_spread(monkeypatch):
    monkeypatch.setattr(lanes.Exchange, "spread", lambda *_: None)


def left_where_it_is(monkeypatch):
    monkeypatch.setattr(lanes.Exchange, "moved", lambda own, vector: vector)


def through_another_stream(monkeypatch):
    original = lanes.placed

    def copied(vector, homes):
        other = torch.Stream(device=vector[0].device)  # which waits for nothing, and nobody waits for it
        with torch.fake.stream(other):
            return original(vector, homes)

    monkeypatch.setattr(lanes, "placed", copied)


def pinned_memory_used_again(monkeypatch):
    def overwritten(own, leaf):
        pinned = leaf.pin_memory()
        arrived = pinned.to(own._device, non_blocking=True)  # planted
        pinned.zero_()
        return arrived

    monkeypatch.setattr(feed.DeviceFeed, "_to_device", overwritten)


FAULTS = [
    generator_of_the_first, in_order_of_arrival, not_spread, left_where_it_is, through_another_stream,
    pinned_memory_used_again,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fake, monkeypatch, fault):
    """These tests can fail: each fault ends in other bits, or the device finds it."""
    recipe = terms(6) if fault is in_order_of_arrival else noisy()
    wanted = trained(recipe, 1)
    assert trained(recipe, 3) == wanted
    fault(monkeypatch)
    try:
        found = trained(recipe, 3)
    except (phalanx.RunError, RuntimeError):
        return
    assert found != wanted


def optimizers():
    return [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]


def held_by_each():
    """Bytes of optimizer state on each of four devices, after a step, as parts of all."""
    others = set(map(id, optimizers()))
    held = dict.fromkeys(range(4), 0)
    with deep_recipe(8).start(devices=named(4)) as run:
        next(run)
        for optimizer in [one for one in optimizers() if id(one) not in others]:
            for state in optimizer.state.values():
                for value in state.values():
                    if value.device.type == "fake":
                        held[value.device.index] += value.nbytes
    whole = 2 * sum(parameter.nbytes for parameter in deep().parameters())
    return [part / whole for part in held.values()]


def test_state_is_once_over_all_devices(fake):
    """Each parameter's optimizer state lies on one device, and all have about as many bytes of it."""
    parts = held_by_each()
    assert sum(parts) == pytest.approx(1)
    assert max(parts) < 0.35


def test_state_that_is_not_shared_is_seen(fake, monkeypatch):
    """The test above can fail: with one owner for all parameters, the first device has all of the state."""
    monkeypatch.setattr(lanes, "dealt", lambda sizes, count: [0] * len(sizes))
    assert held_by_each() == [1, 0, 0, 0]


@pytest.mark.usefixtures("computed_once")
@pytest.mark.parametrize(("replicas", "count"), [(4, 2), (8, 2), (6, 2), (6, 3), (8, 3), (8, 4), (12, 4)])
def test_bytes_between_devices(fake, replicas, count):
    """(k + 1) N (D - 1) / D bytes leave a device whose block leaves k nodes of the tree: a ring's where k is 1."""
    size = sum(parameter.nbytes for parameter in deep().parameters())
    with deep_recipe(replicas).start(devices=named(count)) as run:
        next(run)
        fake.reset_counts()
        next(run)
        counts = fake.counts()
    for number, block in enumerate(place(replicas, count).blocks):
        others = [f"fake:{number}>fake:{other}" for other in range(count) if other != number]
        sent = sum(counts.get(pair, (0, 0))[1] for pair in others)
        expected = (len(remaining(replicas, block)) + 1) * size * (count - 1) / count
        assert abs(sent / expected - 1) < 0.05
    small = {pair: bytes_ for pair, (_, bytes_) in counts.items() if pair.endswith(">cpu")}
    assert sum(small.values()) <= 8 * (replicas + 1)  # losses and the norm; nothing else goes through the host


@pytest.mark.usefixtures("computed_once")
def test_losses_are_read_once_per_device(fake):
    """A step copies, from each device, its losses together; the norm is read by itself."""
    with deep_recipe(8).start(devices=named(2)) as run:
        next(run)
        fake.reset_counts()
        next(run)
        counts = fake.counts()
    assert (counts["fake:0>cpu"][0], counts["fake:1>cpu"][0]) == (1, 1)


@pytest.mark.usefixtures("computed_once")
def test_all_devices_have_their_work_before_one_is_waited_for(fake):
    """The host enqueues every forward and backward pass, fold and norm of a step, and waits only then."""
    with deep_recipe(8).start(devices=named(4)) as run:
        next(run)
        fake.set_kernel_seconds(0.01, "aten::mm")  # long, as a busy host is late to enqueue the last device's
        fake.trace(True)
        next(run)
        trace = fake.take_trace()
    work = [event for event in trace if event[0] != "host" and event[2] == "aten::mm"]
    first_wait = min(event[2] for event in trace if event[0] == "host")
    assert max(event[3] for event in work) < first_wait
    assert {event[0] for event in work} == set(range(4))
    busy = [[event for event in work if event[0] == number] for number in range(4)]
    begun = [min(event[4] for event in events) for events in busy]
    ended = [max(event[5] for event in events) for events in busy]
    assert max(begun) < min(ended)  # all compute at the same time


def test_resumed_on_other_devices(fake, tmp_path):
    """A run goes on with another number of devices, to the digest of one that never stopped."""
    recipes = [FAMILIES["conv_norm"].recipe(4, steps=steps, optimizer=OPTIMIZERS["adamw"]) for steps in (2, 4, 5)]
    trained(recipes[0], 3, run_dir=tmp_path)
    trained(recipes[1], 1, run_dir=tmp_path)
    assert trained(recipes[2], 4, run_dir=tmp_path) == trained(recipes[2], 1)


def test_resumed_on_the_cpu(fake, tmp_path):
    """Snapshots name no device: a run may go on on the CPU, whose kernels are the same here, and back."""
    recipes = [MLP.recipe(4, steps=steps, optimizer=OPTIMIZERS["adamw"]) for steps in (2, 4, 6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(recipes[0], 2, run_dir=tmp_path)
        recipes[1].train(engine="inline", devices="cpu", run_dir=tmp_path)
        assert trained(recipes[2], 3, run_dir=tmp_path) == trained(recipes[2], 1)


def test_between_steps(fake):
    """Evaluation and results between steps do not depend on the number of devices."""

    def look(count):
        family = FAMILIES["conv_norm"]
        with family.recipe(3, steps=3).start(devices=named(count)) as run:
            return [(run.evaluate(F.cross_entropy, family.data, batch_size=7), run.result().digest) for _ in run]

    assert look(2) == look(3) == look(1)


def test_chunks_are_measured_on_all_devices(fake):
    """Chunks of an evaluation go to one device after the other; the value is that of one device, and so is an error."""
    recipe, seen = noisy(), []

    def metric_fn(output, target):
        seen.append(str(output.device))
        return F.cross_entropy(output, target) if len(seen) < 40 else output

    values = []
    for count in (1, 3):
        with recipe.start(devices=named(count)) as run:
            next(run)
            values.append(run.evaluate(metric_fn, recipe.data, batch_size=5))
            assert set(seen) == set(named(count))
            seen[:] = ["no device"] * 41
            with pytest.raises(phalanx.UsageError, match="metric_fn returned a Tensor"):
                run.evaluate(metric_fn, recipe.data, batch_size=5)
            seen.clear()
    assert values[0] == values[1]


def test_generators_and_settings_are_the_callers_afterwards(fake):
    """Every device's generator, the current device and deterministic settings are left as they were found."""
    torch.fake.manual_seed_all(5)
    torch.fake.set_device(1)
    before = torch.fake.get_rng_state_all()
    trained(noisy(), 3)
    assert all(map(torch.equal, before, torch.fake.get_rng_state_all()))
    assert torch.fake.current_device() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    torch.fake.set_device(0)


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
    with pytest.raises(phalanx.UsageError, match="worker processes compute on the CPU"):
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

    results = [MLP.recipe(3, make_model=make).train(engine="inline") for _ in range(2)]
    assert results[0].digest == results[1].digest
    assert results[0].params["weight"].device == torch.device("fake:1")


def test_out_of_memory(fake):
    """The error names the device, the replica and the choices; the run ends with the state before the step."""
    with deep_recipe(4).start(devices=named(2)) as run:
        next(run)
        digest = run.result().digest
        fake.fail_allocation(1, 3)
        with pytest.raises(phalanx.RunError, match=r"out of memory on fake:1 .* use more devices") as caught:
            next(run)
        assert "step 1, replica 2" in "".join(caught.value.__notes__)
        assert run.result().digest == digest


@pytest.mark.parametrize("how", ["lose", "fault"])
def test_a_lost_device(fake, tmp_path, how):
    """The error names it; a run_dir goes on from the newest snapshot on the devices that are left."""
    wanted = trained(deep_recipe(4), 1)
    with deep_recipe(4).start(devices=named(3), run_dir=tmp_path, snapshot_every=1) as run:
        next(run)
        next(run)
        getattr(fake, how)(1)
        with pytest.raises(phalanx.PhalanxError, match="fake:1"):
            next(run)
    fake.reset()
    assert trained(deep_recipe(4), 2, run_dir=tmp_path) == wanted


def test_operations_without_a_deterministic_kernel(fake):
    """They are an error that names the operation and the way out, unless they are allowed."""
    fake.set_nondeterministic("aten::cumsum")

    class Summing(nn.Linear):
        def forward(self, x):
            return super().forward(x).cumsum(0)

    recipe = MLP.recipe(2, make_model=lambda: Summing(5, 3))
    with pytest.raises(
        phalanx.UsageError, match=r"cumsum.* has no deterministic kernel on fake:0.*nondeterministic='allow'"
    ):
        recipe.train(devices=named(2))
    assert recipe.train(devices=named(2), nondeterministic="allow").digest


def test_peak_memory(fake):
    """A device holds weights, gradients of its block's fold, batches, and its part of the optimizer's state."""
    size = sum(parameter.nbytes for parameter in deep(192).parameters())
    x = torch.randn(32, 192, generator=torch.Generator().manual_seed(0))
    recipe = phalanx.Recipe(
        lambda: deep(192), (x, torch.arange(32) % 3), F.cross_entropy, replicas=8, batch_size=32, steps=4
    )
    peaks = []
    for count in (1, 4):
        before = [fake.memory_allocated(number) for number in range(count)]
        with recipe.start(devices=named(count)) as run:
            next(run)
            for number in range(count):
                fake.reset_peak_memory_stats(number)
            run.finish()
            peaks.append(max(fake.max_memory_allocated(number) - before[number] for number in range(count)) / size)
    # One device: weights, two states, up to four gradients of a fold over 8, and what backward holds.
    # Four: weights, half a state, two gradients of a fold over 2, three quarters of another in transit.
    assert peaks[0] < 8.5
    assert peaks[1] < 5.5


@pytest.mark.long
def test_processes_of_torchrun(fake, tmp_path):
    """``devices="local"`` is the device with the number in LOCAL_RANK."""
    script = (
        "import warnings; warnings.simplefilter('ignore'); from tests import accelerator; accelerator.load()\n"
        "from tests.families import FAMILIES\n"
        "result = FAMILIES['mlp'].recipe(3).train(devices='local')\n"
        "print(result.digest, next(iter(result.params.values())).device)"
    )
    environment = {**os.environ, "LOCAL_RANK": "2"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [trained(MLP.recipe(3), 1)[0], "fake:2"]


def test_tied_parameters_stay_tied(fake):
    """Torch gives some kinds of devices new parameters; those that modules share are one again: the CPU's bits."""
    recipe = FAMILIES["tied"].recipe(3)
    assert trained(recipe, 2)[0] == recipe.train(engine="inline", devices="cpu").digest
