"""What accelerators send, wait for and keep: bytes, waits of the host and memory, on the fake one."""

import dataclasses
import functools
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.definition.data import open_data
from phalanx.engines import flat
from phalanx.engines.devices import buckets
from phalanx.engines.devices.transport import Transport
from phalanx.frameworks.torch import arithmetic
from phalanx.frameworks.torch.replica import feed
from phalanx.frameworks.torch.replica.buffers import Buffers
from phalanx.plan.fold import place, remaining
from tests.devices.accelerated import (
    MLP,
    Done,
    Noting,
    deep,
    deep_norm,
    deep_recipe,
    gathered_and_not_waited_for,
    many_buckets,
    named,
    notes,
    trained,
    with_names,
)
from tests.devices.planting import Planted
from tests.sampling import sample

pytestmark = pytest.mark.accelerator


def exchanged():
    from tests.accelerator import ccl

    return ccl.COUNTS["bytes"]


def bytes_of_a_step(folder, recipe, count):
    """What each device sent to others in a step, by its number."""
    trained(dataclasses.replace(recipe, loss_fn=Noting(folder, exchanged)), count)
    noted = {int(device.partition(":")[2]): list(map(int, lines)) for device, lines in notes(folder).items()}
    assert all(lines[3] - lines[2] == lines[2] - lines[1] > 0 for lines in noted.values())  # they meet in step 0
    return [noted[number][3] - noted[number][2] for number in range(count)]


@pytest.mark.long
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


SETTLE = Buffers.settle


def put_back(buffers, replicas, count=-1, **more):
    """Buffers are settled once the norm is there."""
    buffers._prepared = None
    return SETTLE(buffers, replicas, count, **more)


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


def peak():
    """The most bytes since the last look, as seen from the device that this process uses most."""
    used = max(range(torch.fake.device_count()), key=torch.fake.max_memory_allocated)
    most = torch.fake.max_memory_allocated(used)
    torch.fake.reset_peak_memory_stats(used)
    return most


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.cases(1)
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
