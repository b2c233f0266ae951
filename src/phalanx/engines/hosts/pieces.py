"""Sums between workers of several hosts, which own the same parameters: they travel in pieces, over Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.engines.flat import Cut, Flat, Homes, Mask, add, levels
from phalanx.engines.hosts.gloo import Gloo, Rendezvous
from phalanx.engines.processes.board import Station
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
    ranks : sequence of int
        The processes of this level.
    position : int
        This worker's among them.
    """

    in_place = True

    def __init__(self, gloo: Gloo, ranks: Sequence[int], position: int) -> None:
        self._gloo, self._position = gloo, position
        self._others = [(other, rank) for other, rank in enumerate(ranks) if other != position]

    def deal(self, sums: torch.Tensor, counts: Sequence[int], room: Callable[..., torch.Tensor]) -> Any:
        slices, works = sums.shape[1], list[Any]()
        rows = [list(sums[:, self._position % slices])] * len(counts)
        for other, rank in self._others:
            received = room(f"from {other}", counts[other] * sums.shape[2]).view(counts[other], -1)
            rows[other] = list(received)
            works.append(self._gloo.begin_receive(received, rank))
            works.append(self._gloo.begin_send(sums[:, other % slices].contiguous(), rank))
        return works, [row for of_worker in rows for row in of_worker]

    def wait(self, work: Any) -> None:
        self._gloo.wait(work)

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Any:
        works, slices = list[Any](), whole.view(-1, len(mine))
        for other, rank in self._others:
            works.append(self._gloo.begin_receive(slices[other], rank))
            works.append(self._gloo.begin_send(mine, rank))
        return works


class AddedAcross:
    """Adds to a host's sums, as far as this worker owns them, those of other hosts.

    Parameters
    ----------
    flat : Flat
    carriers : sequence of Pieces
        One for each level.
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
    among = levels(station.placement.replicas, blocks, rank, hosts, at_once=True)
    owned = layout.owned(station.worker)
    flat = Flat(layout.contents.gradients, station.placement.replicas, among, in_pieces, owned=owned)
    carriers = [Pieces(gloo, ranks, ranks.index(rank)) for ranks in ranks_of(len(blocks), rank, hosts)]
    return AddedAcross(flat, carriers, groups, station.blanks())


def ranks_of(size: int, rank: int, hosts: int) -> list[range]:
    """The processes of each level: those of a host, then those of equal position on all hosts; else all."""
    each = size // hosts
    host, position = divmod(rank, each)
    return [range(size)] if hosts == 1 else [range(host * each, (host + 1) * each), range(position, size, each)]


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
