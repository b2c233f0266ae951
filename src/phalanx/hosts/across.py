"""What hosts tell each other in a step: losses and weights of all replicas, sums of gradients, buffers.

Each worker of a host talks to its counterparts on the other hosts, which own the same parameters. A sum over all hosts
takes two rounds: everybody gets its slice of every partial sum, adds them in the fold's order, and sends the result to
all. That is the traffic of a ring, 2 N (H - 1) / H elements per host, where each host has one partial sum.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.contracts import Part
from phalanx.errors import RunError
from phalanx.hosts.slices import Mask, array_of, chunks, stretches, tensor_of
from phalanx.plan.placement import added, remaining

INTERFACE = "GLOO_SOCKET_IFNAME"
CHECK_STEPS = 100  # how often hosts compare the sums of their weights
HEADER = ("run", "step", "weights")
WORD = 8
ROW = len(Part._fields)
GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


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
        store = dist.TCPStore(*meeting.address, is_master=False, timeout=limit)  # pyright: ignore[reportPrivateImportUsage]
        place = c10d.PrefixStore(f"phalanx/{meeting.run}/worker {worker}", store)
        size = len(meeting.blocks)
        with bound(meeting.interface):
            self._call(dist.init_process_group, "gloo", store=place, rank=meeting.rank, world_size=size, timeout=limit)

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
        received = memoryview(found.numpy().data)
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
        pieces = chunks(size, hosts, dtype.itemsize)
        whole = sum(hosts * width for _, width in pieces)
        packed = self._room(("packed", dtype), len(sums) * whole, dtype).view(len(sums), -1)
        for row, vector in zip(packed, sums, strict=True):
            for index in chosen:
                if vector[index] is not None:
                    view = row.as_strided(like[index].shape, like[index].stride(), row.storage_offset() + places[index])
                    view.copy_(tensor_of(vector[index]))
        flat = self._room(("flat", dtype), whole, dtype)
        begun = [self._deal(packed[:, start : start + hosts * width], width) for start, width in pieces]
        gathered: list[Any] = []
        for (start, width), (work, _, rows) in zip(pieces, begun, strict=True):
            self._call(work.wait)
            mine = self._fold(rows, masks, places, like, start)
            into = flat[start : start + hosts * width]
            gathered.append((self._call(GATHER, into.view(torch.uint8), mine.view(torch.uint8), async_op=True), mine))
        for work, _ in gathered:
            self._call(work.wait)
        return flat, places

    def _deal(self, sums: torch.Tensor, width: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Begin to give every host its slice of these sums, and to get ours of all sums: the work, and both."""
        hosts, counts = len(self._blocks), [len(nodes) for nodes in self._nodes]
        sent = sums.reshape(len(sums), hosts, width).transpose(0, 1).reshape(-1)
        received = torch.empty(sum(counts), width, dtype=sums.dtype)
        size = width * sums.dtype.itemsize
        work = self._call(
            dist.all_to_all_single, received.view(-1).view(torch.uint8), sent.view(torch.uint8),
            [count * size for count in counts], [len(sums) * size] * hosts, async_op=True,
        )  # fmt: skip
        return work, sent, received

    def _fold(
        self,
        rows: torch.Tensor,
        masks: Sequence[Mask],
        places: dict[int, int],
        like: dict[int, torch.Tensor],
        start: int,
    ) -> torch.Tensor:
        """Add this host's slice of all partial sums, in a chunk that begins at ``start``; equal masks at once."""
        width = rows.shape[1]
        first = start + self._rank * width
        nodes = [node for found in self._nodes for node in found]
        result = rows[0]
        for there, begin, end in stretches(masks, places, like):
            here = slice(max(begin - first, 0), min(end - first, width))
            if here.start < here.stop:
                parts = [row[here] for row in rows]
                for into, other in added(self._replicas, nodes, there):
                    parts[into].add_(parts[other])
                if there[0] != 0:
                    result[here] = parts[there[0]]
        return result

    def _check_head(self, rank: int, mine: np.ndarray, theirs: np.ndarray) -> None:
        for name, ours, other in zip(HEADER, mine.tolist(), theirs.tolist(), strict=True):
            if ours != other:
                raise SeveredError(
                    f"host {rank} differs from host {self._rank} in its {name}: {other} there, {ours} here; nothing "
                    "was updated since. Memory or a library differs between them: compare them, and run again",
                    step=int(mine[1]),
                )

    def _room(self, name: Any, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that is used again in every step."""
        room = self._rooms.get(name)
        if room is None or len(room) != size:
            room = self._rooms[name] = torch.zeros(size, dtype=dtype)
        return room

    def _call(self, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What torch.distributed raises means that somebody is gone; connections are closed then, for all to see."""
        try:
            return operation(*arguments, **options)
        except Exception as error:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise SeveredError(f"another host cannot be reached: {_short(error)}") from error


@contextlib.contextmanager
def bound(interface: str) -> Iterator[None]:
    """Inside, torch binds to this network interface, unless the caller named one."""
    if INTERFACE in os.environ or not interface:
        yield
        return
    os.environ[INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[INTERFACE]


def _short(error: Exception) -> str:
    """What torch says, without where in its source, and without advice."""
    return re.sub(r"\[[^\]]*\.cc:\d+\] ?", "", str(error)).partition(". This is typically")[0].strip()
