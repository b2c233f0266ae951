"""The mean of partial sums that several workers have: a carrier moves bytes, and every addition is ours.

Gradients lie in rows, a row for each dtype and sum, and travel in buckets. Each worker gets its slice of every sum,
adds these up in the fold's order, and gives the result to all. Where each worker has one sum, that is the traffic of a
ring all-reduce, 2 N (P - 1) / P elements. What only moves bytes cannot change a bit.

Where workers are on several hosts, those of a host do the first half among them. Then workers of equal position do it
with their slices, over the network: 2 N (H - 1) / H elements for a host, where its replicas leave one sum. Many hosts
do it in groups first, too, so that nobody has to send to all. The bytes stay the same where groups are equally large.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from phalanx.plan.fold import added
from phalanx.plan.levels import Level
from phalanx.seams.records import Vector
from phalanx.shared.layout import Spec

Mask = bytes  # one byte per parameter: whether it has a gradient
PATTERNS = 64  # cached sets of present gradients

# Buckets with rooms of their own for what comes and for sums. A bucket's all-to-all is begun before the fold of the one
# ahead of it is, and after the all-gather of the one before that. Collectives of one kind follow one another, and that
# all-gather waits for its fold. So two sets are enough.
IN_FLIGHT = 2
Journey = Iterator[Any]  # of a bucket: something is under way after each step; the last one gives all slices
Homes = Callable[[int], list[torch.Tensor]]  # of a parameter: where its gradient lies in each of this worker's sums
Room = Callable[..., torch.Tensor]
Region = tuple[int, int]  # of a bucket: where it begins, and its elements
Fill = Callable[[Sequence[int], Homes], None]
# Rows: where parameters begin in each, and (begin, elements of a slice) of its buckets.
Cut = list[tuple[dict[int, int], list[tuple[int, int]]]]


class Carrier(Protocol):
    """Moves bytes between the workers of a level.

    Attributes
    ----------
    in_place : bool
        Whether what is gathered may lie where it is gathered.
    """

    in_place: bool

    def deal(self, sums: torch.Tensor, counts: Sequence[int], room: Room) -> Any:
        """Begin to send ``sums[:, slice]`` to each worker; returns a work, and the rows that come, in workers' order.

        ``counts``: the sums that each of them has. ``room(name, size)`` gives memory, which other buckets use later;
        ``own=True``: which none uses.
        """
        ...

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Any:
        """Begin to fill ``whole`` with what all workers have, equally much of each."""
        ...

    def wait(self, work: Any) -> None:
        """Wait for what was begun."""


class Stretch(NamedTuple):
    """A stretch of a sum: where it begins and ends, the nodes that have it, and their additions in order."""

    begin: int
    end: int
    nodes: tuple[int, ...]
    additions: Sequence[tuple[int, int]]


class Row(NamedTuple):
    """How gradients of one dtype lie in a sum, in memory of their own.

    Attributes
    ----------
    dtype : torch.dtype
    places : dict
        The offset of each parameter, in elements.
    stretches : list of list of list of Stretch
        For each level and group the stretches of parameters that the same sums have.
    size : int
        Elements of all buckets.
    """

    dtype: torch.dtype
    places: dict[int, int]
    stretches: list[list[list[Stretch]]]
    size: int


class Bucket(NamedTuple):
    """A stretch of a row that travels at once.

    Attributes
    ----------
    row : int
    begin : int
        Where it begins there, in elements.
    width : int
        Elements of a slice of the last level.
    most : int
        Elements of a slice of the largest bucket that has the same rooms on the way.
    filled : list of int
        The parameters that begin in it.
    """

    row: int
    begin: int
    width: int
    most: int
    filled: list[int]


class Layout(NamedTuple):
    """The rows and buckets of a step."""

    rows: list[Row]
    buckets: list[Bucket]


class Flat:
    """What several workers' sums add up to, divided or not.

    Parameters
    ----------
    specs : sequence of Spec
        What each parameter's gradient looks like.
    replicas : int
        R.
    among : sequence of Level
        Among whom this worker exchanges sums.
    cut : callable
        ``cut(sizes, itemsize, slices)``: rows of parameters of these sizes (elements), and buckets.
    device : str
        Where gradients are.
    owned : sequence of int, optional
        The parameters whose sums are exchanged, in the order in which they come; None: all, the last first, as a
        backward pass has them.

    Attributes
    ----------
    steps : int
        Of a bucket's journey, before the last.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        replicas: int,
        among: Sequence[Level],
        cut: Callable[[dict[int, int], int, int], Cut],
        device: str = "cpu",
        owned: Sequence[int] | None = None,
    ) -> None:
        self._device, self._replicas, self._cut = device, replicas, cut
        self._among = [level for level in among if level.ranks]
        self.steps = sum(2 - level.whole for level in self._among)
        self._like = [
            torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype), device="meta")
            for spec in specs
        ]
        self._owned = range(len(specs))[::-1] if owned is None else owned
        self._own = among[0].counts[among[0].position]
        self._slices = math.prod(level.slices for level in among)
        self._laid_out = functools.lru_cache(PATTERNS)(self._lay_out)
        self._rooms: dict[Any, torch.Tensor] = {}

    def total(
        self,
        carriers: Sequence[Carrier],
        masks: Sequence[Mask],
        fill: Fill,
        over: Callable[[Any], Any],
        *,
        behind: bool = False,
    ) -> Vector:
        """The mean gradient: an entry for each parameter that any node has a gradient of, None for others.

        Parameters
        ----------
        carriers : sequence of Carrier
            One for each level in which this worker has a part.
        masks : sequence of bytes
            Which gradients each node of all workers has.
        fill : callable
            ``fill(parameters, homes)`` writes this worker's sums of parameters where they lie.
        over : callable
            Divides a tensor by the sum of weights, in place.
        behind : bool
            Whether a bucket is gathered as soon as the next one is dealt; else once all are dealt.
        """
        layout = self.layout(masks)
        journeys: list[Journey] = []
        for number, bucket in enumerate(layout.buckets):
            fill(bucket.filled, self.homes(layout, number))
            journeys.append(self.travel(carriers, number, layout, over, apart=not behind))
            next(journeys[-1])
            if behind and number:
                self.go_on(journeys[number - 1])
        if behind:
            for journey in journeys[-1:]:
                self.go_on(journey)
        else:
            for _ in range(self.steps - 1):
                for journey in journeys:
                    next(journey)
        for journey in journeys:
            next(journey)
        return self.unpacked(layout)

    def go_on(self, journey: Journey) -> None:
        """All of a journey behind its first all-to-all, which is under way."""
        for _ in range(self.steps - 1):
            next(journey)

    def layout(self, masks: Sequence[Mask]) -> Layout:
        """The rows and buckets of a step in which each node of all workers has these gradients."""
        return self._laid_out(tuple(masks))

    def homes(self, layout: Layout, number: int) -> Homes:
        """Where this worker's sums of the parameters in a bucket lie."""
        at = layout.buckets[number].row
        row, sums = layout.rows[at], list(self._packed(layout, at))
        return lambda index: [self._home(each, row, index) for each in sums]

    def travel(
        self,
        carriers: Sequence[Carrier],
        number: int,
        layout: Layout,
        over: Callable[[Any], Any],
        *,
        apart: bool = False,
    ) -> Journey:
        """Take this worker's sums of a bucket to all, and all means back; waits for what it began a step before.

        ``apart``: all buckets are under way at once, so that none shares its memory.
        """
        bucket = layout.buckets[number]
        row, here = layout.rows[bucket.row], slice(bucket.begin, bucket.begin + self._slices * bucket.width)
        target = self._target(layout, bucket.row)[here]

        def room(depth: int, name: str, size: int, *, own: bool = False) -> torch.Tensor:
            # Buckets that take turns in a slot all ask for the size of the largest of them (`most`). `scratch` makes
            # new memory, filled with zeros, whenever a size differs. So with sizes of their own each bucket would get
            # new memory in each step. `own` is for what is sent, and for what a level gathers: nobody else may write
            # that while it is under way. With `apart` all buckets are under way at once, so each has its rooms alone.
            # One room for all buckets is a fault that a test plants. It ends in other bits, or workers notice it. Not
            # covered: another order of `deal`, fold and `gather` than that of `go_on`. IN_FLIGHT is right for that
            # one.
            slot, most = (number, size) if own or apart else (number % IN_FLIGHT, size // bucket.width * bucket.most)
            return scratch(self._rooms, (name, slot, depth, row.dtype), most, row.dtype, self._device)[:size]

        sums = self._packed(layout, bucket.row)[:, here]
        total, regions = yield from self._added_up(carriers, row, bucket.begin, sums, target, room)
        yield from self._given_to_all(carriers, over(total), regions, target, room)

    def _added_up(
        self, carriers: Sequence[Carrier], row: Row, first: int, sums: torch.Tensor, target: torch.Tensor, room: Room
    ) -> Generator[Any, None, tuple[torch.Tensor, list[Region]]]:
        """A slice of the sum of a bucket, which begins at ``first``, level by level; and what each level has cut."""
        regions, begin, length = list[Region](), 0, sums.shape[1]
        for depth, (level, carrier) in enumerate(zip(self._among, carriers, strict=True)):
            regions.append((begin, length))
            length //= level.slices
            dealt = sums.view(len(sums), level.slices, length)
            work, rows = carrier.deal(dealt, level.counts, functools.partial(room, depth))
            yield
            carrier.wait(work)
            if not level.adds:
                return sums[0, :0], regions
            begin += level.position % level.slices * length
            if carrier.in_place and depth + 1 == len(self._among):
                sums = target[None, begin : begin + length]
            else:
                sums = room(depth, "sum", len(level.groups) * length).view(-1, length)
            for total, its_stretches in zip(sums, row.stretches[depth], strict=True):
                fold_stretches(total, rows, its_stretches, first + begin)
        return sums[0], regions

    def _given_to_all(
        self, carriers: Sequence[Carrier], mean: torch.Tensor, regions: list[Region], target: torch.Tensor, room: Room
    ) -> Journey:
        """The whole bucket's mean, of which this worker has a slice."""
        for depth, (level, carrier) in reversed(list(enumerate(zip(self._among, carriers, strict=True)))):
            if not level.whole:
                begin, length = regions[depth]
                at_home = depth == 0 or carrier.in_place
                whole = target[begin : begin + length] if at_home else room(depth, "whole", length, own=True)
                work = carrier.gather(whole, mean)
                yield
                carrier.wait(work)
                mean = whole
        yield mean

    def unpacked(self, layout: Layout) -> Vector:
        """The gradients of all parameters, where they came."""
        total: Vector = [None] * len(self._like)
        for number, row in enumerate(layout.rows):
            target = self._target(layout, number)
            for index in row.places:
                total[index] = self._home(target, row, index)
        return total

    def _packed(self, layout: Layout, number: int) -> torch.Tensor:
        """The sums of this worker, a row for each."""
        row = layout.rows[number]
        flat = scratch(self._rooms, ("packed", number), self._own * row.size, row.dtype, self._device)
        return flat.view(self._own, row.size)

    def _target(self, layout: Layout, number: int) -> torch.Tensor:
        """Where the mean comes: in place of what was sent, if that was one sum, as it has been sent by then."""
        row = layout.rows[number]
        if self._own == 1:
            return self._packed(layout, number)[0]
        return scratch(self._rooms, ("target", number), row.size, row.dtype, self._device)

    def _home(self, flat: torch.Tensor, row: Row, index: int) -> torch.Tensor:
        """Where a parameter's gradient lies in a sum."""
        like = self._like[index]
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset() + row.places[index])

    def _lay_out(self, masks: tuple[Mask, ...]) -> Layout:
        there = [index for index in self._owned if any(mask[index] for mask in masks)]
        rows: list[Row] = []
        buckets: list[Bucket] = []
        for dtype in dict.fromkeys(self._like[index].dtype for index in there):
            sizes = {index: self._like[index].numel() for index in there if self._like[index].dtype == dtype}
            for places, cuts in self._cut(sizes, dtype.itemsize, self._slices):
                find = functools.partial(self._sums, masks, places)
                all_stretches = [[find(level, group) for group in level.groups] for level in self._among]
                for begin, width in cuts:
                    end = begin + self._slices * width
                    last = (begin, width) == cuts[-1]  # an empty parameter may begin at its very end
                    filled = [index for index, place in places.items() if begin <= place and (last or place < end)]
                    buckets.append(Bucket(len(rows), begin, width, width, filled))
                size = max((begin + self._slices * width for begin, width in cuts), default=0)
                rows.append(Row(dtype, places, all_stretches, size))
        most: dict[Any, int] = {}
        kinds = [(number % IN_FLIGHT, rows[bucket.row].dtype) for number, bucket in enumerate(buckets)]
        for kind, bucket in zip(kinds, buckets, strict=True):
            most[kind] = max(bucket.width, most.get(kind, 0))
        return Layout(rows, [bucket._replace(most=most[kind]) for kind, bucket in zip(kinds, buckets, strict=True)])

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


