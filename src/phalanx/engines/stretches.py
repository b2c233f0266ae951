"""Partial sums of many parameters in one row: where they lie, and how stretches of them are added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Mask = bytes  # one byte per parameter: whether it has a gradient
PATTERNS = 64  # cached sets of present gradients


class Stretch(NamedTuple):
    """A stretch of a sum: where it begins and ends, the nodes that have it, and their additions in order."""

    begin: int
    end: int
    nodes: tuple[int, ...]
    additions: Sequence[tuple[int, int]]


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
    target: torch.Tensor, rows: Sequence[torch.Tensor], stretches: Sequence[Stretch], first: int, *, spare: bool = False
) -> None:
    """A slice of all partial sums, which begins at ``first``, added up; parameters with equal masks at once.

    ``spare``: the rows may be written.
    """
    for begin, end, present, additions in stretches:
        here = slice(max(begin - first, 0), min(end - first, len(target)))
        if here.start < here.stop:
            parts = [row[here] if position in present else None for position, row in enumerate(rows)]
            add(target[here], parts, additions, spare=spare)
