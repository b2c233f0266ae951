"""The fake accelerator does what a GPU does, and notices what goes wrong on one."""

import copy
import io
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.accelerator import accelerator, building

pytestmark = pytest.mark.accelerator


@pytest.fixture
def fake():
    module = accelerator()
    before = module.current_device()
    module.set_device(0)
    yield module
    module.reset()
    module.set_device(before)


# ---- it computes


def mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(144, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )


def convolutions():
    layers = nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 10)
    return nn.Sequential(*layers)


def images():
    return torch.randn(8, 1, 12, 12)


def train(make, inputs, device, optimizer=torch.optim.SGD, steps=3, **options):
    torch.manual_seed(0)
    model, x, y = make(), inputs(), torch.randint(0, 10, (8,))
    model, x, y = model.to(device), x.to(device), y.to(device)
    optimizer = optimizer(model.parameters(), lr=0.01, **options)
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [tensor.cpu() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("make", [mlp, convolutions])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.RMSprop, {"foreach": True}),
    ],
)
def test_kernels_have_the_bits_of_the_cpu(fake, make, optimizer, options):
    """What the CPU computes is what a device computes, whatever the optimizer and its implementation."""
    device = train(make, images, "fake:1", optimizer, **options)
    assert all(map(torch.equal, device, train(make, images, "cpu", optimizer, **options)))


def test_threads_drive_devices(fake):
    """Threads that train on a device each, on streams of their own, do what one thread does."""

    def drive(index):
        with fake.stream(torch.Stream(f"fake:{index}")):
            weight = torch.full((8, 8), 0.1, device=f"fake:{index}", requires_grad=True)
            for _ in range(20):
                (weight @ weight).sum().backward()
                with torch.no_grad():
                    weight -= 0.01 * weight.grad
            return weight.detach().cpu()

    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(drive(0), weight) for weight in pool.map(drive, range(3)))


def test_batch_norm_remembers_and_evaluates(fake):
    """Running statistics change in training, are used in evaluation, and have the CPU's bits."""
    x, norms = images(), {device: nn.BatchNorm2d(1).to(device) for device in ("cpu", "fake:0")}
    outputs = [norm(x.to(device)) for device, norm in norms.items()] + [
        norm.eval()(x.to(device)) for device, norm in norms.items()
    ]
    assert torch.equal(outputs[0], outputs[1].cpu())
    assert torch.equal(outputs[2], outputs[3].cpu())
    assert torch.equal(norms["cpu"].running_var, norms["fake:0"].running_var.cpu())


def test_views_share_memory(fake):
    """Views of many kinds write into the tensor they are of."""
    x = torch.zeros(4, 6, device="fake:0")
    x.t()[1].add_(1)
    x.view(2, 12)[0, 0] = 5
    x.unfold(0, 2, 2)[1, 2, 0] = 7
    x.view(torch.int32)[3, 3] = 0
    torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)))[2, 2, 1] = 9
    expected = torch.zeros(4, 6)
    expected.t()[1].add_(1)
    expected[0, 0], expected[2, 2], expected[2, 5] = 5, 7, 9
    assert torch.equal(x.cpu(), expected)


def test_shapes_that_operators_change(fake):
    """Operators that resize what they are given, or whose result depends on the data, work."""
    x = torch.tensor([3.0, 0, 1], device="fake:1")
    out = torch.empty(0, device="fake:1")
    torch.add(x, x, out=out)
    assert out.tolist() == [6, 0, 2]
    assert x.nonzero().flatten().tolist() == [0, 2]
    assert x[x > 0].tolist() == [3, 1]
    assert x.resize_(5)[:3].tolist() == [3, 0, 1]
    assert torch.cat([x[:1], out]).unique().tolist() == [0, 2, 3, 6]


