"""How sums are cut into pieces that travel, and arrays of any framework as tensors over the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

LEAST, MOST = 128 << 10, 1 << 20  # bytes of a slice of what travels together
PIECES = 8  # of a sum of medium size: the first travel while the last are computed, at a cost per piece
Mask = bytes  # one byte per parameter: whether it has a gradient


def chunks(size: int, slices: int, itemsize: int) -> list[tuple[int, int]]:
    """(begin, elements of a slice) of pieces that travel one behind the other: some arrive while others are sent."""
    most = max(1, min(MOST, max(LEAST, size * itemsize // PIECES // slices)) // itemsize)
    found: list[tuple[int, int]] = []
    start = 0
    while start < size:
        width = min(most, -(-(size - start) // slices))
        found.append((start, width))
        start += slices * width
    return found


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


class Run(NamedTuple):
    """A stretch of a sum: where it begins and ends, the nodes that have it, and their additions in order."""

    begin: int
    end: int
    nodes: tuple[int, ...]
    additions: Sequence[tuple[int, int]]


def stretches(
    masks: Sequence[Mask], places: dict[int, int], like: Sequence[torch.Tensor]
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
