"""Many hosts add up in groups first, and gather by doubling: the fold's bits, and few messages.

Hosts are threads here, and messages go through queues. Only what torch's group would do is not real.
"""

import concurrent.futures
import itertools
import math
import queue

import pytest
import torch

from phalanx.engines.flat import Flat
from phalanx.engines.hosts import gloo
from phalanx.engines.hosts.gloo import Gloo
from phalanx.engines.hosts.pieces import Pieces, in_pieces
from phalanx.plan.fold import place
from phalanx.plan.levels import MANY, grouped, levels
from phalanx.shared.layout import Spec
from tests.vectors import bits, folded, gradients

SHAPES = [(17, 3), (7,), (), (40,)]
SPECS = [Spec(shape, torch.empty(shape).stride(), "float32", 4) for shape in SHAPES]
SECONDS = 20


class Arrival:
    """A work: what another process sends comes into ``tensor``."""

    def __init__(self, box, tensor):
        self.box, self.tensor = box, tensor

    def wait(self):
        self.tensor.copy_(self.box.get(timeout=SECONDS))


class Group:
    """What Gloo has of torch's group, for a process of so many; ``sent`` are the bytes of each message."""

    def __init__(self, boxes, rank):
        self.boxes, self.rank, self.sent = boxes, rank, []

    def send(self, tensors, other, tag):
        assert tensors[0].is_contiguous()
        self.sent.append(tensors[0].nbytes)
        self.boxes[self.rank, other].put(tensors[0].clone())
        return self

    def recv(self, tensors, other, tag):
        return Arrival(self.boxes[other, self.rank], tensors[0])

    def wait(self):
        """What was sent was copied."""


def together(size, work):
    """What ``work(rank, gloo)`` returns in each of so many processes."""
    boxes = {pair: queue.Queue() for pair in itertools.product(range(size), repeat=2)}

    def one(rank):
        own = Gloo.__new__(Gloo)
        own._check, own._rank, own._size, own.group = bool, rank, size, Group(boxes, rank)
        return work(rank, own)

    with concurrent.futures.ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def exchanged(vectors, blocks, groups, fault=None):
    """Of each host the bits of the sum that it gets, and what it sent."""
    replicas = len(vectors)
    masks = [bytes(entry is not None for entry in sums) for block in blocks for sums in folded(vectors, block)]

    def work(rank, own):
        among = levels(replicas, blocks, rank, groups, at_once=True)
        flat, mine = Flat(SPECS, replicas, among, in_pieces), folded(vectors, blocks[rank])
        if fault is not None:
            fault(flat)

        def fill(indices, homes):
            for index in indices:
                for home, vector in zip(homes(index), mine, strict=True):
                    if vector[index] is not None:
                        home.copy_(vector[index])

        carriers = [Pieces(own, level) for level in among if level.ranks]
        total = flat.total(carriers, masks, fill, lambda mean: mean)
        return bits(total), own.group.sent

    return together(len(blocks), work)


def most_messages(hosts, groups):
    """What a host sends at most, if there is one piece: to who adds up in its group, to all of it, to other groups."""
    return hosts // groups - 1 + math.ceil(hosts / groups) - 1 + 2 * (groups - 1)