def test_channels_last(fake):
    """Memory formats travel to the device and through a convolution."""
    model = nn.Conv2d(2, 3, 3).to("fake:0", memory_format=torch.channels_last)
    x = torch.randn(2, 2, 6, 6).to("fake:0", memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    y = model(x)
    y.sum().backward()
    assert torch.equal(y.cpu(), copy.deepcopy(model).cpu()(x.cpu()))


def test_models_are_copied_saved_and_loaded(fake):
    """A copy of a module on a device is one; a checkpoint of it goes to any device."""
    model = mlp().to("fake:1")
    twin = copy.deepcopy(model)
    assert next(twin.parameters()).device == torch.device("fake:1")
    assert all(map(torch.equal, model.cpu().state_dict().values(), twin.cpu().state_dict().values()))
    pickled = pickle.loads(pickle.dumps(torch.ones(2, device="fake:1")))  # noqa: S301
    assert (str(pickled.device), pickled.tolist()) == ("fake:1", [1, 1])
    file = io.BytesIO()
    torch.save(model.to("fake:1").state_dict(), file)
    for place in ("cpu", "fake:0", None):
        file.seek(0)
        loaded = torch.load(file, map_location=place, weights_only=True)
        assert {str(tensor.device) for tensor in loaded.values()} == {place or "fake:1"}
        assert all(torch.equal(loaded[name].cpu(), tensor.cpu()) for name, tensor in model.state_dict().items())


# ---- torch knows it


def test_torch_accelerator(fake):
    """torch.accelerator names it, counts it, chooses among its devices and streams, and knows its memory."""
    assert torch.accelerator.current_accelerator() == torch.device("fake")
    assert torch.accelerator.device_count() == fake.device_count() >= 2
    torch.accelerator.set_device_index(1)
    assert fake.current_device() == 1
    assert torch.empty(1, device="fake").device.index == 1
    with fake.device(0):
        assert torch.empty(1, device="fake").device.index == 0
    stream = torch.Stream("fake:0")
    with fake.stream(stream):
        assert torch.accelerator.current_stream() == stream
        assert fake.current_device() == 0
    assert fake.current_device() == 1
    assert torch.accelerator.current_stream(0) == fake.default_stream(0) != stream
    torch.accelerator.synchronize(0)
    assert torch.get_device_module("fake:1") is fake


def test_there_is_no_such_device(fake):
    """A device beyond the last is refused."""
    with pytest.raises(RuntimeError, match="no device"):
        torch.empty(1, device=f"fake:{fake.device_count()}")


def test_generators_belong_to_devices(fake):
    """Every device draws from its own generator, which torch.manual_seed seeds and torch.random.fork_rng restores."""
    torch.manual_seed(3)
    first, second = (torch.rand(2, device=f"fake:{i}").tolist() for i in (0, 1))
    assert first == second  # seeded alike, and neither moved the other
    host = torch.get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type="fake"):
        inside = torch.rand(2, device="fake:0").tolist()
        F.dropout(torch.ones(5, device="fake:0"))
    assert torch.rand(2, device="fake:0").tolist() == inside
    assert torch.equal(torch.get_rng_state(), host)
    state = fake.get_rng_state("fake:1")
    drawn = F.dropout(torch.ones(50, device="fake:1")).tolist()
    assert not torch.equal(fake.get_rng_state("fake:1"), state)
    fake.set_rng_state(state, "fake:1")
    assert F.dropout(torch.ones(50, device="fake:1")).tolist() == drawn


@pytest.mark.parametrize("generator", ["fake:0", "cpu"])
def test_foreign_generator_is_refused(fake, generator):
    """A tensor cannot be filled by the generator of another device."""
    with pytest.raises(RuntimeError, match="generator"):
        torch.empty(3, device="fake:1").normal_(generator=torch.Generator(generator).manual_seed(1))
    own = torch.Generator("fake:1").manual_seed(1)
    assert torch.equal(
        torch.randn(3, device="fake:1", generator=own).cpu(), torch.randn(3, generator=torch.Generator().manual_seed(1))
    )


@pytest.mark.parametrize(
    "mixing",
    [
        lambda a, b: a + b,
        lambda a, b: a @ b,
        lambda a, b: torch._foreach_add([a], [b]),
        lambda a, b: F.mse_loss(a, b.cpu()),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: F.conv1d(a[None], b[None]),
    ],
)
def test_devices_are_not_mixed(fake, mixing):
    """An operator over tensors of two devices is an error."""
    with pytest.raises(RuntimeError, match="same device"):
        mixing(torch.ones(3, 3, device="fake:0"), torch.ones(3, 3, device="fake:1"))