def scratch(
    rooms: dict[Any, torch.Tensor], name: Any, size: int, dtype: torch.dtype, device: str = "cpu"
) -> torch.Tensor:
    """So many elements, with any content, in memory that ``rooms`` keeps to be used again in every step."""
    room = rooms.get(name)
    if room is None or room.numel() != size or room.dtype != dtype:
        room = rooms[name] = torch.zeros(size, dtype=dtype, device=device)
    return room


def stretches(
    masks: Sequence[Mask], places: dict[int, int], like: Sequence[torch.Tensor]
) -> list[tuple[tuple[int, ...], int, int]]:
    """(positions of the nodes that have it, begin, end) of stretches of parameters with equal masks."""
    segments: list[tuple[tuple[int, ...], int, int]] = []
    for index, offset in places.items():
        there = tuple(position for position, mask in enumerate(masks) if mask[index])
        end = offset + like[index].numel()
        if segments and segments[-1][0] == there:
            segments[-1] = (there, segments[-1][1], end)
        else:
            segments.append((there, offset, end))
    return segments


def add(
    target: torch.Tensor, parts: list[torch.Tensor | None], order: Sequence[tuple[int, int]], *, spare: bool = False
) -> None:
    """Add these up into ``target``. ``spare``: what is added up may be written."""
    if not order:
        target.copy_(next(part for part in parts if part is not None))
        return
    *before, (into, source) = order
    for left, right in before:
        parts[left] = torch.add(parts[left], parts[right], out=parts[left] if spare else None)  # type: ignore[arg-type]
    torch.add(parts[into], parts[source], out=target)  # type: ignore[arg-type]


def fold_stretches(
    target: torch.Tensor, rows: Sequence[torch.Tensor], stretches: Sequence[Stretch], first: int
) -> None:
    """A slice of all partial sums, which begins at ``first``, added up; parameters with equal masks at once.

    The rows are written.
    """
    for begin, end, present, additions in stretches:
        here = slice(max(begin - first, 0), min(end - first, len(target)))
        if here.start < here.stop:
            parts = [row[here] if position in present else None for position, row in enumerate(rows)]
            add(target[here], parts, additions, spare=True)
