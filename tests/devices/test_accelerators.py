"""Accelerators that are real to torch: bits, bytes, waits and failures, on the fake one of ``tests.accelerator``.

One is driven by this process, several by a worker each.
"""

import ast
import dataclasses
import functools
import itertools
import os
import pathlib
import signal
import time
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.definition import generators
from phalanx.definition.data import open_data
from phalanx.engines import flat
from phalanx.engines.devices import buckets
from phalanx.engines.devices.transport import Transport
from phalanx.frameworks.torch import accelerators, arithmetic
from phalanx.frameworks.torch.arithmetic import DeviceArithmetic
from phalanx.frameworks.torch.replica import feed
from phalanx.frameworks.torch.replica.buffers import Buffers
from phalanx.plan.fold import place, remaining
from tests import accelerator
from tests.devices.planting import Planted, in_worker, mark_caller
from tests.engines.deaths import Trapped, once, sprung
from tests.exactness.test_written_by_optimizers import KEPT
from tests.exactness.test_written_by_optimizers import recipe as written
from tests.families import ADAMW, DATA, FAMILIES, OPTIMIZERS, SCHEDULERS, terms
from tests.sampling import sample

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


def deep_norm():
    return nn.Sequential(nn.BatchNorm1d(48), *deep())


def deep_recipe(replicas, **more):
    x = torch.randn(48, 48, generator=torch.Generator().manual_seed(0))
    given = {"make_model": deep, "data": (x, torch.arange(48) % 3), "loss_fn": F.cross_entropy}
    return phalanx.Recipe(**{**given, "replicas": replicas, "batch_size": 24, "steps": 6, **more})


def dropping():
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))


def noisy(replicas=6):
    return MLP.recipe(replicas, batch_size=18, steps=3, drop_last=True, make_model=dropping, max_norm=0.1)


def notes(folder):
    """What workers noted, by the device that they compute on."""
    return {path.name: path.read_text().splitlines() for path in pathlib.Path(folder).iterdir()}


class Noting:
    """A loss that notes things of its process in a file for each device, at the first replica of a step there."""

    def __init__(self, folder, look, loss_fn=F.cross_entropy):
        self.folder, self.look, self.loss_fn, self.step = str(folder), look, loss_fn, -1

    def __call__(self, output, target):
        if phalanx.current_step() > self.step:
            self.step = phalanx.current_step()
            with (pathlib.Path(self.folder) / str(output.device)).open("a") as file:
                file.write(f"{self.look()}\n")
        return self.loss_fn(output, target)


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


def test_each_worker_computes_on_its_own_device(fake, tmp_path):
    """Every device is used by one process, which is not the caller's, and uses no other device."""
    recipe = MLP.recipe(6, steps=3, loss_fn=Noting(tmp_path, used))
    assert trained(recipe, 3) == trained(MLP.recipe(6, steps=3), 1)
    noted = {device: [ast.literal_eval(line) for line in lines] for device, lines in notes(tmp_path).items()}
    assert noted.keys() == set(named(3))
    pids = {pid for lines in noted.values() for pid, _ in lines}
    assert len(pids - {os.getpid()}) == 3
    assert all(lines[-1] == (lines[0][0], ["cpu", device]) for device, lines in noted.items())


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


@pytest.mark.parametrize(("fault", "opened"), [(None, []), (named_by_use, [0, 1])], ids=["as it is", "named by use"])
def test_who_starts_workers_uses_no_device(fake, monkeypatch, fault, opened):
    """Each device is opened by its worker alone: half a gigabyte of it would go, and no child could be forked."""
    if fault is not None:
        fault(monkeypatch)
    wanted = trained(MLP.recipe(4), 1)
    fake.reset()
    assert trained(MLP.recipe(4), 2) == wanted
    assert fake.opened() == opened


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


class Done:
    """A work that nobody has to wait for."""

    def wait(self):
        pass


def gathered_and_not_waited_for(patch):
    """The mean is used before it has come from all."""
    gather = Transport.gather

    def begun(*facts):
        gather(*facts)
        return Done(), None, None

    patch.setattr(Transport, "gather", begun)


def a_room_used_too_early(patch):
    """All buckets are folded in the same memory, which the first one's result is still sent from."""
    scratch = flat.scratch
    patch.setattr(buckets, "BUCKET", 64)
    patch.setattr(flat, "scratch", lambda rooms, name, *size: scratch(rooms, name[0], *size))