def in_own_process(code):
    program = f"import os, ctypes, torch\nfrom tests.accelerator import load\nfake = load()\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)


@pytest.mark.long
def test_the_host_cannot_read_a_device(fake):
    """Reading where a device tensor says that it is ends the process."""
    ended = in_own_process("ctypes.c_float.from_address(torch.ones(3, device='fake:0').data_ptr()).value")
    assert ended.returncode == -signal.SIGSEGV
    with pytest.raises(TypeError):
        torch.ones(1, device="fake:0").numpy()


def test_memory_that_nobody_wrote_is_nan(fake):
    """What torch.empty returns holds nothing that looks like a result."""
    assert torch.empty(4, device="fake:0").isnan().all()


@pytest.mark.long
def test_a_forked_child_cannot_use_it(fake):
    """A process that has used a device cannot use it in a child that it forks."""
    use = "torch.ones(1, device='fake')"
    code = f"{use}\nif os.fork() == 0:\n    assert fake._is_in_bad_fork()\n    {use}\nelse:\n    os.wait()"
    assert "forked process" in in_own_process(code).stderr


@pytest.mark.long
def test_number_of_devices(fake):
    """FAKE_DEVICES says how many there are."""
    os.environ["FAKE_DEVICES"] = "7"
    try:
        assert in_own_process("print(fake.device_count())").stdout.split() == ["7"]
    finally:
        del os.environ["FAKE_DEVICES"]


# ---- copies


def test_copies_are_counted(fake):
    """Every copy counts once, in number and bytes, by where it came from and went."""
    a, b = torch.ones(2, 4).to("fake:0"), torch.empty(2, 4, device="fake:1")
    fake.reset_counts()
    b.copy_(a)
    (a.to("fake:1") + b).cpu()
    a.to("fake:0")  # no copy
    assert fake.counts() == {"fake:0>fake:1": (2, 64), "fake:1>cpu": (1, 32)}


def test_a_late_copy_arrives_when_its_device_is_waited_for(fake):
    """A copy to pinned memory is NaN until the host has waited for the device it came from, not for another."""
    a, target = torch.full((3,), 7.0, device="fake:0"), torch.zeros(3, pin_memory=True)
    target.copy_(a, non_blocking=True)
    assert target.isnan().all()
    fake.synchronize(1)
    assert target.isnan().all()
    fake.synchronize(0)
    assert target.tolist() == [7, 7, 7]


def test_a_late_copy_arrives_when_an_event_after_it_is_waited_for(fake):
    """An event recorded before the copy does not bring it; one recorded after it does, so does its stream."""
    a, target = torch.full((3,), 7.0, device="fake:0"), torch.zeros(3, pin_memory=True)
    early, late = torch.Event("fake:0"), torch.Event("fake:0")
    early.record()
    target.copy_(a, non_blocking=True)
    late.record()
    early.synchronize()
    assert target.isnan().all()
    late.synchronize()
    assert target.tolist() == [7, 7, 7]
    assert a.to("cpu", non_blocking=True).isnan().all()
    target.copy_(a + 1, non_blocking=True)
    fake.current_stream(0).synchronize()
    assert target.tolist() == [8, 8, 8]


def test_pinned_memory_is_read_late(fake):
    """Overwriting pinned memory before the copy from it is over is found when the host synchronises."""
    source = torch.ones(3, pin_memory=True)
    assert source.is_pinned()
    assert not torch.ones(3).is_pinned()
    device = source.to("fake:0", non_blocking=True)
    source.fill_(2)
    assert "pinned memory was overwritten" in str(raised(lambda: fake.synchronize(0)))
    assert device.tolist() == [2, 2, 2]
    device = source.to("fake:0", non_blocking=True)
    fake.synchronize(0)
    source.fill_(3)
    fake.synchronize(0)
    assert device.tolist() == [2, 2, 2]


