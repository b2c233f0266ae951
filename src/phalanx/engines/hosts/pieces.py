"""Sums between workers of several hosts, which own the same parameters: they travel in pieces, over Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.engines.flat import Cut, Flat, Homes, Mask, add
from phalanx.engines.hosts.gloo import Gloo, Rendezvous
from phalanx.engines.processes.board import Station
from phalanx.plan.levels import Level, grouped, levels
from phalanx.seams import Order
from phalanx.seams.records import Vector

LEAST, MOST = 128 << 10, 1 << 20  # bytes of a slice of a piece
PIECES = 8  # of a sum of medium size: the first travel while others are packed, at a cost per piece


class Pieces:
    """Implements ``engines.flat.Carrier`` over Gloo: workers send each other slices, each directly.

    Parameters
    ----------
    gloo : Gloo
        One connection for all levels: an error closes it, and so everybody learns of it at once.
    level : Level
    """

    in_place = True

    def __init__(self, gloo: Gloo, level: Level) -> None:
        self._gloo, self._level = gloo, level
        self._others = [(other, rank) for other, rank in enumerate(level.ranks) if other != level.position]

    def deal(self, sums: torch.Tensor, counts: Sequence[int], room: Callable[..., torch.Tensor]) -> Any:
        level, slices, works = self._level, sums.shape[1], list[Any]()
        rows = [list(sums[:, level.position % slices])] * len(counts)
        for other, rank in self._others:
            if level.adds:
                received = room(f"from {other}", counts[other] * sums.shape[2]).view(counts[other], -1)
                rows[other] = list(received)
                works.append(self._gloo.begin_receive(received, rank))
            if other < level.adders:
                works.append(self._gloo.begin_send(sums[:, other % slices].contiguous(), rank))
        return works, [row for of_worker in rows for row in of_worker]

    def wait(self, work: Any) -> None:
        self._gloo.wait(work)

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Any:
        level, works = self._level, list[Any]()
        slices = whole.view(level.adders, -1)
        for other, rank in self._others:
            if other < level.adders:
                works.append(self._gloo.begin_receive(slices[other], rank))
            if level.adds:
                works.append(self._gloo.begin_send(mine, rank))
        return works


class AddedAcross:
    """Adds to a host's sums, as far as this worker owns them, those of other hosts.

    Parameters
    ----------
    flat : Flat
    carriers : sequence of Pieces
        One for each level in which this worker has a part.
    groups : list of list of int
        Which sums of a host's workers are added up to each of the host's.
    blanks : sequence of arrays
        Shaped as the parameters' gradients, with any content; tensors, or numpy arrays.
    """

    def __init__(
        self, flat: Flat, carriers: Sequence[Pieces], groups: Sequence[Sequence[int]], blanks: Sequence[Any]
    ) -> None:
        self._flat, self._carriers, self._groups, self._blanks = flat, carriers, groups, blanks

    def __call__(self, masks: Sequence[Mask], vectors: Sequence[Vector | None], order: Order) -> Vector:
        """The sum of all; ``masks`` say which gradients hosts' sums have, ``vectors`` are those of workers here."""

        def fill(indices: Sequence[int], homes: Homes) -> None:
            for index in indices:
                found = [None if vector is None else vector[index] for vector in vectors]
                entries = [None if entry is None else tensor_of(entry) for entry in found]
                for home, group in zip(homes(index), self._groups, strict=True):
                    there = tuple(at for at in group if entries[at] is not None)
                    if there:
                        rows = [entry if at in there else None for at, entry in enumerate(entries)]
                        add(home, rows, order(there))

        total = self._flat.total(self._carriers, masks, fill, lambda mean: mean)
        pairs = zip(total, self._blanks, strict=True)
        return [None if entry is None else array_of(entry, blank) for entry, blank in pairs]


def added_across(station: Station, rendezvous: Rendezvous, gloo: Gloo, groups: Sequence[Sequence[int]]) -> AddedAcross:
    """What adds other hosts' sums to those of a worker's host; ``gloo`` connects it to its counterparts on all."""
    blocks, rank, hosts = rendezvous.blocks, rendezvous.rank, rendezvous.hosts
    layout = station.plan.layout
    groups_of = grouped(len(blocks)) if hosts == 1 else (hosts, *grouped(hosts))
    among = levels(station.placement.replicas, blocks, rank, groups_of, at_once=True)
    owned = layout.owned(station.worker)
    flat = Flat(layout.contents.gradients, station.placement.replicas, among, in_pieces, owned=owned)
    carriers = [Pieces(gloo, level) for level in among if level.ranks]
    return AddedAcross(flat, carriers, groups, station.blanks())


def in_pieces(sizes: dict[int, int], itemsize: int, slices: int) -> Cut:
    """One row of parameters, one after another, and pieces, which end anywhere."""
    places, size = dict[int, int](), 0
    for index, count in sizes.items():
        places[index] = size
        size += count
    return [(places, chunks(size, slices, itemsize))]


def chunks(size: int, slices: int, itemsize: int) -> list[tuple[int, int]]:
    """(begin, elements of a slice) of pieces that travel one behind the other: some arrive while others are sent."""
    most = max(1, min(MOST, max(LEAST, size * itemsize // PIECES // slices)) // itemsize)
    pieces: list[tuple[int, int]] = []
    start = 0
    while start < size:
        width = min(most, -(-(size - start) // slices))
        pieces.append((start, width))
        start += slices * width
    return pieces


def tensor_of(array: Any) -> torch.Tensor:
    """A tensor over the memory of an array. Arrays of jax cannot be written, which torch warns of: they are copied."""
    if isinstance(array, torch.Tensor):
        return array
    plain = np.asarray(array)
    unknown = plain.dtype.name == "bfloat16"  # to torch, by numpy's name
    words = plain.view(np.uint16) if unknown else plain
    tensor = torch.from_numpy(words if words.flags.writeable else words.copy())
    return tensor.view(torch.bfloat16) if unknown else tensor


def array_of(tensor: torch.Tensor, like: Any) -> Any:
    """A tensor as an array of the kind of ``like``, over the same memory."""
    if isinstance(like, torch.Tensor):
        return tensor
    if like.dtype.name == "bfloat16":
        return tensor.view(torch.uint16).numpy().view(like.dtype)
    return tensor.numpy()