def pinned_memory_used_again(patch):
    """A batch's pinned memory is written while the device reads it."""

    def overwritten(own, leaf):
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


def exchanged():
    from tests.accelerator import ccl

    return ccl.COUNTS["bytes"]


def bytes_of_a_step(folder, recipe, count):
    """What each device sent to others in a step, by its number."""
    trained(dataclasses.replace(recipe, loss_fn=Noting(folder, exchanged)), count)
    noted = {int(device.partition(":")[2]): list(map(int, lines)) for device, lines in notes(folder).items()}
    assert all(lines[3] - lines[2] == lines[2] - lines[1] > 0 for lines in noted.values())  # they meet in step 0
    return [noted[number][3] - noted[number][2] for number in range(count)]


@pytest.mark.parametrize(
    ("replicas", "count"), sample("bytes", [(4, 2), (8, 2), (6, 2), (6, 3), (8, 3), (8, 4), (12, 4)], 2)
)
def test_bytes_between_devices(fake, tmp_path, replicas, count):
    """(k + 1) N (P - 1) / P bytes leave a device whose block leaves k nodes of the tree: a ring's where k is 1.

    Each parameter begins at a multiple of 512 bytes, and so does each slice.
    """
    sizes = [parameter.nbytes for parameter in deep().parameters()]
    least, most = sum(sizes), sum(size + buckets.ALIGNED for size in sizes) + count * buckets.ALIGNED
    sent = bytes_of_a_step(tmp_path, deep_recipe(replicas), count)
    for bytes_, block in zip(sent, place(replicas, count).blocks, strict=True):
        rounds = (len(remaining(replicas, block)) + 1) * (count - 1) / count
        assert rounds * least <= bytes_ <= rounds * most


@pytest.mark.longest
def test_bytes_of_a_large_model(fake, tmp_path):
    """With ten million parameters, in several buckets, it is the ring's traffic within one per cent."""
    make_model = functools.partial(deep, width=1024, layers=10)
    size = sum(parameter.nbytes for parameter in make_model().parameters())
    assert size > 40 * 10**6
    x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0))
    recipe = deep_recipe(4, make_model=make_model, data=(x, torch.arange(8) % 3), batch_size=8, steps=4)
    for bytes_ in bytes_of_a_step(tmp_path, recipe, 2):
        assert abs(bytes_ / size - 1) < 0.01


@pytest.mark.usefixtures("computed_once")
def test_losses_are_read_once(fake):
    """A step copies its losses from the device together; the norm is read by itself."""
    with deep_recipe(8).start(devices="fake:0") as run:
        next(run)
        fake.reset_counts()
        next(run)
        counts = fake.counts()
    assert counts["fake:0>cpu"][0] <= 2
    assert counts["fake:0>cpu"][1] <= 8 * (8 + 1)


def put_back(buffers, replicas, count=-1, **more):
    """Buffers are settled once the norm is there."""
    buffers._prepared = None
    return SETTLE(buffers, replicas, count, **more)


SETTLE = Buffers.settle


@pytest.mark.usefixtures("computed_once")
@pytest.mark.parametrize(("fault", "late"), [(None, False), (put_back, True)], ids=["as it is", "put back"])
def test_buffers_are_settled_before_the_norm_is_waited_for(fake, monkeypatch, fault, late):
    """What is left behind the wait are copies and the update; the mean of statistics is on its way by then."""
    if fault is not None:
        monkeypatch.setattr(Buffers, "settle", fault)
    with deep_recipe(4, make_model=deep_norm).start(devices="fake:0") as run:
        next(run)
        fake.trace(True)
        next(run)
        trace = fake.take_trace()
    waited = next(at for at, event in enumerate(trace) if event[0] == "host")
    behind = {event[2] for event in trace[waited:] if event[0] != "host"}
    assert ("aten::cat" in behind) == late, behind


@pytest.mark.usefixtures("computed_once")
def test_a_device_has_its_work_before_it_is_waited_for(fake):
    """The host enqueues every forward and backward pass of a step, and waits only then."""
    with deep_recipe(8).start(devices="fake:0") as run:
        next(run)
        fake.set_kernel_seconds(0.001, "aten::mm")
        fake.trace(True)
        next(run)
        trace = fake.take_trace()
    work = [event for event in trace if event[0] != "host" and event[2] == "aten::mm"]
    (first_wait,) = [event[2] for event in trace if event[0] == "host"]
    assert work
    assert max(event[3] for event in work) < first_wait


