"""Collectives between accelerators, on the fake one of ``tests.accelerator``.

The CPU's bits, straight from device to device, as many bytes as the schedules say, and no wait.
"""

import itertools

import pytest
import torch

from phalanx import collectives
from tests.collectives.oracles import CASES, bits, wild
from tests.orders import triples

pytestmark = pytest.mark.accelerator
COUNTS = [1, 2, 3, 4]
PER_DEVICE = [1, 2]
ALGORITHMS = ["ordered", "ring", "naive"]
# The fake device has the CPU's kernels, but not all of those for complex numbers and for narrow integers.
KINDS = [(op, dtype) for op, dtype in CASES if dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64)]


def places(count, per_device=1):
    """So many devices, each as often as it has participants, in blocks."""
    return [f"fake:{number}" for number in range(count) for _ in range(per_device)]


def spread(tensors, devices):
    return [tensor.to(device, copy=True) for tensor, device in zip(tensors, devices, strict=True)]


def between(counts):
    """(copies, bytes) that left each device for another one."""
    sent = {}
    for pair, (copies, size) in counts.items():
        source, target = pair.split(">")
        if source != target:
            assert "cpu" not in (source, target), f"{pair}: {size} bytes through the host"
            known = sent.get(source, (0, 0))
            sent[source] = known[0] + copies, known[1] + size
    return sent


def states(fake):
    return [bits(state) for state in fake.get_rng_state_all()]


@pytest.mark.cases(8)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("per_device", PER_DEVICE)
@pytest.mark.parametrize("count", COUNTS)
def test_all_reduce_has_the_bits_of_the_cpu(count, per_device, algorithm, fake):
    """Every operation and dtype ends in the CPU's bits on all devices, and no generator is touched."""
    devices, before = places(count, per_device), states(fake)
    for (op, dtype), size in itertools.product(KINDS, (1, 10)):
        expected = wild(len(devices), (size,), dtype, seed=size)
        given = spread(expected, devices)
        collectives.all_reduce(expected, op, algorithm)
        collectives.all_reduce(given, op, algorithm)
        assert [str(tensor.device) for tensor in given] == devices
        assert {bits(tensor.cpu()) for tensor in given} == {bits(expected[0])}
    assert states(fake) == before


@pytest.mark.parametrize("per_device", PER_DEVICE)
@pytest.mark.parametrize("count", COUNTS)
def test_the_others_have_the_bits_of_the_cpu(count, per_device, fake):
    """broadcast, scatter, gather, reduce_scatter and all_gather of rows give what they give on the CPU."""
    devices = places(count, per_device)
    for size in (1, 7):
        tensors = wild(len(devices), (size, 3), torch.float32, seed=size)
        there = spread(tensors, devices)
        pieces = collectives.reduce_scatter(there)
        assert list(map(here, pieces)) == list(map(bits, collectives.reduce_scatter(tensors)))
        assert [here(whole) for whole in collectives.all_gather(pieces)] == [
            bits(whole) for whole in collectives.all_gather(collectives.reduce_scatter(tensors))
        ]
        for source in (tensors[0], there[0]):
            scattered = collectives.scatter(source, devices)
            assert [str(piece.device) for piece in scattered] == devices
            assert list(map(here, scattered)) == list(
                map(bits, collectives.scatter(tensors[0], ["cpu"] * len(devices)))
            )
            assert bits(collectives.gather(scattered)) == bits(tensors[0])
            assert here(collectives.gather(scattered, devices[-1])) == bits(tensors[0])
        collectives.broadcast(there, root=len(devices) - 1)
        assert {here(tensor) for tensor in there} == {bits(tensors[-1])}


def here(tensor):
    return bits(tensor.cpu())


def test_another_order_is_noticed(fake, monkeypatch):
    """Negative twin: an ordered sum that is added up in the ring's order ends in other bits."""
    expected = list(torch.tensor(triples(4)))
    given = spread(expected, places(4))
    schedule = collectives.schedule
    monkeypatch.setattr(collectives, "schedule", lambda _, count: schedule("ring", count))
    collectives.all_reduce(given)
    monkeypatch.undo()
    collectives.all_reduce(expected)
    assert here(given[0]) != bits(expected[0])


@pytest.mark.parametrize("per_device", PER_DEVICE)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_ring_s_bytes(count, per_device, fake):
    """Each device sends 2N(D-1)/D bytes where it has one participant, and none more than its last one's share else."""
    participants = count * per_device
    given = spread(wild(participants, (participants * 24,), torch.float32, 0), places(count, per_device))
    fake.reset_counts()
    collectives.all_reduce(given, algorithm="ring")
    due = 2 * given[0].nbytes * (participants - 1) // participants
    assert between(fake.counts()) == {f"fake:{number}": (2 * (participants - 1), due) for number in range(count)}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_tree_s_bytes(count, fake):
    """Ordered, the first device sends N as often as the tree has levels, the others once up and to those below them."""
    given = spread(wild(count, (24,), torch.float32, 0), places(count))
    fake.reset_counts()
    collectives.all_reduce(given)
    transfers = collectives.schedule("ordered", count)
    copies = [sum(one.source == number for one in transfers) for number in range(count)]
    assert between(fake.counts()) == {
        f"fake:{number}": (sent, sent * given[0].nbytes) for number, sent in enumerate(copies)
    }
    assert max(copies) == (count - 1).bit_length()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_is_waited_for(algorithm, fake):
    """With kernels that take seconds, the host goes on at once, and devices add at the same time."""
    given = spread(wild(4, (24,), torch.float32, 0), places(4))
    fake.set_virtual_time(True)
    fake.set_kernel_seconds(5.0)
    begin = fake.now()
    collectives.all_reduce(given, algorithm=algorithm)
    pieces = collectives.all_gather(collectives.reduce_scatter(given))
    collectives.broadcast(pieces)
    assert fake.now() == begin
    given[0].cpu()
    assert fake.now() > begin


def test_a_wait_is_noticed(fake, monkeypatch):
    """Negative twin: copies that the host waits for take the host's time."""
    given = spread(wild(4, (24,), torch.float32, 0), places(4))
    monkeypatch.setitem(collectives.COMBINE, "sum", lambda mine, theirs: mine.add_(theirs.cpu().to(mine.device)))
    fake.set_virtual_time(True)
    fake.set_kernel_seconds(5.0)
    fake.reset_counts()
    begin = fake.now()
    collectives.all_reduce(given)
    assert fake.now() > begin
    with pytest.raises(AssertionError, match="through the host"):
        between(fake.counts())


def test_the_cpu_takes_part(fake):
    """A participant on the CPU has the same bits as the others, though its memory may be read at once."""
    expected = wild(3, (24,), torch.float32, 0)
    for algorithm in ALGORITHMS:
        given = spread(expected, ["cpu", "fake:0", "fake:1"])
        fake.set_kernel_seconds(0.01)
        collectives.all_reduce(given, algorithm=algorithm)
        read = bits(given[0])
        wanted = [tensor.clone() for tensor in expected]
        collectives.all_reduce(wanted, algorithm=algorithm)
        assert {read, *map(here, given)} == {bits(wanted[0])}
