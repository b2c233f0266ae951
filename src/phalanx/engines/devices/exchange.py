"""The mean gradient of workers that each have a device: torch.distributed moves bytes, and every addition is ours.

Gradients travel in buckets. Each worker gets its slice of every partial sum (all-to-all), adds these up in the fold's
order, divides, and gives the result to all (all-gather). That is the traffic of a ring all-reduce, 2 N (P - 1) / P
elements, where each worker has one partial sum. A library that only moves bytes cannot change a bit.

Where workers are on several hosts, those of a host do the first half among them. Then workers of equal position do it
with their slices, over the network: 2 N (H - 1) / H elements for a host, where its replicas leave one sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from phalanx.engines.devices.transport import Transport
from phalanx.engines.stretches import PATTERNS, Mask, Stretch, fold_stretches, scratch, stretches
from phalanx.frameworks.torch.accelerators import watched
from phalanx.frameworks.torch.arithmetic import copy_all
from phalanx.plan.fold import Node, added, covers, remaining
from phalanx.seams.records import Vector
from phalanx.shared.layout import Spec

BUCKET = 25 << 20  # bytes
ALIGNED = 512  # bytes: kernels may compute otherwise at addresses that a gradient of torch's own would not have

# Buckets with rooms of their own for what comes and for sums. A bucket's all-to-all is begun before the fold of the one
# ahead of it is, and after the all-gather of the one before that. Collectives of one kind follow one another, and that
# all-gather waits for its fold. So two sets are enough.
IN_FLIGHT = 2
Journey = Iterator[Any]  # of a bucket: something is under way after each step; the last one gives all slices


class Level(NamedTuple):
    """Workers among which sums are added up: those of a host, or those of equal position on all hosts.

    Attributes
    ----------
    size, position : int
        How many there are, and which this worker is.
    counts : list of int
        The sums that each of them has.
    sums : list of (Node, list of int)
        Each of their sums: its node of the fold's tree, and of which workers' sums, counted over all, it is made.
    groups : list of list of int
        Which of the sums are added up to each one that is left here.
    """

    size: int
    position: int
    counts: list[int]
    sums: list[tuple[Node, list[int]]]
    groups: list[list[int]]


class Bucket(NamedTuple):
    """Parameters whose gradients travel together.

    Attributes
    ----------
    dtype : torch.dtype
    places : dict
        The offset of each parameter, in elements.
    stretches : list of list of list of Stretch
        For each level and group the stretches of parameters that the same sums have.
    width : int
        Elements of a slice; each worker adds up one.
    most : int
        Elements of a slice of the largest bucket that has the same rooms on the way.
    """

    dtype: torch.dtype
    places: dict[int, int]
    stretches: list[list[list[Stretch]]]
    width: int
    most: int


def levels(replicas: int, blocks: Sequence[range], rank: int, hosts: int = 1) -> list[Level]:
    """Among whom a worker exchanges sums, in order. Each host has equally many workers, one after another."""
    nodes = [remaining(replicas, block) for block in blocks]
    starts = [sum(map(len, nodes[:worker])) for worker in range(len(nodes))]
    every = [node for own in nodes for node in own]
    each = len(blocks) // hosts
    host, position = divmod(rank, each)
    cuts = [range(first, first + each) for first in range(0, len(blocks), each)]
    own = cuts[host]
    within = [(node, [starts[worker] + at]) for worker in own for at, node in enumerate(nodes[worker])]
    tops = [remaining(replicas, range(blocks[cut[0]].start, blocks[cut[-1]].stop)) for cut in cuts]
    groups = [[at for at, (node, _) in enumerate(within) if covers(top, node)] for top in tops[host]]
    whole = [(top, [number for number, node in enumerate(every) if covers(top, node)]) for of in tops for top in of]
    within_host = Level(each, position, [len(nodes[worker]) for worker in own], within, groups)
    across = Level(hosts, host, list(map(len, tops)), whole, [list(range(len(whole)))])
    return [within_host] if hosts == 1 else [within_host, across]


class Exchange:
    """The mean gradient over all workers.

    Parameters
    ----------
    specs : sequence of Spec
        What each parameter's gradient looks like.
    replicas : int
        R.
    among : sequence of Level
        Among whom this worker exchanges sums.
    device : str
        Where gradients are.

    Attributes
    ----------
    watched : callable
        A context in which a failure of the device is told as such.
    steps : int
        Of a bucket's journey, before the last.
    """

    def __init__(self, specs: Sequence[Spec], replicas: int, among: Sequence[Level], device: str) -> None:
        self._device, self._replicas, self._among = device, replicas, among
        self.watched = functools.partial(watched, [torch.device(device)])
        self.steps = 2 * len(among)
        self._like = [
            torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype), device="meta")
            for spec in specs
        ]
        self._own, self._workers = among[0].counts[among[0].position], 1
        for level in among:
            self._workers *= level.size
        self._laid_out = functools.lru_cache(PATTERNS)(self._lay_out)
        self._rooms: dict[Any, torch.Tensor] = {}

    def total(
        self, transport: Transport, masks: Sequence[Mask], mine: Sequence[Vector | None], over: Callable[[Any], Any]
    ) -> Vector:
        """The mean gradient: an entry for each parameter that any node has a gradient of, None for others.

        Parameters
        ----------
        transport : Transport
        masks : sequence of bytes
            Which gradients each node of all workers has.
        mine : sequence of Vector or None
            The sums at this worker's nodes.
        over : callable
            Divides a tensor by the sum of weights, in place.
        """
        buckets = self.layout(masks)
        for number, bucket in enumerate(buckets):
            self._pack(number, bucket, mine)
        journeys = [self.travel(transport, number, bucket, over) for number, bucket in enumerate(buckets)]
        if transport.beside is None:
            for _ in range(self.steps):
                for journey in journeys:
                    next(journey)
            return self.unpacked(buckets, map(next, journeys))
        for number, journey in enumerate(journeys):
            next(journey)
            if number:
                self.go_on(journeys[number - 1])
        for journey in journeys[-1:]:
            self.go_on(journey)
        return self.unpacked(buckets, map(next, journeys))

    def go_on(self, journey: Journey) -> None:
        """All of a journey behind its first all-to-all, which is under way."""
        for _ in range(self.steps - 1):
            next(journey)

    def layout(self, masks: Sequence[Mask]) -> list[Bucket]:
        """The buckets of a step in which each node of all workers has these gradients."""
        return self._laid_out(tuple(masks))

    def homes(self, number: int, bucket: Bucket, index: int) -> list[torch.Tensor]:
        """Where this worker's sums of a parameter lie in a bucket that it sends, one for each of its nodes."""
        return [self._home(row, bucket, index) for row in self._packed(number, bucket)]

    def travel(self, transport: Transport, number: int, bucket: Bucket, over: Callable[[Any], Any]) -> Journey:
        """Take this worker's sums of a bucket to all, and all means back; waits for what it began a step before."""
        rows, first, length = self._packed(number, bucket), 0, self._workers * bucket.width
        packed, slot = rows, number if transport.beside is None else (number % IN_FLIGHT, bucket.dtype)

        def room(name: str, depth: int, size: int) -> torch.Tensor:
            return scratch(self._rooms, (name, number, depth), size, bucket.dtype, self._device)

        def shared_room(name: str, depth: int, size: int) -> torch.Tensor:
            most = size if transport.beside is None else size // bucket.width * bucket.most
            return scratch(self._rooms, (name, slot, depth), most, bucket.dtype, self._device)[:size]

        for depth, (level, link) in enumerate(zip(self._among, transport.levels, strict=True)):
            own, length = len(rows), length // level.size
            sent = rows
            if own > 1:  # memory that nobody else gets while it is under way
                sent = room("sent", depth, rows.numel()).view(level.size, own, length)
                sent.copy_(rows.view(own, level.size, length).transpose(0, 1))
            received = shared_room("received", depth, sum(level.counts) * length)
            comes, goes = [count * length for count in level.counts], [own * length] * level.size
            work = link.all_to_all(received, sent.view(-1), comes, goes)
            yield
            link.wait(work)
            first += level.position * length
            rows = shared_room("sum", depth, len(level.groups) * length).view(-1, length)
            for total, its_stretches in zip(rows, bucket.stretches[depth], strict=True):
                fold_stretches(total, list(received.view(-1, length)), its_stretches, first, spare=True)
        mean = over(rows[0])
        for depth, (level, link) in reversed(list(enumerate(zip(self._among, transport.levels, strict=True)))):
            # At last the mean takes the place of what was sent, if that was one sum: it has been sent by then.
            last = depth == 0 and len(packed) == 1
            whole = packed[0] if last else room("whole", depth, level.size * len(mean))
            work = link.all_gather(whole, mean)
            yield
            link.wait(work)
            mean = whole
        yield mean

    def unpacked(self, buckets: Sequence[Bucket], wholes: Iterator[torch.Tensor]) -> Vector:
        """The gradients of all parameters, where they came."""
        total: Vector = [None] * len(self._like)
        for bucket, whole in zip(buckets, wholes, strict=True):
            for index, offset in bucket.places.items():
                like = self._like[index]
                total[index] = whole.as_strided(like.shape, like.stride(), offset)
        return total

    def _packed(self, number: int, bucket: Bucket) -> torch.Tensor:
        whole = self._workers * bucket.width
        packed = scratch(self._rooms, ("packed", number), self._own * whole, bucket.dtype, self._device)
        return packed.view(self._own, whole)

    def _pack(self, number: int, bucket: Bucket, mine: Sequence[Vector | None]) -> None:
        """Put this worker's sums into a bucket."""
        rows = zip(self._packed(number, bucket), mine, strict=True)
        there = [(row, vector) for row, vector in rows if vector is not None]
        copy_all(
            (self._home(row, bucket, index), vector[index])
            for row, vector in there
            for index in bucket.places
            if vector[index] is not None
        )

    def _home(self, row: torch.Tensor, bucket: Bucket, index: int) -> torch.Tensor:
        """Where a parameter's gradient lies in a sum."""
        like = self._like[index]
        return row.as_strided(like.shape, like.stride(), row.storage_offset() + bucket.places[index])

    def _lay_out(self, masks: tuple[Mask, ...]) -> list[Bucket]:
        """Buckets in the order in which a backward pass comes to the parameters: the last first."""
        there = [index for index in reversed(range(len(self._like))) if any(mask[index] for mask in masks)]
        buckets: list[Bucket] = []
        for dtype in dict.fromkeys(self._like[index].dtype for index in there):
            step = max(1, ALIGNED // dtype.itemsize)
            places, size = dict[int, int](), 0
            pending = [index for index in there if self._like[index].dtype == dtype]
            for at, index in enumerate(pending):
                places[index] = size
                size += -(-self._like[index].numel() // step) * step
                if at + 1 == len(pending) or (size + self._like[pending[at + 1]].numel()) * dtype.itemsize > BUCKET:
                    width = -(-size // (self._workers * step)) * step
                    find = functools.partial(self._sums, masks, places)
                    all_stretches = [[find(level, group) for group in level.groups] for level in self._among]
                    buckets.append(Bucket(dtype, places, all_stretches, width, width))
                    places, size = {}, 0
        most: dict[Any, int] = {}
        for number, bucket in enumerate(buckets):
            kind = number % IN_FLIGHT, bucket.dtype
            most[kind] = max(bucket.width, most.get(kind, 0))
        return [bucket._replace(most=most[number % IN_FLIGHT, bucket.dtype]) for number, bucket in enumerate(buckets)]

    def _sums(self, masks: Sequence[Mask], places: dict[int, int], level: Level, group: list[int]) -> list[Stretch]:
        """How sums of a level are added up, by stretches of parameters that the same ones have."""
        nodes = [level.sums[number][0] for number in group]
        made_of = [level.sums[number][1] for number in group]
        have = [bytes(map(max, *(masks[number] for number in of), masks[of[0]])) for of in made_of]
        all_stretches: list[Stretch] = []
        for there, begin, end in stretches(have, places, self._like):
            order = [(group[into], group[source]) for into, source in added(self._replicas, nodes, there)]
            if there:
                all_stretches.append(Stretch(begin, end, tuple(group[at] for at in there), order))
        return all_stretches


class Spread:
    """Losses, and what replicas left in buffers: every worker gets it of all replicas, in one all-gather.

    Parameters
    ----------
    specs : sequence of Spec
        What each buffer looks like.
    blocks : sequence of range
        The replicas of each worker, in order.
    rank : int
        This worker's position there.
    device : str
        Where buffers are.
    """

    def __init__(self, specs: Sequence[Spec], blocks: Sequence[range], rank: int, device: str) -> None:
        self._specs, self._blocks, self._rank, self._device = specs, blocks, rank, device
        self._views = functools.lru_cache(PATTERNS)(self._laid_out)

    def total(
        self, transport: Transport, changed: np.ndarray, mine: Mapping[int, Sequence[Any]], losses: Sequence[Any]
    ) -> tuple[list[list[Any]], list[Any]]:
        """For each replica its buffers, where ``changed[replica, buffer]`` says that it wrote them; and its losses.

        ``losses`` are equally many of each of this worker's replicas, one after another. Those that come lie on the
        device, as float64, one after another for all replicas. Nothing is waited for.
        """
        packed, whole, into, rows = self._views(changed.any(0).tobytes(), len(losses) // len(self._blocks[self._rank]))
        for home, loss in zip((loss for *_, own in into for loss in own), losses, strict=True):
            home.copy_(loss) if isinstance(loss, torch.Tensor) else home.fill_(loss)
        pairs = [
            (home, mine[replica][number])
            for replica, (*homes, _) in zip(self._blocks[self._rank], into, strict=True)
            for number, home in enumerate(homes)
            if home is not None and changed[replica, number] and replica in mine  # else it has no samples
        ]
        copy_all(pairs)
        transport.wait(transport.all_gather(whole, packed))
        return [row[:-1] for row in rows], [loss for row in rows for loss in row[-1]]

    def _laid_out(self, written: bytes, losses: int) -> tuple[torch.Tensor, torch.Tensor, list[Any], list[Any]]:
        """What this worker sends and what comes, as bytes; the same for each replica, as its buffers and its losses."""
        specs = [*self._specs, Spec((losses,), (1,), "float64", 8)]
        places, width = list[int | None](), 0
        for spec, sends in zip(specs, [*written, True], strict=True):
            places.append(width if sends else None)
            width += -(-spec.nbytes // ALIGNED) * ALIGNED * sends
        most = max(map(len, self._blocks))
        packed = torch.zeros(most * width, dtype=torch.uint8, device=self._device)
        whole = torch.zeros(len(self._blocks) * most * width, dtype=torch.uint8, device=self._device)

        def row(flat: torch.Tensor, number: int) -> list[torch.Tensor | None]:
            return [
                None if place is None else _at(flat, number * width + place, spec)
                for place, spec in zip(places, specs, strict=True)
            ]

        numbers = [rank * most + at for rank, block in enumerate(self._blocks) for at in range(len(block))]
        mine = [row(packed, number) for number in range(len(self._blocks[self._rank]))]
        return packed, whole, mine, [row(whole, number) for number in numbers]


def _at(flat: torch.Tensor, offset: int, spec: Spec) -> torch.Tensor:
    """A tensor in the memory of a flat one, ``offset`` bytes from its start."""
    dtype = getattr(torch, spec.dtype)
    home = torch.empty(0, dtype=dtype, device=flat.device)
    return home.set_(flat.untyped_storage(), offset // dtype.itemsize, spec.shape, spec.strides)