def test_pinned_memory_overwritten_after_a_kernel_read_it(fake):
    """It is found, too, where the copy was early enough by luck."""
    source = torch.ones(3, pin_memory=True)
    device = source.to("fake:0", non_blocking=True) + 1
    source.zero_()
    assert "pinned memory was overwritten" in str(raised(lambda: device.cpu()))


def raised(action):
    with pytest.raises(RuntimeError) as error:
        action()
    return error.value


# ---- order


@pytest.fixture
def side(fake):
    return torch.Stream("fake:0")


def test_reading_before_it_is_written(fake, side):
    """A stream that reads what another writes must wait for it; the error names both."""
    a = torch.ones(3, device="fake:0")
    with fake.stream(side):
        text = str(raised(lambda: a * 2))
    assert text.startswith("fake accelerator: race: aten::mul")
    assert f"stream {side.stream_id} of fake:0 reads memory of fake:0" in text
    assert "aten::fill on stream 0 of fake:0" in text
    assert fake.races()


@pytest.mark.parametrize("how", ["wait_stream", "wait_event", "event.wait", "synchronize", "stream", "query"])
def test_waiting_makes_it_right(fake, side, how):
    """Each way to wait orders the streams."""
    a, main, event = torch.ones(3, device="fake:0"), fake.current_stream(0), torch.Event("fake:0")
    event.record(main)
    {
        "wait_stream": lambda: side.wait_stream(main),
        "wait_event": lambda: side.wait_event(event),
        "event.wait": lambda: event.wait(side),
        "synchronize": lambda: fake.synchronize(0),
        "stream": main.synchronize,
        "query": event.query,
    }[how]()
    with fake.stream(side):
        b = a * 2
    main.wait_stream(side)
    assert b.tolist() == [2, 2, 2]
    main.synchronize()
    assert not fake.races()


def test_waiting_for_an_event_that_was_recorded_too_early(fake, side):
    """An event orders what was enqueued before it was recorded, and nothing after."""
    a, event = torch.ones(3, device="fake:0"), torch.Event("fake:0")
    event.record()
    a.add_(1)
    side.wait_event(event)
    with fake.stream(side):
        raised(lambda: a * 2)


def test_writing_before_it_is_read(fake, side):
    """A stream that writes what another still reads must wait for it."""
    a = torch.ones(3, device="fake:0")
    side.wait_stream(fake.current_stream(0))
    with fake.stream(side):
        b = a * 2
    assert "writes memory" in str(raised(lambda: a.zero_()))
    fake.current_stream(0).wait_stream(side)
    a.zero_()
    del b


def test_two_streams_may_read(fake, side):
    """Reading at the same time is no race."""
    a = torch.ones(3, device="fake:0")
    side.wait_stream(fake.current_stream(0))
    kept = a + 1
    with fake.stream(side):
        kept_too = a + 2
    fake.synchronize(0)
    assert kept.sum() + kept_too.sum() == 15


def test_memory_of_another_stream(fake, side):
    """Memory belongs to the stream it was allocated on, whose earlier work may still use it."""
    torch.ones(3, device="fake:0")
    a = torch.empty(3, device="fake:0")
    with fake.stream(side):
        assert "its allocation" in str(raised(lambda: a.zero_()))


@pytest.mark.parametrize("recorded", [False, True])
def test_freeing_what_another_stream_uses(fake, side, recorded):
    """Memory freed while another stream may use it is found at the next work, unless record_stream was called."""
    a = torch.ones(3, device="fake:0")
    side.wait_stream(fake.current_stream(0))
    with fake.stream(side):
        b = a * 2
    if recorded:
        a.record_stream(side)
    del a
    if recorded:
        fake.synchronize(0)
    else:
        assert "is freed" in str(raised(lambda: fake.synchronize(0)))
    del b


def test_races_can_be_counted_instead(fake, side):
    """With raise_races(False) they are only listed."""
    fake.raise_races(False)
    a = torch.ones(3, device="fake:0")
    with fake.stream(side):
        a.mul_(2)
    assert len(fake.races()) == 1
    assert not fake.races()
    fake.synchronize(0)