class Traced:
    """Notes in a file how often the host waited in each step of the first worker from the fourth on.

    A step in which a snapshot is taken has more. ``fault(patch)`` is planted, too.
    """

    def __init__(self, file, fault=None):
        self.file, self.fault = str(file), fault

    def told(self, trace):
        return str([event[0] for event in trace].count("host"))

    def __call__(self, patch):
        from phalanx.engines.devices.exchanged import Exchanged

        begin = Exchanged.begin

        def begun(sums, step, shares, **more):
            if sums._station.worker == 0 and step > 3:
                with open(self.file, "a") as file:
                    file.write(self.told(torch.fake.take_trace()) + "\n")
            torch.fake.trace(step >= 3)
            return begin(sums, step, shares, **more)

        patch.setattr(Exchanged, "begin", begun)
        if self.fault is not None:
            self.fault(patch)


def test_rows_are_gathered_in_pinned_memory(fake):
    """The batch that a device copies from is the one that was gathered, and has the rows that indexing gives."""
    column = torch.arange(24.0).reshape(6, 4)
    source = feed.opened(open_data((column, torch.arange(6)), "data"), pins=True)
    rows, labels = source.rows(source.arrays, np.array([4, 0, 4]))
    assert torch.equal(rows, column[[4, 0, 4]])
    assert rows.is_pinned()
    assert labels.is_pinned()
    assert rows.pin_memory().data_ptr() == rows.data_ptr()


def emptied_at_once(patch):
    """A pinned piece is emptied before what fills it has come."""
    event = torch.Event
    patch.setattr(torch, "Event", lambda device: types.SimpleNamespace(record=event(device).record, synchronize=bool))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"])
@pytest.mark.parametrize("fault", [None, emptied_at_once], ids=["as it is", "emptied at once"])
def test_large_tensors_come_home_in_pieces(fake, monkeypatch, layout, fault):
    """They have the bytes of a plain copy, whatever the last piece's size; a piece that is used too soon is found."""
    monkeypatch.setattr(arithmetic, "STAGED", 100)
    there = torch.arange(5 * 3 * 4 * 2.0).reshape(5, 3, 4, 2).to("fake:0").mul(3).to(memory_format=layout)
    if fault is None:
        home = arithmetic.brought(there)
        assert home.stride() == there.stride()
        assert torch.equal(home, there.cpu())
        return
    with monkeypatch.context() as patch:
        fault(patch)
        try:
            home = arithmetic.brought(there)
            torch.fake.synchronize()
        except RuntimeError as error:
            assert "race" in str(error)  # noqa: PT017
            return
    assert not torch.equal(home, there.cpu())


class Early(Traced):
    """Notes how often the host waited between the first kernel of a step and its norm; collectives wait themselves."""

    def told(self, trace):
        from tests.accelerator import ccl

        names = [event[2] if event[0] != "host" else "host" for event in trace]
        norm = max(at for at, name in enumerate(names) if "norm" in str(name))
        first = min(at for at, name in enumerate(names) if name == "aten::mm")
        begun = ccl.COUNTS["all_to_all"] + ccl.COUNTS["all_gather"]
        before, self.begun = getattr(self, "begun", begun), begun
        return str(names[first:norm].count("host") - (begun - before))


def losses_read(patch):
    """Losses are read as soon as they are computed."""
    from phalanx.engines.devices.exchanged import Exchanged

    close = Exchanged.close

    def reading(sums, parts):
        parts = [part._replace(loss=float(part.loss)) for part in parts]  # planted
        return close(sums, parts)

    patch.setattr(Exchanged, "close", reading)


@pytest.mark.long
@pytest.mark.parametrize(("fault", "waits"), [(None, 0), (losses_read, 2)], ids=["as it is", "losses read"])
def test_a_step_waits_for_its_norm_alone(tmp_path, fake, fault, waits):
    """Between a step's first kernel and its norm the host waits for nothing; losses come with the norm."""
    recipe = deep_recipe(4, steps=9, loss_fn=with_names)
    traced = dataclasses.replace(recipe, make_model=Planted(deep, Early(tmp_path / "waits", fault)))
    assert trained(traced, 2) == trained(recipe, 1)
    found = (tmp_path / "waits").read_text().split()[1:]  # the first line has the steps before
    assert min(map(int, found)) == waits, found


