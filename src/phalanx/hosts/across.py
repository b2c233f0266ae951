"""What hosts tell each other in a step: losses and weights of all replicas, sums of gradients, buffers.

Each worker of a host talks to its counterparts on the other hosts, which own the same parameters. A sum over all hosts
takes two rounds: everybody gets its slice of every partial sum, adds them in the fold's order, and sends the result to
all. That is the traffic of a ring, 2 N (H - 1) / H elements per host, where each host has one partial sum.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.distributed_c10d import PrefixStore

from phalanx.contracts import Part
from phalanx.hosts.gloo import TCP, Gloo, SeveredError
from phalanx.hosts.slices import Mask, Run, array_of, chunks, stretches, tensor_of
from phalanx.plan.placement import added, remaining

CHECK_STEPS = 100  # how often hosts compare the sums of their weights
HEADER = ("run", "step", "weights")
WORD = 8
ROW = len(Part._fields)
PATTERNS = 64  # of which gradients are there


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
        This process's place among ``blocks``.
    blocks : tuple of range
        The replicas of each process.
    seconds : float
        How long to wait for another one.
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
    replicas : int
        R.
    blanks : sequence of arrays
        Shaped as the parameters' gradients, with any content; tensors, or numpy arrays.
    """

    def __init__(self, meeting: Meeting, worker: int, replicas: int, blanks: Sequence[Any]) -> None:
        self._run = meeting.run
        self._rank = meeting.rank
        self._blocks = meeting.blocks
        self._replicas = replicas
        self._blanks = blanks
        self._like = [tensor_of(blank) for blank in blanks]
        self._nodes = [remaining(replicas, block) for block in meeting.blocks]
        self._rooms: dict[Any, torch.Tensor] = {}
        self._runs = functools.lru_cache(PATTERNS)(self._runs_of)
        limit = datetime.timedelta(seconds=meeting.seconds)
        store = TCP(*meeting.address, is_master=False, timeout=limit)
        place = PrefixStore(f"phalanx/{meeting.run}/worker {worker}", store)
        self._gloo = Gloo(place, meeting.rank, len(meeting.blocks), meeting.seconds, meeting.interface)

    @property
    def nodes(self) -> list[tuple[int, int]]:
        """The nodes of the fold's tree that this host adds up."""
        return self._nodes[self._rank]

    def exchange(
        self, step: int, weights: int, parts: Sequence[Part], masks: Sequence[Mask], notes: Sequence[bytes]
    ) -> tuple[list[Part], list[Mask], list[bytes]]:
        """Give this host's parts, which gradients each of its nodes has, and notes; get everybody's, in replica order.

        Parameters
        ----------
        step : int
        weights : int
            A checksum of what this worker owns, compared every CHECK_STEPS steps.
        parts : sequence of Part
            One per replica of this host.
        masks : sequence of bytes
            One per node of this host.
        notes : sequence of bytes
            One per replica, all of one length.
        """
        hosts, most, most_nodes = len(self._blocks), max(map(len, self._blocks)), max(map(len, self._nodes))
        head = np.array([self._run, step, weights if step % CHECK_STEPS == 0 else 0], np.int64)
        rows = np.zeros((most, ROW))
        rows[: len(parts)] = parts
        flags = np.zeros((most_nodes, len(self._like)), np.uint8)
        for row, mask in zip(flags, masks, strict=False):
            row[:] = np.frombuffer(mask, np.uint8)
        texts = np.zeros((most, len(notes[0])), np.uint8)
        for row, note in zip(texts, notes, strict=False):
            row[:] = np.frombuffer(note, np.uint8)
        pieces = [piece.view(np.uint8).reshape(-1) for piece in (head, rows, flags, texts)]
        mine = torch.from_numpy(np.concatenate(pieces))
        found = self._room("parts", hosts * len(mine), torch.uint8)
        self._gloo.gather(found, mine)
        told: tuple[list[Part], list[Mask], list[bytes]] = [], [], []
        cuts = np.cumsum([len(piece) for piece in pieces])[:-1]
        for rank, message in enumerate(found.numpy().reshape(hosts, -1)):
            its_head, its_rows, its_flags, its_texts = np.split(message, cuts)
            self._check_head(rank, head, its_head.view(np.int64))
            count = len(self._blocks[rank])
            told[0].extend(Part._make(row) for row in its_rows.view(np.float64).reshape(most, ROW)[:count].tolist())
            told[1].extend(row.tobytes() for row in its_flags.reshape(flags.shape)[: len(self._nodes[rank])])
            told[2].extend(row.tobytes() for row in its_texts.reshape(texts.shape)[:count])
        return told

    def total(self, sums: Sequence[Sequence[Any]], masks: Sequence[Mask], owned: Sequence[int]) -> list[Any]:
        """Add the sums of all hosts, in the fold's order.

        Parameters
        ----------
        sums : sequence of vectors
            One per node of this host; tensors, or numpy arrays.
        masks : sequence of bytes
            For every node of all hosts, which entries it has.
        owned : sequence of int
            The parameters to add up; the same on all hosts.
        """
        there = [index for index in owned if any(mask[index] for mask in masks)]
        total: list[Any] = [None] * len(self._like)
        for dtype in dict.fromkeys(self._like[index].dtype for index in there):
            chosen = tuple(index for index in there if self._like[index].dtype == dtype)
            flat, places = self._summed(sums, tuple(masks), chosen, dtype)
            for index, place in places.items():
                like = self._like[index]
                total[index] = array_of(flat.as_strided(like.shape, like.stride(), place), self._blanks[index])
        return total

    def spread(self, pieces: Sequence[Sequence[memoryview]]) -> None:
        """Fill in what other hosts left: ``pieces[replica]``, some memory for each, as long everywhere."""
        lengths = [sum(len(piece) for replica in block for piece in pieces[replica]) for block in self._blocks]
        most = max(lengths)
        if not most:
            return
        content = b"".join(piece for replica in self._blocks[self._rank] for piece in pieces[replica])
        mine = self._room("mine", most, torch.uint8)
        mine.numpy()[: len(content)] = np.frombuffer(content, np.uint8)
        found = self._room("left", len(self._blocks) * most, torch.uint8)
        self._gloo.gather(found, mine)
        received = memoryview(found.numpy().data)
        for rank, block in enumerate(self._blocks):
            at = rank * most
            for piece in (piece for replica in block if rank != self._rank for piece in pieces[replica]):
                piece[:] = received[at : at + len(piece)]
                at += len(piece)

    def _summed(
        self, sums: Sequence[Sequence[Any]], masks: tuple[Mask, ...], chosen: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[torch.Tensor, dict[int, int]]:
        """The sums of parameters of one dtype, one after another, and where each begins."""
        hosts, (runs, places, size) = len(self._blocks), self._runs(masks, chosen)
        pieces = chunks(size, hosts, dtype.itemsize)
        whole = sum(hosts * width for _, width in pieces)
        packed = self._room(("packed", dtype), len(sums) * whole, dtype).view(len(sums), -1)
        for row, vector in zip(packed, sums, strict=True):
            for index in chosen:
                if vector[index] is not None:
                    like = self._like[index]
                    view = row.as_strided(like.shape, like.stride(), row.storage_offset() + places[index])
                    view.copy_(tensor_of(vector[index]))
        flat = self._room(("flat", dtype), whole, dtype)
        begun = [self._deal(packed[:, start : start + hosts * width], width) for start, width in pieces]
        gathered: list[Any] = []
        for (start, width), (work, _, rows) in zip(pieces, begun, strict=True):
            self._gloo.wait(work)
            mine = _folded(rows, runs, start + self._rank * width)
            gathered.append((self._gloo.begin_gather(flat[start : start + hosts * width], mine), mine))
        for work, _ in gathered:
            self._gloo.wait(work)
        return flat, places

    def _deal(self, sums: torch.Tensor, width: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Begin to give every host its slice of these sums, and to get ours of all sums: the work, and both."""
        hosts, counts = len(self._blocks), [len(nodes) for nodes in self._nodes]
        sent = sums.reshape(len(sums), hosts, width).transpose(0, 1).reshape(-1)
        received = torch.empty(sum(counts), width, dtype=sums.dtype)
        size = width * sums.dtype.itemsize
        went = [len(sums) * size] * hosts
        work = self._gloo.begin_exchange(received.view(-1), sent, [count * size for count in counts], went)
        return work, sent, received

    def _runs_of(self, masks: tuple[Mask, ...], chosen: tuple[int, ...]) -> tuple[list[Run], dict[int, int], int]:
        """Stretches of parameters with equal masks and how each is added, where each parameter begins, and the end."""
        places, size = dict[int, int](), 0
        for index in chosen:
            places[index] = size
            size += self._like[index].numel()
        nodes = [node for found in self._nodes for node in found]
        runs = [
            Run(begin, end, there[0], added(self._replicas, nodes, there))
            for there, begin, end in stretches(masks, places, self._like)
        ]
        return runs, places, size

    def _check_head(self, rank: int, mine: np.ndarray, theirs: np.ndarray) -> None:
        for name, ours, other in zip(HEADER, mine.tolist(), theirs.tolist(), strict=True):
            if ours != other:
                told = f"process {rank} differs from process {self._rank} in its {name}: {other} there, {ours} here"
                if name == "weights":
                    told += (
                        f" (checksums, compared every {CHECK_STEPS} steps): memory or a library differs between them, "
                        "and the weights of one are wrong. Compare them, and go on from an earlier snapshot"
                    )
                else:
                    told += "; they do not do the same run: start all of them again"
                self._gloo.close()
                raise SeveredError(told, step=int(mine[1]))

    def _room(self, name: Any, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that is used again in every step."""
        room = self._rooms.get(name)
        if room is None or len(room) != size:
            room = self._rooms[name] = torch.zeros(size, dtype=dtype)
        return room


def _folded(rows: torch.Tensor, runs: Sequence[Run], first: int) -> torch.Tensor:
    """A slice of all partial sums, which begins at ``first``, added up; parameters with equal masks at once."""
    result, width = rows[0], rows.shape[1]
    for begin, end, into_first, additions in runs:
        here = slice(max(begin - first, 0), min(end - first, width))
        if here.start < here.stop:
            for into, other in additions:
                rows[into, here].add_(rows[other, here])
            if into_first:
                result[here] = rows[into_first, here]
    return result
