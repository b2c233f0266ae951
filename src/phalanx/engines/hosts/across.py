"""What hosts give each other in a step: losses and weights of all replicas, buffers, and sums of gradients.

Each worker of a host talks to its counterparts on the other hosts, which own the same parameters. A sum takes two
rounds: each host gets its slice of every partial sum, adds them up in the fold's order, and sends the result to all.
That is the traffic of a ring, 2 N (H - 1) / H elements per host, where each host has one partial sum. Two hosts with
one partial sum each exchange the whole sums instead: as much traffic, in one round.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from phalanx.engines.hosts.gloo import Gloo, Rendezvous
from phalanx.engines.processes.board import CHECK_STEPS
from phalanx.engines.stretches import PATTERNS, Mask, Stretch, add, fold_stretches, scratch, stretches
from phalanx.errors import CorruptionError, RunError
from phalanx.plan.fold import Node, added, remaining
from phalanx.seams.records import Part, packed

HEADER = ("run", "step", "weights", "norm")
UNKNOWN = 0  # the norm of a step that a worker has not done, or does again
ROW, NAMED = len(Part._fields), operator.attrgetter("named")
LEAST, MOST = 128 << 10, 1 << 20  # bytes of a slice of a piece
PIECES = 8  # of a sum of medium size: the first travel while others are packed, at a cost per piece
Piece = tuple[list[torch.Tensor], list[Any], list[Any]]  # this host's slice of all sums, what comes, what goes
Decoded = tuple[list[Part], list[Mask], list[bytes]]  # by replica, by node, by replica
Summands = tuple[Sequence[Any], Sequence[tuple[int, int]]]  # None where there is none; what is added, as (into, from)


class FlatLayout(NamedTuple):
    """How the gradients of one dtype lie in a sum, one after another.

    Attributes
    ----------
    dtype : torch.dtype
    places : dict of int to int
        Where each parameter's gradient begins.
    stretches : list of Stretch
    pieces : list of (begin, elements of a slice)
        What is sent at once.
    whole : int
        Elements of all pieces.
    """

    dtype: torch.dtype
    places: dict[int, int]
    stretches: list[Stretch]
    pieces: list[tuple[int, int]]
    whole: int


class Across:
    """One worker's connection to its counterparts.

    Parameters
    ----------
    rendezvous : Rendezvous
    worker : int
    replicas : int
        R.
    blanks : sequence of arrays
        Shaped as the parameters' gradients, with any content; tensors, or numpy arrays.
    owned : sequence of int
        The parameters that this worker and its counterparts own, and add up.
    check : callable
        Raises if there is nothing to wait for any more.

    Attributes
    ----------
    nodes : list of (level, index)
        The nodes of the fold's tree that this host adds up.
    """

    def __init__(
        self, rendezvous: Rendezvous, worker: int, replicas: int, blanks: Sequence[Any], owned: Sequence[int],
        check: Callable[[], object] = bool,
    ) -> None:  # fmt: skip
        self._run = rendezvous.run
        self._rank = rendezvous.rank
        self._blocks = rendezvous.blocks
        nodes = [remaining(replicas, block) for block in rendezvous.blocks]
        self.nodes = nodes[self._rank]
        self._counts = [len(host_nodes) for host_nodes in nodes]
        self._others = [other for other in range(len(nodes)) if other != self._rank]
        self._slices = 1 if self._counts == [1, 1] else len(nodes)  # of a piece; host h adds up the (h % slices)-th
        self._blanks = blanks
        self._like = [tensor_of(blank) for blank in blanks]
        self._owned = owned
        every = [node for host_nodes in nodes for node in host_nodes]
        self._laid_out = functools.lru_cache(PATTERNS)(functools.partial(self._lay_out, replicas, every))
        self._rooms: dict[Any, torch.Tensor] = {}
        facts = rendezvous.rank, len(rendezvous.blocks), rendezvous.seconds, rendezvous.interface
        self._gloo = Gloo(rendezvous.store(f"worker {worker}"), *facts, check)

    def tell(
        self, compared: tuple[int, int, int], parts: Sequence[Part], masks: Sequence[Mask], notes: Sequence[bytes]
    ) -> Decoded:
        """Send this host's parts, which gradients each of its nodes has, and notes; returns those of all hosts.

        Parameters
        ----------
        compared : tuple of int
            The step; every CHECK_STEPS steps a checksum of what this worker owns; the bits of the norm one step before,
            or UNKNOWN.
        parts : sequence of Part
            One per replica of this host.
        masks : sequence of bytes
            One per node of this host.
        notes : sequence of bytes
            One per replica, all of one length.
        """
        most, most_nodes = max(map(len, self._blocks)), max(self._counts)
        head = np.array([self._run, *compared], np.int64)
        rows = np.zeros((most, ROW))
        named = [packed(part.named) if part.named else b"" for part in parts]
        if any(named):
            parts = [part._replace(named=len(text)) for part, text in zip(parts, named, strict=True)]
        rows[: len(parts)] = parts
        flags = np.zeros((most_nodes, len(self._blanks)), np.uint8)
        for row, mask in zip(flags, masks, strict=False):
            row[:] = np.frombuffer(mask, np.uint8)
        texts = np.zeros((most, len(notes[0])), np.uint8)
        for row, note in zip(texts, notes, strict=False):
            row[:] = np.frombuffer(note, np.uint8)
        pieces = head, rows, flags, texts
        mine = torch.from_numpy(np.concatenate([piece.view(np.uint8).reshape(-1) for piece in pieces]))
        messages = scratch(self._rooms, "parts", len(self._blocks) * len(mine), torch.uint8)
        self._gloo.gather(messages, mine)
        decoded = self._decoded(pieces, messages)
        if any(map(NAMED, decoded[0])):
            self._spread_named(decoded[0], named)
        return decoded

    def _spread_named(self, parts: list[Part], mine: Sequence[bytes]) -> None:
        """Put named losses into the parts of all replicas; ``mine``: the texts of this host's."""
        texts = [memoryview(bytearray(int(part.named))) for part in parts]
        for replica, text in zip(self._blocks[self._rank], mine, strict=True):
            texts[replica][:] = text
        self.spread([[text] for text in texts])
        parts[:] = [
            part._replace(named=json.loads(bytes(text)) if text else 0.0)
            for part, text in zip(parts, texts, strict=True)
        ]

    def spread(self, pieces: Sequence[Sequence[memoryview]]) -> None:
        """Fill in ``pieces[replica]``, the memory of other hosts' replicas; its lengths are the same on all hosts."""
        lengths = [sum(len(piece) for replica in block for piece in pieces[replica]) for block in self._blocks]
        most = max(lengths)
        if not most:
            return
        content = b"".join(piece for replica in self._blocks[self._rank] for piece in pieces[replica])
        mine = scratch(self._rooms, "mine", most, torch.uint8)
        mine.numpy()[: len(content)] = np.frombuffer(content, np.uint8)
        contents = scratch(self._rooms, "left", len(self._blocks) * most, torch.uint8)
        self._gloo.gather(contents, mine)
        received = memoryview(contents.numpy().data)
        for rank, block in enumerate(self._blocks):
            at = rank * most
            for piece in (piece for replica in block if rank != self._rank for piece in pieces[replica]):
                piece[:] = received[at : at + len(piece)]
                at += len(piece)

    def total(self, masks: Sequence[Mask], summands: Callable[[int], Sequence[Summands]]) -> list[Any]:
        """The sum over all hosts: an entry for each owned parameter that any node has a gradient of, None for others.

        Parameters
        ----------
        masks : sequence of bytes
            Which gradients each node of all hosts has.
        summands : callable
            ``summands(parameter)``: for each of this host's nodes the gradients below it, which stay as they are.
        """
        layouts = self._laid_out(tuple(masks))
        begun = [self._dealt(layout, summands) for layout in layouts]
        total: list[Any] = [None] * len(self._like)
        for layout, pieces in zip(layouts, begun, strict=True):
            flat = self._added_up(layout, pieces)
            for index, offset in layout.places.items():
                like = self._like[index]
                total[index] = array_of(flat.as_strided(like.shape, like.stride(), offset), self._blanks[index])
        return total

    def _decoded(self, mine: Sequence[np.ndarray], messages: torch.Tensor) -> Decoded:
        """Decode the messages of all hosts; ``mine`` is what this host sent."""
        decoded: Decoded = [], [], []
        cuts = np.cumsum([piece.nbytes for piece in mine])[:-1]
        for rank, message in enumerate(messages.numpy().reshape(len(self._blocks), -1)):
            head, rows, flags, texts = (
                part.view(piece.dtype).reshape(piece.shape)
                for part, piece in zip(np.split(message, cuts), mine, strict=True)
            )
            self._check_head(rank, mine[0], head)
            count = len(self._blocks[rank])
            decoded[0].extend(Part._make(row) for row in rows[:count].tolist())
            decoded[1].extend(row.tobytes() for row in flags[: self._counts[rank]])
            decoded[2].extend(row.tobytes() for row in texts[:count])
        return decoded

    def _check_head(self, rank: int, mine: np.ndarray, theirs: np.ndarray) -> None:
        for name, ours, other in zip(HEADER, mine.tolist(), theirs.tolist(), strict=True):
            if ours != other and not (name == "norm" and UNKNOWN in (ours, other)):
                message = f"process {rank} differs from process {self._rank} in its {name}: {other} there, {ours} here"
                if name == "norm":
                    message += (
                        " (bits of the gradient's norm one step before): a device or a library computes or copies "
                        "wrongly in one of them. Go on without it, from the newest snapshot up to which phalanx verify "
                        "finds the same"
                    )
                elif name == "weights":
                    message += (
                        f" (checksums, compared every {CHECK_STEPS} steps): memory or a library differs between them, "
                        "and the weights of one are wrong. Compare them, and go on from an earlier snapshot"
                    )
                else:
                    message += "; they do not do the same run: start all of them again"
                self._gloo.close()
                raise (CorruptionError if name in ("weights", "norm") else RunError)(message, step=int(mine[1]))

    def _dealt(self, layout: FlatLayout, summands: Callable[[int], Sequence[Summands]]) -> list[Piece]:
        """Pack this host's partial sums, a row per node, and send each piece as soon as it is whole."""
        rows, begun = self._counts[self._rank], list[Piece]()
        packed = scratch(self._rooms, ("packed", layout.dtype), rows * layout.whole, layout.dtype)
        packed = packed.view(rows, layout.whole)
        ends = [start + self._slices * width for start, width in layout.pieces]
        last = next(reversed(layout.places))
        for index, offset in layout.places.items():
            like = self._like[index]
            for row, (entries, order) in zip(packed, summands(index), strict=True):
                if any(entry is not None for entry in entries):
                    view = row.as_strided(like.shape, like.stride(), row.storage_offset() + offset)
                    add(view, [None if entry is None else tensor_of(entry) for entry in entries], order)
            given = layout.whole if index == last else offset + like.numel()
            while len(begun) < len(ends) and ends[len(begun)] <= given:
                start, width = layout.pieces[len(begun)]
                begun.append(self._deal(packed[:, start : start + self._slices * width], width))
        return begun

    def _deal(self, sums: torch.Tensor, width: int) -> Piece:
        """Begin to send every other host its slice of these sums, and to receive this host's slice of theirs."""
        slices = sums.view(len(sums), self._slices, width)
        rows = [list(slices[:, self._rank % self._slices])] * len(self._counts)
        comes, goes = [], []
        for other in self._others:
            received = torch.empty(self._counts[other], width, dtype=sums.dtype)
            rows[other] = list(received)
            comes.append(self._gloo.begin_receive(received, other))
            goes.append(self._gloo.begin_send(slices[:, other % self._slices].contiguous(), other))
        return [row for host_rows in rows for row in host_rows], comes, goes

    def _added_up(self, layout: FlatLayout, pieces: Sequence[Piece]) -> torch.Tensor:
        """The sum of one dtype: of each piece this host adds up its slice, and the others send theirs."""
        flat, works = scratch(self._rooms, ("flat", layout.dtype), layout.whole, layout.dtype), list[Any]()
        for (start, width), (rows, comes, goes) in zip(layout.pieces, pieces, strict=True):
            self._gloo.wait(comes)
            slices = flat[start : start + self._slices * width].view(self._slices, width)
            mine = self._rank % self._slices
            fold_stretches(slices[mine], rows, layout.stretches, start + mine * width)
            works += goes
            for other in self._others if self._slices > 1 else ():
                works.append(self._gloo.begin_receive(slices[other], other))
                works.append(self._gloo.begin_send(slices[mine], other))
        self._gloo.wait(works)
        return flat

    def _lay_out(self, replicas: int, nodes: Sequence[Node], masks: tuple[Mask, ...]) -> list[FlatLayout]:
        there = [index for index in self._owned if any(mask[index] for mask in masks)]
        layouts: list[FlatLayout] = []
        for dtype in dict.fromkeys(self._like[index].dtype for index in there):
            places, size = dict[int, int](), 0
            for index in there:
                if self._like[index].dtype == dtype:
                    places[index] = size
                    size += self._like[index].numel()
            all_stretches = [
                Stretch(begin, end, present, added(replicas, nodes, present))
                for present, begin, end in stretches(masks, places, self._like)
            ]
            pieces = chunks(size, self._slices, dtype.itemsize)
            whole = sum(self._slices * width for _, width in pieces)
            layouts.append(FlatLayout(dtype, places, all_stretches, pieces, whole))
        return layouts


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