class Ordered(Traced):
    """Notes what the first worker enqueued in each step, in order, by name, with "wait" for waits of the host."""

    def told(self, trace):
        return " ".join("wait" if event[0] == "host" else event[2].replace(" ", "") for event in trace)


@pytest.mark.long
def test_gradients_leave_during_the_backward_pass(tmp_path, fake):
    """The first bucket is on its way before the last products of the backward pass, and the last gather comes late."""
    recipe = deep_recipe(2, steps=6)
    traced = dataclasses.replace(recipe, make_model=Planted(deep, Ordered(tmp_path / "order", many_buckets)))
    assert trained(traced, 2) == trained(recipe, 1)
    order = (tmp_path / "order").read_text().splitlines()[0].split()
    sent = [at for at, name in enumerate(order) if name == "copyfake:0>cpu"]
    last_product = max(at for at, name in enumerate(order) if name == "aten::mm")
    assert sum(at < last_product for at in sent) >= 4


def with_names(output, target):
    loss = F.cross_entropy(output, target)
    return {"loss": loss, "twice": 2 * loss.detach()}


def many_buckets(patch):
    """No fault."""
    patch.setattr(buckets, "BUCKET", 4 * 48 * 48)


def folded_beside(patch):
    """What came is added up without waiting for it."""
    sent = Transport.all_to_all

    def begun(*facts):
        sent(*facts)
        return Done(), None, None

    patch.setattr(Transport, "all_to_all", begun)


@pytest.mark.cases(1)
@pytest.mark.parametrize("fault", [folded_beside, gathered_and_not_waited_for], ids=lambda fault: fault.__name__)
def test_missing_waits_of_sending_early_are_seen(fake, fault):
    """The device finds memory that is read too soon, or the bits are others."""
    recipe = deep_recipe(2, steps=6)
    faulty = dataclasses.replace(recipe, make_model=Planted(deep, fault))
    try:
        found = trained(faulty, 2)
    except (phalanx.PhalanxError, RuntimeError) as error:
        found = str(error)
    assert "race" in found or (isinstance(found, tuple) and found != trained(recipe, 1))


def norms(count):
    return nn.Sequential(nn.Linear(5, 16), *[nn.BatchNorm1d(16) for _ in range(count)], nn.Linear(16, 3))


@pytest.mark.long
def test_buffers_cost_no_waits(tmp_path, fake):
    """Workers hand on what replicas left in buffers from device to device, however many there are."""
    waits = []
    for count in (1, 9):
        make_model = functools.partial(norms, count)
        recipe = MLP.recipe(6, batch_size=18, steps=9, drop_last=True, make_model=make_model)
        traced = dataclasses.replace(recipe, make_model=Planted(make_model, Traced(tmp_path / "waits")))
        assert trained(traced, 2) == trained(recipe, 1)
        waits.append(min(map(int, (tmp_path / "waits").read_text().split())))
        (tmp_path / "waits").unlink()
    assert waits[0] == waits[1], waits


def came_home(folder, look=None, **options):
    """Bytes that a device sent to the host in the later steps of a run on two devices, but for the last one."""
    folder.mkdir()
    recipe = deep_recipe(4, steps=9, loss_fn=Noting(folder, read_from_the_device), make_model=Planted(deep, saved_once))
    with recipe.start(devices=named(2), **options) as run:
        for _ in run:
            if look is not None:
                look(run)
    counts = [[int(line) for line in lines] for lines in notes(folder).values()]
    return max(lines[-1] - lines[3] for lines in counts)


def saved_once(patch):
    """No fault: how often workers save in memory hangs on the time that it takes."""
    patch.setattr("phalanx.engines.processes.worker.SHARE", 1e-12)


def read_from_the_device():
    return sum(size for pair, (_, size) in torch.fake.counts().items() if pair.endswith(">cpu"))


@pytest.mark.long
def test_an_average_stays_on_devices(tmp_path, fake):
    """No weights are copied to the host for it from step to step; whoever looks at them is seen to."""
    weights = sum(weight.nbytes for weight in deep().parameters())
    nothing = came_home(tmp_path / "nothing")  # norms and losses: a step more or less, as the host comes to read them
    assert abs(came_home(tmp_path / "average", callbacks=[phalanx.callbacks.EMA(0.9)]) - nothing) < weights
    assert came_home(tmp_path / "looked", look=lambda run: dict(run.params)) - nothing > 4 * weights


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