def test_copies_between_devices_wait_for_both(fake):
    """A copy runs on the source's stream; both devices' current streams wait, other streams do not."""
    a, b = torch.ones(3, device="fake:0"), torch.zeros(3, device="fake:1")
    b.add_(1)
    b.copy_(a)
    a.zero_()
    b.add_(1)
    assert b.tolist() == [2, 2, 2]
    other = torch.Stream("fake:1")
    b.copy_(a)
    with fake.stream(other):
        assert "fake:0>fake:1 on stream 0 of fake:0" in str(raised(lambda: b + 1))


def test_a_copy_through_the_wrong_stream(fake):
    """A copy between devices on a side stream that did not wait for the kernel before it is a race."""
    a, b, side = torch.ones(3, device="fake:0"), torch.empty(3, device="fake:1"), torch.Stream("fake:0")
    with fake.stream(side):
        assert "copy fake:0>fake:1" in str(raised(lambda: b.copy_(a)))


def test_backward_runs_on_the_streams_of_forward(fake, side):
    """Autograd runs where forward ran and makes streams wait for each other: no race within, nor after."""
    a = torch.ones(3, 3, device="fake:0", requires_grad=True)
    side.wait_stream(fake.current_stream(0))
    with fake.stream(side):
        loss = (a @ a).sum()
    fake.current_stream(0).wait_stream(side)
    (loss * 2).backward()
    assert a.grad.sum() == 108
    fake.synchronize(0)
    assert not fake.races()


# ---- time


