"""What hosts tell each other in a step: losses and weights of all replicas, sums of gradients, buffers.

Each worker of a host talks to its counterparts on the other hosts, which own the same parameters. A sum over all hosts
takes two rounds: everybody gets its slice of every partial sum, adds them in the fold's order, and sends the result to
all. That is the traffic of a ring, 2 N (H - 1) / H elements per host, where each host has one partial sum.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from phalanx.contracts import Part
from phalanx.errors import RunError
from phalanx.plan.placement import added, remaining

INTERFACE = "GLOO_SOCKET_IFNAME"
CHECK_STEPS = 100  # how often hosts compare the sums of their weights
HEADER = ("run", "step", "weights")
WORD = 8
ROW = len(Part._fields)
GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
Mask = bytes  # one byte per parameter: whether it has a gradient


class SeveredError(RunError):
    """The connection to another host is gone, or what came over it is not of this run."""


@dataclass(frozen=True)
class Meeting:
    """Where workers of several hosts find each other; can be pickled.

    Attributes
    ----------
    address : (str, int)
        Host and port of the store of the run's torch.distributed world.
    run : int
        The run's number, drawn by rank 0.
    rank : int
        This host's place among ``blocks``.
    blocks : tuple of range
        The replicas of each host.
    seconds : float
        How long to wait for another host.
    interface : str
        The network interface to use; "" leaves the choice to torch.
    """

    address: tuple[str, int]
    run: int
    rank: int
    blocks: tuple[range, ...]
    seconds: float
    interface: str


class Across:
    """One worker's connection to its counterparts.

    Parameters
    ----------
    meeting : Meeting
    worker : int
    replicas, count : int
        R, and the number of parameters.
    """

    def __init__(self, meeting: Meeting, worker: int, replicas: int, count: int) -> None:
        self._run = meeting.run
        self._rank = meeting.rank
        self._blocks = meeting.blocks
        self._replicas = replicas
        self._count = count
        self._nodes = [remaining(replicas, block) for block in meeting.blocks]
        self._rooms: dict[Any, torch.Tensor] = {}
        limit = datetime.timedelta(seconds=meeting.seconds)
        host, port = meeting.address
        if meeting.interface:
            os.environ.setdefault(INTERFACE, meeting.interface)
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)
        place = dist.PrefixStore(f"phalanx/{meeting.run}/worker {worker}", store)
        self._call(
            dist.init_process_group, "gloo", store=place, rank=meeting.rank, world_size=len(meeting.blocks),
            timeout=limit,
        )  # fmt: skip

    @property
    def nodes(self) -> list[tuple[int, int]]:
        """The nodes of the fold's tree that this host adds up."""
        return self._nodes[self._rank]

    def exchange(
        self, step: int, weights: int, parts: Sequence[Part], masks: Sequence[Mask]
    ) -> tuple[list[Part], list[Mask]]:
        """Give this host's parts, and which gradients each of its nodes has; get everybody's, in replica order.

        ``weights`` is a checksum of what this worker owns, compared every CHECK_STEPS steps.
        """
        most, most_nodes = max(map(len, self._blocks)), max(map(len, self._nodes))
        head = np.array([self._run, step, weights if step % CHECK_STEPS == 0 else 0], np.int64)
        rows = np.zeros((most, ROW))
        rows[: len(parts)] = parts
        flags = np.zeros((most_nodes, self._count), np.uint8)
        for row, mask in zip(flags, masks, strict=False):
            row[:] = np.frombuffer(mask, np.uint8)
        mine = torch.from_numpy(np.frombuffer(head.tobytes() + rows.tobytes() + flags.tobytes(), np.uint8).copy())
        found = self._room("parts", len(self._blocks) * len(mine), torch.uint8)
        self._call(GATHER, found, mine)
        all_parts: list[Part] = []
        all_masks: list[Mask] = []
        for rank, message in enumerate(found.numpy().reshape(len(self._blocks), -1)):
            self._check_head(rank, head, message[: head.nbytes].view(np.int64))
            table = message[head.nbytes : head.nbytes + rows.nbytes].view(np.float64).reshape(most, ROW)
            all_parts += [Part._make(row) for row in table[: len(self._blocks[rank])].tolist()]
            kept = message[head.nbytes + rows.nbytes :].reshape(most_nodes, self._count)
            all_masks += [row.tobytes() for row in kept[: len(self._nodes[rank])]]
        return all_parts, all_masks

    def total(
        self, sums: Sequence[Sequence[Any]], masks: Sequence[Mask], blank: Callable[[int], Any], owned: Sequence[int]
    ) -> list[Any]:
        """Add the sums of all hosts, in the fold's order.

        Parameters
        ----------
        sums : sequence of vectors
            One per node of this host; tensors, or numpy arrays.
        masks : sequence of bytes
            For every node of all hosts, which entries it has.
        blank : callable
            An array shaped as a parameter's gradient.
        owned : sequence of int
            The parameters to add up; the same on all hosts.
        """
        there = [index for index in owned if any(mask[index] for mask in masks)]
        like = {index: tensor_of(blank(index)) for index in there}
        total: list[Any] = [None] * self._count
        for dtype in dict.fromkeys(tensor.dtype for tensor in like.values()):
            chosen = [index for index in there if like[index].dtype == dtype]
            flat, places = self._summed(sums, masks, chosen, like, dtype)
            for index, place in places.items():
                tensor = flat.as_strided(like[index].shape, like[index].stride(), place)
                total[index] = array_of(tensor, blank(index))
        return total

    def spread(self, pieces: Sequence[Sequence[memoryview]]) -> None:
        """Fill in what other hosts left: ``pieces[replica]`` is memory of one size for every replica."""
        sizes = [len(piece) for piece in pieces[0]]
        whole = sum(sizes)
        most = max(map(len, self._blocks))
        mine = self._room("mine", most * whole, torch.uint8)
        for number, replica in enumerate(self._blocks[self._rank]):
            content = b"".join(pieces[replica])
            mine[number * whole : (number + 1) * whole] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        found = self._room("left", len(self._blocks) * most * whole, torch.uint8)
        self._call(GATHER, found, mine)
        received = memoryview(found.numpy())
        for rank, block in enumerate(self._blocks):
            for number, replica in enumerate(block if rank != self._rank else ()):
                at = (rank * most + number) * whole
                for piece, size in zip(pieces[replica], sizes, strict=True):
                    piece[:] = received[at : at + size]
                    at += size

    def _summed(
        self,
        sums: Sequence[Sequence[Any]],
        masks: Sequence[Mask],
        chosen: list[int],
        like: dict[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, dict[int, int]]:
        """The sums of parameters of one dtype, one after another, and where each begins."""
        hosts, places, size = len(self._blocks), dict[int, int](), 0
        for index in chosen:
            places[index] = size
            size += like[index].numel()
        slice_size = -(-size // hosts)
        packed = self._room(("packed", dtype), len(sums) * hosts * slice_size, dtype).view(len(sums), -1)
        for row, vector in zip(packed, sums, strict=True):
            for index in chosen:
                if vector[index] is not None:
                    view = row.as_strided(like[index].shape, like[index].stride(), row.storage_offset() + places[index])
                    view.copy_(tensor_of(vector[index]))
        sliced = packed.view(len(sums), hosts, slice_size).transpose(0, 1)
        counts = [len(nodes) for nodes in self._nodes]
        received = self._room(("received", dtype), sum(counts) * slice_size, dtype)
        width = slice_size * dtype.itemsize
        self._call(
            dist.all_to_all_single, received.view(torch.uint8), sliced.contiguous().view(-1).view(torch.uint8),
            [count * width for count in counts], [len(sums) * width] * hosts,
        )  # fmt: skip
        mine = self._fold(received.view(-1, slice_size), masks, places, like, size)
        flat = self._room(("flat", dtype), hosts * slice_size, dtype)
        self._call(GATHER, flat.view(torch.uint8), mine.view(torch.uint8))
        return flat, places

    def _fold(
        self,
        rows: torch.Tensor,
        masks: Sequence[Mask],
        places: dict[int, int],
        like: dict[int, torch.Tensor],
        size: int,
    ) -> torch.Tensor:
        """Add this host's slice of all partial sums; stretches with equal masks at once."""
        width = rows.shape[1]
        first, last = self._rank * width, min((self._rank + 1) * width, size)
        nodes = [node for found in self._nodes for node in found]
        result = rows[0]
        for there, start, end in _stretches(masks, places, like):
            start, end = max(start, first) - first, min(end, last) - first
            if start < end:
                parts = [row[start:end] for row in rows]
                for into, other in added(self._replicas, nodes, there):
                    parts[into].add_(parts[other])
                if there[0] != 0:
                    result[start:end] = parts[there[0]]
        return result

    def _check_head(self, rank: int, mine: np.ndarray, theirs: np.ndarray) -> None:
        for name, ours, other in zip(HEADER, mine.tolist(), theirs.tolist(), strict=True):
            if ours != other:
                raise SeveredError(
                    f"host {rank} differs from host {self._rank} in its {name}: {other} there, {ours} here; nothing was "
                    "updated since. Memory or a library differs between them: compare them, and run again",
                    step=int(mine[1]),
                )

    def _room(self, name: Any, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that is used again in every step."""
        room = self._rooms.get(name)
        if room is None or len(room) != size:
            room = self._rooms[name] = torch.zeros(size, dtype=dtype)
        return room

    def _call(self, operation: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """What torch.distributed raises means that somebody is gone; then the connections are closed, for all to see."""
        try:
            operation(*arguments, **options)
        except Exception as error:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise SeveredError(f"another host cannot be reached: {_short(error)}") from error


def _short(error: Exception) -> str:
    """What torch says, without where in its source, and without advice."""
    return re.sub(r"\[[^\]]*\.cc:\d+\] ?", "", str(error)).partition(". This is typically")[0].strip()


def tensor_of(array: Any) -> torch.Tensor:
    """A tensor over the memory of an array."""
    if isinstance(array, torch.Tensor):
        return array
    plain = np.asarray(array)
    if plain.dtype.name == "bfloat16":  # which torch does not know by numpy's name
        return _over(plain.view(np.uint16)).view(torch.bfloat16)
    return _over(plain)


def array_of(tensor: torch.Tensor, like: Any) -> Any:
    """A tensor as what ``like`` is, over the same memory."""
    if isinstance(like, torch.Tensor):
        return tensor
    if like.dtype.name == "bfloat16":
        return tensor.view(torch.uint16).numpy().view(like.dtype)
    return tensor.numpy()


def _over(array: np.ndarray) -> torch.Tensor:
    """Arrays of jax cannot be written, which torch warns of: those are copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _stretches(
    masks: Sequence[Mask], places: dict[int, int], like: dict[int, torch.Tensor]
) -> list[tuple[tuple[int, ...], int, int]]:
    """(positions of the nodes that have it, begin, end) of stretches of parameters with equal masks."""
    found: list[tuple[tuple[int, ...], int, int]] = []
    for index, place in places.items():
        there = tuple(position for position, mask in enumerate(masks) if mask[index])
        end = place + like[index].numel()
        if found and found[-1][0] == there:
            found[-1] = (there, found[-1][1], end)
        else:
            found.append((there, place, end))
    return found