@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_instead_of_the_planned_one(fake, count):
    """What was read ahead for a planned step is not taken for a batch that the caller brings."""
    x, y = MLP.data

    def look(count, **options):
        with MLP.recipe(4, steps=6).start(devices=named(count), **options) as run:
            losses = [next(run).loss, run.step((x[:9], y[:9])), next(run).loss, run.step((x[3:8], y[3:8]))]
            return losses, run.result().digest

    assert look(count) == look(2)


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


class Summing(nn.Linear):
    """Uses an operation without a deterministic kernel."""

    def forward(self, x):
        return super().forward(x).cumsum(0)


def nondeterministic(patch):
    """No fault: an operation says that it has no deterministic kernel."""
    torch.fake.set_nondeterministic("aten::cumsum")


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


def peak():
    """The most bytes since the last look, as seen from the device that this process uses most."""
    used = max(range(torch.fake.device_count()), key=torch.fake.max_memory_allocated)
    most = torch.fake.max_memory_allocated(used)
    torch.fake.reset_peak_memory_stats(used)
    return most


def test_peak_memory(fake, tmp_path):
    """A device holds weights, the optimizer's state, gradients of its block's fold, batches, and what is in transit."""
    size = sum(parameter.nbytes for parameter in deep(192).parameters())
    x = torch.randn(32, 192, generator=torch.Generator().manual_seed(0))
    recipe = phalanx.Recipe(
        lambda: deep(192), (x, torch.arange(32) % 3), F.cross_entropy, replicas=8, batch_size=32, steps=4
    )
    before = fake.memory_allocated(0)
    with recipe.start(devices="fake:0") as run:
        next(run)
        fake.reset_peak_memory_stats(0)
        run.finish()
        peaks = [(fake.max_memory_allocated(0) - before) / size]
    trained(dataclasses.replace(recipe, loss_fn=Noting(tmp_path, peak)), 4)
    peaks.append(max(int(lines[-1]) for lines in notes(tmp_path).values()) / size)
    # One: weights, two states, up to four gradients of a fold over 8, and what backward holds.
    # Four: weights, two states, two gradients of a fold over 2, and what is packed, has come, is folded and gathered.
    assert peaks[0] < 8.5
    assert 5 < peaks[1] < 9.5


def a_layer_each(patch):
    """Buckets of one layer."""
    patch.setattr(buckets, "BUCKET", 150 << 10)


def a_room_each(patch):
    """Every bucket has rooms of its own on the way."""
    a_layer_each(patch)
    patch.setattr(flat, "IN_FLIGHT", 1000)


@pytest.mark.parametrize(("fault", "least", "most"), [(a_layer_each, 6, 6.6), (a_room_each, 7, 7.6)])
def test_memory_of_what_is_on_the_way(fake, tmp_path, fault, least, most):
    """Beside weights, two states, a gradient and the update's own: what is sent, and two rooms for what comes."""
    size = sum(parameter.nbytes for parameter in deep(192).parameters())
    x = torch.randn(32, 192, generator=torch.Generator().manual_seed(0))
    recipe = phalanx.Recipe(
        functools.partial(deep, 192), (x, torch.arange(32) % 3), F.cross_entropy, replicas=4, batch_size=32, steps=7
    )
    wanted = trained(recipe, 1)
    planted = Planted(recipe.make_model, fault)
    assert trained(dataclasses.replace(recipe, make_model=planted, loss_fn=Noting(tmp_path, peak)), 4) == wanted
    peaks = max(int(line) for lines in notes(tmp_path).values() for line in lines[3:]) / size
    assert least < peaks < most, peaks


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("count", [1, 2])
def test_hooks_see_buffers_as_on_the_cpu(fake, make, count):
    """What an optimizer or its hook writes into buffers, it writes over those that were settled in this step."""
    wanted = written(4, make).train(engine="inline", progress=False)
    found = written(4, make).train(devices=named(count), progress=False)
    assert found.digest == wanted.digest
    assert [value.tolist() for value in found.model.buffers()] == [value.tolist() for value in wanted.model.buffers()]


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


def noisy_adam(make_model=dropping):
    return dataclasses.replace(noisy(), make_model=make_model, optimizer=ADAMW, steps=5)


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