def seconds_of(fake, devices, kernels=10):
    """How long `kernels` take, split over `devices` with everything enqueued before anything is waited for."""
    for device in devices:
        fake.synchronize(device)
    tensors = [torch.ones(2, device=f"fake:{device}") for device in devices]
    for device in devices:
        fake.synchronize(device)
    begin = fake.now()
    for _ in range(kernels // len(devices)):
        for tensor in tensors:
            tensor.add_(1)
    enqueued = fake.now()
    for device in devices:
        fake.synchronize(device)
    return fake.now() - begin, enqueued - begin


def test_two_devices_take_half_the_time(fake):
    """Kernels take time on their device only: two devices are twice as fast, and enqueueing takes none."""
    fake.set_virtual_time(True)
    fake.set_kernel_seconds(0.1)
    assert seconds_of(fake, [0]) == pytest.approx((1.0, 0.0))
    assert seconds_of(fake, [0, 1]) == pytest.approx((0.5, 0.0))


def test_real_time_passes(fake):
    """Without virtual time the host really sleeps when it waits."""
    fake.set_kernel_seconds(0.02)
    total, _ = seconds_of(fake, [0], kernels=5)
    assert total >= 0.1


def test_copies_take_time_and_wait(fake):
    """A copy takes time by its bytes, on the source, and the target waits for it."""
    a, b = torch.ones(250, device="fake:0"), torch.empty(250, device="fake:1")
    fake.set_virtual_time(True)
    fake.synchronize(0), fake.synchronize(1)
    fake.set_copy_seconds_per_byte(1e-3)
    fake.set_kernel_seconds(0.5, "aten::add_")
    begin = fake.now()
    b.copy_(a)
    b.add_(1)
    fake.synchronize(0)
    assert fake.now() - begin == pytest.approx(1.0)
    fake.synchronize(1)
    assert fake.now() - begin == pytest.approx(1.5)


def test_a_value_is_waited_for(fake):
    """Reading a value makes the host wait for the kernels before it."""
    fake.set_virtual_time(True)
    a, begin = torch.ones(2, device="fake:0"), fake.now()
    fake.set_kernel_seconds(0.25)
    a.add_(1).sum().item()
    assert fake.now() - begin >= 0.5


def test_trace(fake):
    """A trace has every operation with its place on its stream's timeline, and the host's waits."""
    fake.set_virtual_time(True)
    a = torch.ones(2, device="fake:1")
    fake.synchronize(1)
    fake.set_kernel_seconds(0.01)
    fake.trace(True)
    a.add_(1).mul_(2)
    fake.synchronize(1)
    add, mul, wait = fake.take_trace()
    assert add[:3] == (1, 0, "aten::add")
    assert mul[:3] == (1, 0, "aten::mul")
    enqueued, starts, ends = mul[3:]
    assert add[3] <= enqueued <= starts == add[5]
    assert ends == pytest.approx(starts + 0.01)
    assert wait[:2] == ("host", "synchronize")
    assert wait[3] >= ends
    assert fake.take_trace() == []


def test_event_times(fake):
    """The time between two events is that of the kernels between them."""
    fake.set_virtual_time(True)
    a = torch.ones(2, device="fake:0")
    begin, end = torch.Event("fake:0", enable_timing=True), torch.Event("fake:0", enable_timing=True)
    fake.set_kernel_seconds(0.1)
    begin.record()
    a.add_(1).add_(1)
    end.record()
    assert not end.query()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(200)


# ---- failures


def test_out_of_memory_at_the_nth_allocation(fake):
    """The n-th allocation from now fails as on CUDA, on its device only, and what was there is unharmed."""
    a = torch.ones(4, device="fake:1")
    fake.fail_allocation("fake:1", 2)
    b = a + 1
    torch.ones(4, device="fake:0")
    with pytest.raises(torch.OutOfMemoryError, match="fake:1"):
        a + 2
    assert (a + b).tolist() == [3, 3, 3, 3]


def test_memory_has_a_limit_and_a_peak(fake):
    """Bytes are counted exactly per device, with their peak, and more than the limit is out of memory."""
    before, elsewhere = fake.memory_allocated(1), fake.memory_allocated(0)
    a = torch.ones(256, device="fake:1")
    assert fake.memory_allocated(1) - before == 1024
    del a
    assert fake.memory_allocated(1) == before
    assert fake.max_memory_allocated(1) - before >= 1024
    fake.reset_peak_memory_stats(1)
    assert fake.max_memory_allocated(1) == before
    fake.set_memory_limit(1, before + 1000)
    assert fake.mem_get_info(1) == (1000, before + 1000)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(256, device="fake:1")
    assert fake.memory_allocated(0) == elsewhere


def test_a_lost_device(fake):
    """Everything on a lost device fails, until it is restored; other devices work."""
    a, b = torch.ones(3, device="fake:0"), torch.ones(3, device="fake:1")
    fake.lose("fake:1")
    for action in (lambda: b + 1, lambda: fake.synchronize(1), b.cpu, lambda: b.copy_(a), lambda: a.copy_(b)):
        assert "fake:1 is lost" in str(raised(action))
    assert (a + 1).tolist() == [2, 2, 2]
    fake.restore("fake:1")
    assert b.tolist() == [1, 1, 1]


def test_a_kernel_that_fails_is_seen_at_the_next_synchronisation(fake):
    """An illegal access is reported late, and the device is lost then."""
    a = torch.ones(3, device="fake:1")
    fake.fault("fake:1")
    a.add_(1)
    fake.synchronize(0)
    assert "illegal memory access" in str(raised(a.cpu))
    assert "is lost" in str(raised(lambda: a + 1))


def test_nondeterministic_operators(fake):
    """An operator without a deterministic kernel is an error where determinism is asked for."""
    a, index = torch.zeros(3, device="fake:0"), torch.tensor([0, 0], device="fake:0")
    fake.set_nondeterministic("aten::index_add_")
    try:
        a.index_add_(0, index, torch.ones(2, device="fake:0"))
        torch.use_deterministic_algorithms(True)
        assert "does not have a deterministic implementation" in str(
            raised(lambda: a.index_add_(0, index, torch.ones(2, device="fake:0")))
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert a.tolist() == [2, 0, 0]


def test_without_a_compiler(monkeypatch, tmp_path):
    """Where it cannot be built the reason is said, and tests that need it are skipped."""
    monkeypatch.setattr(building, "_failures", [])
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for _ in range(2):
        with pytest.raises(building.Unavailable, match="no-such-compiler"):
            building.compiled()