CASES = [
    (hosts, replicas, groups)
    for hosts in (*range(2, 10), 12, 16)
    for replicas in (hosts, hosts + 3, 3 * hosts + 1)
    for groups in {(1,), (math.isqrt(hosts), 1), ((hosts + 1) // 2, (hosts + 3) // 4, 1)}
    if groups.count(1) == 1
]


@pytest.mark.cases(12)
@pytest.mark.parametrize(("hosts", "replicas", "groups"), sorted(CASES), ids=str)
def test_groups_of_any_size_have_the_folds_bits(hosts, replicas, groups):
    """In one, two or three levels, in groups of unequal size, whose replicas are no branch of the tree."""
    vectors = gradients(SHAPES, replicas, seed=hosts * replicas)
    wanted = bits(folded(vectors, range(replicas))[0])
    found = exchanged(vectors, place(replicas, hosts).blocks, groups)
    assert all(total == wanted for total, _ in found)


@pytest.mark.parametrize("hosts", [16, 18, 30, 36, 37, 61])
def test_many_hosts_send_few_messages(hosts):
    """As many as the formula says, and the bits of one host; hosts that are few, or 17, send to all others."""
    vectors = gradients(SHAPES, hosts + 5, seed=hosts)
    found = exchanged(vectors, place(hosts + 5, hosts).blocks, grouped(hosts))
    assert all(total == bits(folded(vectors, range(hosts + 5))[0]) for total, _ in found)
    most = max(len(sent) for _, sent in found)
    assert most == most_messages(hosts, grouped(hosts)[0]) < 2 * (hosts - 1)


def test_every_number_of_hosts():
    """From the number alone: two levels, whose messages grow as its root; few are one group, as are 17, 19 and 23."""
    assert [count for count in range(1, 40) if len(grouped(count)) == 1] == [*range(1, 16), 17, 19, 22, 23, 26, 29, 31]
    for count in range(2 * MANY, 3000):
        groups, last = grouped(count)
        assert last == 1
        assert most_messages(count, groups) <= 2 * 2.7 * math.sqrt(count), (count, groups)
        if count % groups:
            assert count // groups >= 1.5 * math.sqrt(count), "a group's additional member costs a part of all bytes"


@pytest.mark.parametrize(("hosts", "groups"), [(16, 4), (12, 3), (8, 4), (6, 3)])
def test_equal_groups_send_what_a_ring_would(hosts, groups):
    """2 N (H - 1) / H bytes for each host, within what the cut into slices adds."""
    whole = sum(spec.nbytes for spec in SPECS)
    vectors = [[torch.ones(shape) for shape in SHAPES] for _ in range(hosts)]
    for _, sent in exchanged(vectors, place(hosts, hosts).blocks, (groups, 1)):
        wanted = 2 * whole * (hosts - 1) / hosts
        assert wanted <= sum(sent) <= wanted + 8 * hosts


def chained(at):
    """A fault: sums of a level are added one after another, whatever the tree says."""

    def fault(flat):
        level, sums = flat._among[at % len(flat._among)], flat._sums

        def planted(masks, places, of, group):
            chain = [(group[0], other) for other in group[1:]]
            found = sums(masks, places, of, group)
            return [stretch._replace(additions=chain) for stretch in found] if of is level else found

        flat._sums = planted  # planted

    return fault


@pytest.mark.parametrize("at", [0, 1])
def test_another_order_at_a_level_is_seen(at):
    """Negative twin: a one is lost beside 2 ** 24, and kept where that has gone, in a group and between groups."""
    four, rest = [2.0**24, 0.0, 1.0, 1.0], [0.0] * 3
    values = four * 4 if at == 0 else [each for value in four for each in (value, *rest)]
    vectors = [[torch.full(shape, value) for shape in SHAPES] for value in values]
    wanted = bits(folded(vectors, range(16))[0])
    blocks = place(16, 16).blocks
    assert all(total == wanted for total, _ in exchanged(vectors, blocks, (4, 1)))
    assert all(total != wanted for total, _ in exchanged(vectors, blocks, (4, 1), fault=chained(at)))


@pytest.mark.parametrize("size", [2, 3, 5, 8, 12, 16, 37, 64])
def test_a_gather_by_doubling(monkeypatch, size):
    """All have the rows of all, in the order of ranks, after log2 H messages of each; of any dtype."""
    monkeypatch.setattr(gloo, "grouped", lambda _: (2, 1))

    def work(rank, own):
        gathered = torch.empty(3 * size, dtype=torch.int64)
        own.gather(gathered, torch.arange(3) + 10 * rank)
        return gathered.tolist(), len(own.group.sent)

    wanted = [10 * rank + at for rank in range(size) for at in range(3)]
    assert together(size, work) == [(wanted, math.ceil(math.log2(size)))] * size
