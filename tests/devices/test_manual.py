"""Data parallelism by hand on accelerators, on the fake one of ``tests.accelerator``.

The CPU's bits for any number of devices; gradients go from device to device. The host waits for each device once a
step, when all have their work.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx import manual
from phalanx.frameworks.torch.replica.lane import Lane
from phalanx.manual import replicas as shared_replicas
from tests.by_hand import start, take
from tests.families import FAMILIES, ConstantBuffers, TrappedNet, conv_norm, mlp, normal, terms, whole

pytestmark = pytest.mark.accelerator
COUNTS = [1, 2, 3, 4]
PER_DEVICE = [1, 2]
LEFT_OUT = {"transformer", "odd_tensors"}  # dropout draws from each device's generator; no complex kernels there
# May have other bits there: embeddings and recurrent cells have formulas instead of the CPU's kernels; autocast for
# "cpu" reaches none.
OTHER_KERNELS = {"tied", "masked_tokens", "lstm", "gru", "own_autocast"}
PLAIN = [
    name
    for name, family in FAMILIES.items()
    if name not in LEFT_OUT and family.forward_fn is None and family.precision is None and family.batch_size
]


def places(count, per_device=1):
    """So many devices, each as often as it has replicas, in blocks."""
    return [f"fake:{number}" for number in range(count) for _ in range(per_device)]


def on_cpu(devices):
    return ["cpu"] * len(devices)


def by_manual(recipe, devices, **options):
    """The recipe's steps by hand: the digest of every replica with its optimizer, and the losses."""
    model, _, _ = start(recipe)
    replicas = manual.replicate(model, devices)
    optimizers = [recipe.optimizer(list(replica.named_parameters())) for replica in replicas]
    losses = []
    for number in range(recipe.plan.steps):
        batch = take(recipe.data, torch.from_numpy(recipe.plan.indices(number)))
        losses.append(manual.data_parallel_step(replicas, optimizers, batch, recipe.loss_fn, **options))
    return [phalanx.digest(*pair, recipe.plan.steps) for pair in zip(replicas, optimizers, strict=True)], losses


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", PLAIN)
def test_a_step_has_the_bits_of_the_cpu(name, fake):
    """Every family ends, on three devices, in the digests and losses that it ends in on one, and on the CPU."""
    recipe = FAMILIES[name].recipe(3)
    found = by_manual(recipe, places(3))
    assert found == by_manual(recipe, ["fake:0"] * 3)
    assert name in OTHER_KERNELS or found == by_manual(recipe, ["cpu"] * 3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("per_device", PER_DEVICE)
@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_devices(count, per_device, fake):
    """Uneven and empty shares, clipping, BatchNorm and every algorithm: the CPU's bits on all replicas."""
    devices = places(count, per_device)
    for family, options in (("conv_norm", {}), ("mlp", {"max_norm": 0.05}), ("partly_unused", {})):
        for algorithm in ("ordered", "ring", "naive"):
            recipe = FAMILIES[family].recipe(len(devices), batch_size=len(devices) + 5, steps=2)
            options = {**options, "algorithm": algorithm}
            assert by_manual(recipe, devices, **options) == by_manual(recipe, on_cpu(devices), **options)
    recipe = FAMILIES["mlp"].recipe(len(devices), batch_size=2, steps=2)
    assert by_manual(recipe, devices) == by_manual(recipe, on_cpu(devices))


def test_devices_in_any_order(fake):
    """Replicas dealt to devices in turn, or with the CPU among them, end in the same bits as on the CPU."""
    recipe = FAMILIES["conv_norm"].recipe(4, batch_size=10)
    wanted = by_manual(recipe, ["cpu"] * 4)
    assert by_manual(recipe, ["fake:1", "fake:0", "fake:1", "fake:0"]) == wanted
    assert by_manual(recipe, ["cpu", "fake:0", "fake:1", "cpu"]) == wanted


@pytest.mark.parametrize("fault", ["another order", "a gradient at home"])
def test_a_wrong_sum_is_noticed(fault, fake, monkeypatch):
    """Negative twin: adding from left to right, or leaving out what lies on another device, ends in other bits."""
    recipe = terms(4)
    wanted = by_manual(recipe, ["cpu"] * 4)
    assert by_manual(recipe, places(4)) == wanted
    if fault == "another order":
        monkeypatch.setattr(shared_replicas, "fold_values", from_left_to_right)
    else:
        added = shared_replicas._added
        monkeypatch.setattr(
            shared_replicas,
            "_added",
            lambda left, right: left if left[0].device != right[0].device else added(left, right),
        )
    assert by_manual(recipe, places(4)) != wanted


def from_left_to_right(values, add):
    total = None
    for value in values:
        total = value if total is None else add(total, value)
    return total


def batch(samples=24, device="cpu"):
    return normal(samples, 3, 6, 6).to(device), whole(3, samples).to(device)


def ready(devices, make=conv_norm):
    """Replicas with their optimizers, after a first step."""
    torch.manual_seed(0)
    replicas = manual.replicate(make(), devices)
    return replicas, [torch.optim.AdamW(replica.parameters(), lr=0.01) for replica in replicas]


def between(counts):
    """Bytes between devices, by the one that sends; what goes to and from the host is left out."""
    sent = {}
    for pair, (_, size) in counts.items():
        source, target = pair.split(">")
        if source != target and "cpu" not in (source, target):
            sent[source] = sent.get(source, 0) + size
    return sent


@pytest.mark.parametrize("per_device", PER_DEVICE)
@pytest.mark.parametrize("count", [2, 4])
def test_a_sync_goes_up_the_tree_and_down(count, per_device, fake):
    """The devices together send a gradient D-1 times to where it is added, the mean as often, and none to the host."""
    model = nn.Sequential(*[nn.Linear(31, 32) for _ in range(12)])
    replicas = manual.replicate(model, places(count, per_device))
    for replica in replicas:
        for parameter in replica.parameters():
            parameter.grad = torch.ones_like(parameter)
    fake.reset_counts()
    manual.sync_gradients(replicas)
    counts = fake.counts()
    assert sum(between(counts).values()) == 2 * (count - 1) * sum(parameter.nbytes for parameter in model.parameters())
    assert not [pair for pair in counts if "cpu" in pair]


def test_only_batches_and_numbers_pass_the_host(fake):
    """A step copies each share to its device once, and takes a loss from each device, and the norm from the first."""
    replicas, optimizers = ready(places(3))
    x, y = batch()
    manual.data_parallel_step(replicas, optimizers, (x, y), F.cross_entropy)
    fake.reset_counts()
    manual.data_parallel_step(replicas, optimizers, (x, y), F.cross_entropy, max_norm=0.1)
    through = {pair: size for pair, size in fake.counts().items() if "cpu" in pair}
    share = (x.nbytes + y.nbytes) // 3
    assert through == {
        **{f"cpu>fake:{number}": (2, share) for number in range(3)},
        **{f"fake:{number}>cpu": (1, 4) for number in range(3)},
        "fake:0>cpu": (1, 8),
    }


def test_a_batch_on_a_device_stays_off_the_host(fake):
    """Shards of a batch on a device are cut there, with the bits of a batch on the CPU."""
    x, y = batch()
    fake.reset_counts()
    there = batch(device="fake:1")
    fake.reset_counts()
    shards = manual.shard_batch(there, 3)
    assert set(fake.counts()) <= {"fake:1>fake:1"}
    for mine, theirs in zip(shards, manual.shard_batch((x, y), 3), strict=True):
        assert all(torch.equal(one.cpu(), other) for one, other in zip(mine, theirs, strict=True))


def stepped(fake, count, replicas=4):
    """Seconds of a step on the fake's clock, where only products of matrices take time, and what was waited for."""
    models, optimizers = ready(places(count, replicas // count))
    given = batch(16)
    manual.data_parallel_step(models, optimizers, given, F.cross_entropy)
    for number in range(count):
        fake.synchronize(number)
    fake.set_virtual_time(True)
    for name in ("aten::convolution_overrideable", "aten::convolution", "aten::addmm", "aten::mm"):
        fake.set_kernel_seconds(1.0, name)
    fake.trace(True)
    begin = fake.now()
    manual.data_parallel_step(models, optimizers, given, F.cross_entropy)
    seconds, trace = fake.now() - begin, fake.take_trace()
    fake.trace(False)
    return seconds, trace


def test_all_devices_have_their_work_before_one_is_waited_for(fake):
    """Four devices take a quarter of the time of one, and the backward pass of the last is enqueued before any wait."""
    alone, _ = stepped(fake, 1)
    fake.reset()
    shared, trace = stepped(fake, 4)
    assert shared == pytest.approx(alone / 4)
    slow = [number for number, event in enumerate(trace) if event[0] != "host" and event[5] - event[4] >= 1]
    waits = [number for number, event in enumerate(trace) if event[0] == "host"]
    assert {trace[number][0] for number in slow} == {0, 1, 2, 3}
    assert waits
    assert max(slow) < min(waits)
    assert len(waits) == 4


def test_reading_each_loss_at_once_is_noticed(fake, monkeypatch):
    """Negative twin: with a replica's loss read before the next one has its work, four devices take as long as one."""
    alone, _ = stepped(fake, 1)
    fake.reset()
    gradient = Lane.gradient

    def reading(lane, todo):
        computed = gradient(lane, todo)
        computed.loss.item()
        return computed

    monkeypatch.setattr(Lane, "gradient", reading)
    assert stepped(fake, 4)[0] == pytest.approx(alone)


def states(fake):
    return [bytes(state.tolist()) for state in fake.get_rng_state_all()]


def test_generators_are_left_as_found(fake):
    """Nothing here draws or seeds: generators move only where a model draws on its own device."""
    torch.manual_seed(0)  # as ``ready`` does, on every device
    before, mine = states(fake), torch.get_rng_state()
    replicas, optimizers = ready(places(2))
    torch.set_rng_state(mine)
    manual.data_parallel_step(replicas, optimizers, batch(), F.cross_entropy)
    manual.sync_gradients(replicas)
    manual.broadcast_parameters(replicas, root=1)
    manual.shard_batch(batch(), 2)
    assert states(fake) == before
    assert torch.equal(torch.get_rng_state(), mine)
    replicas, optimizers = ready(places(2), lambda: nn.Sequential(nn.Dropout(0.5), mlp()))
    manual.data_parallel_step(replicas, optimizers, (normal(8, 5), whole(3, 8)), F.cross_entropy)
    assert [now == then for now, then in zip(states(fake), before, strict=True)] == [False, False, True, True]


class FromTheHost(nn.Module):
    """Adds noise that the process's generator on the CPU draws."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x + torch.randn(x.shape).to(x.device))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_the_host_draws_is_the_same_for_any_devices(count, fake):
    """Replicas are given their work in their order, so each draws what it draws on the CPU."""
    ends = []
    for devices in (["cpu"] * 4, places(count, 4 // count)):
        replicas, optimizers = ready(devices, FromTheHost)
        torch.manual_seed(7)
        loss = manual.data_parallel_step(replicas, optimizers, (normal(8, 5), whole(3, 8)), F.cross_entropy)
        ends.append((loss, phalanx.digest(replicas[0], optimizers[0], 1)))
    assert ends[0] == ends[1]


class Hidden(nn.Module):
    """Counts samples where no version counter sees it, and has a buffer whose elements share memory."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("wide", torch.ones(1).expand(5))

    def forward(self, x):
        self.seen.data += len(x)
        return self.body(x * self.wide)


@pytest.mark.parametrize("make", [Hidden, ConstantBuffers, conv_norm])
def test_buffers_are_settled_as_on_the_cpu(make, fake):
    """Counted, hidden, constant and expanded buffers end as on the CPU, on every replica."""
    shape = {conv_norm: (3, 6, 6), ConstantBuffers: (6, 4)}.get(make, (5,))
    ends = []
    for devices in (["cpu"] * 3, places(3)):
        replicas, optimizers = ready(devices, make)
        for samples in (7, 3, 4):
            manual.data_parallel_step(
                replicas, optimizers, (normal(samples, *shape), whole(3, samples)), F.cross_entropy
            )
        ends.append([phalanx.digest(*pair, 3) for pair in zip(replicas, optimizers, strict=True)])
    assert ends[0] == ends[1]
    assert len(set(ends[0])) == 1


@pytest.mark.parametrize("source", ["cpu", "fake:1"])
def test_replicas_are_equal_and_apart(source, fake):
    """A model anywhere is copied to every device, and broadcast from any of them, bit for bit."""
    model = conv_norm().to(source)
    replicas = manual.replicate(model, ["fake:2", "fake:0", "fake:0"])
    assert [str(next(replica.parameters()).device) for replica in replicas] == ["fake:2", "fake:0", "fake:0"]
    assert len({phalanx.digest(replica) for replica in [model, *replicas]}) == 1
    with torch.no_grad():
        for parameter in replicas[1].parameters():
            parameter.add_(1)
    assert phalanx.digest(replicas[1]) != phalanx.digest(replicas[2]) == phalanx.digest(model)
    manual.broadcast_parameters(replicas, root=1)
    assert len({phalanx.digest(replica) for replica in replicas}) == 1
    assert phalanx.digest(replicas[0]) != phalanx.digest(model)


def test_a_weight_on_the_device(fake):
    """Weights that the loss returns there count as on one device; a share of weight 0 is not looked at."""
    family = FAMILIES["masked_tokens"]
    x, y = (column.clone() for column in family.data)
    y[:7] = -100
    ends = []
    for devices in (["fake:0"] * 3, places(3)):
        replicas, optimizers = ready(devices, family.make_model)
        loss = manual.data_parallel_step(replicas, optimizers, (x, y), family.loss_fn)
        ends.append((loss, [phalanx.digest(*pair, 1) for pair in zip(replicas, optimizers, strict=True)]))
    assert ends[0] == ends[1]


def test_the_caller_s_autocast(fake):
    """Autocast around a step reaches every device."""
    ends = []
    for devices in (["cpu"] * 2, places(2)):
        replicas, optimizers = ready(devices, mlp)
        kind = devices[0].partition(":")[0]
        for context in (contextlib.nullcontext(), torch.autocast(kind, torch.bfloat16)):
            with context:
                manual.data_parallel_step(replicas, optimizers, (normal(8, 5), whole(3, 8)), F.cross_entropy)
            ends.append([phalanx.digest(*pair, 1) for pair in zip(replicas, optimizers, strict=True)])
    assert ends[:2] == ends[2:]
    assert ends[0] != ends[1]


def squared(output, target):
    return (output - target).pow(2).mean()


def trapped(x, hidden):
    """Raises for samples of 99, and has no finite value for those of 98."""
    if (x == 99).any():
        raise KeyError("sample 99")
    return hidden * float("nan") if (x == 98).any() else hidden


@pytest.mark.parametrize(
    ("marks", "kind", "replica"),
    [
        ({5: 99}, phalanx.WorkerError, 1),
        ({5: 98}, phalanx.NonFiniteError, 1),
        ({1: 98, 5: 99}, phalanx.WorkerError, 1),
        ({1: 99, 5: 98}, phalanx.WorkerError, 0),
        ({4: 98, 8: 98}, phalanx.NonFiniteError, 1),
    ],
)
def test_the_first_failing_replica_is_named(marks, kind, replica, fake):
    """The first that raises is named with its device, or else the first that is not finite; nothing was changed."""
    replicas, optimizers = ready(places(3), lambda: TrappedNet(trapped))
    x = normal(9, 3)
    for sample, mark in marks.items():
        x[sample] = mark
    before = [phalanx.digest(*pair, 0) for pair in zip(replicas, optimizers, strict=True)]
    with pytest.raises(kind, match=f"replica {replica} on fake:{replica}, samples") as caught:
        manual.data_parallel_step(replicas, optimizers, (x, normal(9, 1)), squared)
    assert caught.value.replica == replica
    assert [phalanx.digest(*pair, 0) for pair in zip(replicas, optimizers, strict=True)] == before
    assert all(parameter.grad is None for each in replicas for parameter in each.parameters())


def test_a_device_that_fails_is_named(fake):
    """What a device reports when it is waited for becomes an error with its name."""
    replicas, optimizers = ready(places(2))
    given = batch()
    manual.data_parallel_step(replicas, optimizers, given, F.cross_entropy)
    fake.fault("fake:1")
    with pytest.raises(phalanx.PhalanxError, match="fake:1"):
        manual.data_parallel_step(replicas, optimizers, given, F.cross_entropy)
