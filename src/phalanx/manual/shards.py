"""Batches cut into shards: any structure of arrays, cut along the first axis as ``numpy.array_split`` does."""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

import numpy as np
import torch

from phalanx.definition import checks
from phalanx.definition.data import is_array, leaves, map_tree
from phalanx.errors import UsageError
from phalanx.plan.shares import share_bounds


def shard_batch(batch: Any, n: int) -> list[Any]:
    """Cut a batch into ``n`` shards along the first axis, as ``numpy.array_split`` does.

    Parameters
    ----------
    batch : tensor, numpy array, tuple, list, dict, or any structure of them
        Tuples, dicts, and lists that hold an array are structures; any other list is cut itself, item by item.
    n : int
        How many shards, at least 1.

    Returns
    -------
    list
        ``n`` structures like the batch, named tuples included. The first ones are larger by a sample where ``n`` does
        not divide the samples; with fewer samples than shards the last are empty. Arrays are copies, each in memory of
        its own: where a row lies there changes bits of matrix products.

    Raises
    ------
    UsageError
        Parts of the batch differ in length, or cannot be cut.
    """
    count = checks.integer("n", n, least=1)
    bounds = share_bounds(samples_in(batch), count)
    return [map_tree(functools.partial(_rows, start=start, end=end), batch, is_samples) for start, end in bounds]


def samples_in(batch: Any) -> int:
    """Length of the first axis, equal for everything in the batch."""
    lengths = [(path, _length(path, column)) for path, column in leaves(batch, "batch", is_samples)]
    if not lengths:
        raise UsageError(f"batch is an empty {type(batch).__name__}; it needs at least one array")
    name, samples = lengths[0]
    for other, length in lengths:
        if length != samples:
            raise UsageError(f"{name} has {samples} samples and {other} has {length}; cut them to the same number")
    return samples


def is_samples(value: Any) -> TypeGuard[list[Any]]:
    """Whether it is a list of samples, not a structure of arrays."""
    return isinstance(value, list) and not any(map(is_array, value))


def tensors_in(batch: Any) -> Any:
    """The batch with its numpy arrays copied into tensors; lists of samples stay as they are."""
    return map_tree(_tensor, batch, is_samples)


def _tensor(column: Any) -> Any:
    if not isinstance(column, np.ndarray):
        return column
    try:
        return torch.tensor(np.ascontiguousarray(column))
    except (TypeError, ValueError) as error:
        raise UsageError(f"batch holds an array of {column.dtype}, which no tensor can hold: {error}") from error


def _rows(column: Any, start: int, end: int) -> Any:
    if is_samples(column):
        return column[start:end]
    if isinstance(column, torch.Tensor):
        return column[torch.arange(start, end, device=column.device)]
    return column[np.arange(start, end)]


def _length(path: str, column: Any) -> int:
    if is_samples(column):
        return len(column)
    if is_array(column) and len(column.shape):
        return int(column.shape[0])
    raise UsageError(
        f"{path} is {checks.shown(column)} ({type(column).__name__}), which has no first axis to cut; make it an "
        "array or a list with one item per sample, or leave it out of the batch"
    )
