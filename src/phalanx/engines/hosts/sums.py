"""Sums over all hosts: given entry by entry, sent in pieces as soon as these are whole, added in the fold's order.

A sum takes two rounds: everybody gets its slice of every partial sum, adds them up, and sends the result to all. That
is the traffic of a ring, 2 N (H - 1) / H elements per host, where each host has one partial sum. Of two hosts with
one partial sum each, both get the whole of the other's instead: as much traffic, in one round.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from phalanx.engines.hosts.gloo import Gloo
from phalanx.engines.hosts.slices import Mask, Run, array_of, chunks, stretches, tensor_of
from phalanx.plan.fold import Node, added

PATTERNS = 64  # of which gradients are there


class ReceiveBuffers:
    """Memory that is used again in every step."""

    def __init__(self) -> None:
        self._received: dict[Any, torch.Tensor] = {}

    def take(self, name: Any, size: int, dtype: torch.dtype) -> torch.Tensor:
        """So many elements, with any content."""
        room = self._received.get(name)
        if room is None or len(room) != size:
            room = self._received[name] = torch.zeros(size, dtype=dtype)
        return room


class Layout(NamedTuple):
    """How the gradients of one dtype lie in a sum, one after another.

    Attributes
    ----------
    dtype : torch.dtype
    places : dict of int to int
        Where each parameter's gradient begins; those that come first in a backward pass come first.
    runs : list of Run
    pieces : list of (begin, elements of a slice)
        What is sent at once.
    whole : int
        Elements of all pieces.
    """

    dtype: torch.dtype
    places: dict[int, int]
    runs: list[Run]
    pieces: list[tuple[int, int]]
    whole: int


class Piece(NamedTuple):
    """A piece that is on its way.

    Attributes
    ----------
    rows : list of torch.Tensor
        This host's slice of it, of all nodes' partial sums.
    comes, goes : list
        What to wait for before it can be read, and before it can be written.
    """

    rows: list[torch.Tensor]
    comes: list[Any]
    goes: list[Any]


class Sums:
    """One worker's part of the sums, one after another.

    Parameters
    ----------
    gloo : Gloo
    rank : int
    replicas : int
        R.
    nodes : sequence of sequence of (level, index)
        Which nodes of the fold's tree each host adds up.
    blanks : sequence of arrays
        Shaped as the parameters' gradients, with any content; tensors, or numpy arrays.
    owned : sequence of int
        The parameters to add up; the same on all hosts.
    """

    def __init__(
        self,
        gloo: Gloo,
        rank: int,
        replicas: int,
        nodes: Sequence[Sequence[Node]],
        blanks: Sequence[Any],
        owned: Sequence[int],
    ) -> None:
        self._gloo = gloo
        self._rank = rank
        self._replicas = replicas
        self._counts = [len(found) for found in nodes]
        self._others = [other for other in range(len(nodes)) if other != rank]
        self._slices = 1 if self._counts == [1, 1] else len(nodes)  # of a piece; host h adds up the (h % slices)-th
        self._nodes = [node for found in nodes for node in found]
        self._blanks = blanks
        self._like = [tensor_of(blank) for blank in blanks]
        self._owned = owned
        self._received = ReceiveBuffers()
        self._laid_out = functools.lru_cache(PATTERNS)(self._lay_out)
        self._layouts: list[Layout] = []
        self._due: deque[tuple[Layout, int]] = deque()
        self._begun: list[list[Piece]] = []

    @property
    def due(self) -> int | None:
        """The parameter whose gradients are to be given next; None: all of them have been."""
        return self._due[0][1] if self._due else None

    @property
    def under_way(self) -> bool:
        """Whether some of a sum has been sent, and it is not finished."""
        return any(self._begun)

    def begin(self, masks: Sequence[Mask]) -> None:
        """Begin a sum, where these are the gradients that each node of all hosts has; what was begun is forgotten."""
        for piece in (piece for pieces in self._begun for piece in pieces):
            self._gloo.wait(piece.comes + piece.goes)
        self._layouts = self._laid_out(tuple(masks))
        self._due = deque((layout, index) for layout in self._layouts for index in layout.places)
        self._begun = [[] for _ in self._layouts]

    def give(self, parts: Sequence[Sequence[Any]], orders: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Give what is due: for each of this host's nodes the gradients below it, None where there is none.

        They are added as ``orders`` say, (into, from), and stay as they are.
        """
        layout, index = self._due.popleft()
        packed = self._packed(layout)
        like, place = self._like[index], layout.places[index]
        for row, summands, order in zip(packed, parts, orders, strict=True):
            if any(entry is not None for entry in summands):
                view = row.as_strided(like.shape, like.stride(), row.storage_offset() + place)
                _add(view, [None if entry is None else tensor_of(entry) for entry in summands], order)
        given = place + like.numel() if self._due and self._due[0][0] is layout else layout.whole
        begun = self._begun[self._layouts.index(layout)]
        while len(begun) < len(layout.pieces):
            start, width = layout.pieces[len(begun)]
            end = start + self._slices * width
            if end > given:
                break
            begun.append(self._deal(packed[:, start:end], width))

    def finish(self) -> list[Any]:
        """The sum: an entry for each parameter that any node has a gradient of, None for others."""
        total: list[Any] = [None] * len(self._like)
        for layout, begun in zip(self._layouts, self._begun, strict=True):
            flat = self._received.take(("flat", layout.dtype), layout.whole, layout.dtype)
            works: list[Any] = []
            for (start, width), piece in zip(layout.pieces, begun, strict=True):
                self._gloo.wait(piece.comes)
                slices = flat[start : start + self._slices * width].view(self._slices, width)
                mine = self._rank % self._slices
                _fold(slices[mine], piece.rows, layout.runs, start + mine * width)
                works += piece.goes
                for other in self._others if self._slices > 1 else ():
                    works.append(self._gloo.begin_receive(slices[other], other))
                    works.append(self._gloo.begin_send(slices[mine], other))
            self._gloo.wait(works)
            for index, place in layout.places.items():
                like = self._like[index]
                total[index] = array_of(flat.as_strided(like.shape, like.stride(), place), self._blanks[index])
        self._begun = []
        return total

    def _packed(self, layout: Layout) -> torch.Tensor:
        """One row per node of this host."""
        rows = self._counts[self._rank]
        return self._received.take(("packed", layout.dtype), rows * layout.whole, layout.dtype).view(rows, layout.whole)

    def _deal(self, sums: torch.Tensor, width: int) -> Piece:
        """Begin to give every other host its slice of these sums, and to get ours of theirs."""
        slices = sums.view(len(sums), self._slices, width)
        rows = [list(slices[:, self._rank % self._slices])] * len(self._counts)
        comes, goes = [], []
        for other in self._others:
            received = torch.empty(self._counts[other], width, dtype=sums.dtype)
            rows[other] = list(received)
            comes.append(self._gloo.begin_receive(received, other))
            goes.append(self._gloo.begin_send(slices[:, other % self._slices].contiguous(), other))
        return Piece([row for found in rows for row in found], comes, goes)

    def _lay_out(self, masks: tuple[Mask, ...]) -> list[Layout]:
        there = [index for index in reversed(self._owned) if any(mask[index] for mask in masks)]
        layouts: list[Layout] = []
        for dtype in dict.fromkeys(self._like[index].dtype for index in there):
            places, size = dict[int, int](), 0
            for index in there:
                if self._like[index].dtype == dtype:
                    places[index] = size
                    size += self._like[index].numel()
            runs = [
                Run(begin, end, present, added(self._replicas, self._nodes, present))
                for present, begin, end in stretches(masks, places, self._like)
            ]
            pieces = chunks(size, self._slices, dtype.itemsize)
            whole = sum(self._slices * width for _, width in pieces)
            layouts.append(Layout(dtype, places, runs, pieces, whole))
        return layouts


def _add(target: torch.Tensor, parts: list[torch.Tensor | None], order: Sequence[tuple[int, int]]) -> None:
    """Add these up into ``target``."""
    if not order:
        target.copy_(next(part for part in parts if part is not None))
        return
    *before, (into, source) = order
    for left, right in before:
        parts[left] = torch.add(parts[left], parts[right])  # type: ignore[arg-type]
    torch.add(parts[into], parts[source], out=target)  # type: ignore[arg-type]


def _fold(target: torch.Tensor, rows: Sequence[torch.Tensor], runs: Sequence[Run], first: int) -> None:
    """A slice of all partial sums, which begins at ``first``, added up; parameters with equal masks at once."""
    for begin, end, present, additions in runs:
        here = slice(max(begin - first, 0), min(end - first, len(target)))
        if here.start < here.stop:
            parts = [row[here] if position in present else None for position, row in enumerate(rows)]
            _add(target[here], parts, additions)
