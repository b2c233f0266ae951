"""Batches cut into shards: any structure of arrays, cut along the first axis as ``numpy.array_split`` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch

from phalanx.definition import checks
from phalanx.definition.data import is_array
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
    return [_rows(batch, start, end) for start, end in share_bounds(samples_in(batch), count)]


def samples_in(batch: Any) -> int:
    """Length of the first axis, equal for everything in the batch."""
    columns = list(_columns(batch, "batch"))
    if not columns:
        raise UsageError(f"batch is an empty {type(batch).__name__}; it needs at least one array")
    name, samples = columns[0]
    for other, length in columns:
        if length != samples:
            raise UsageError(f"{name} has {samples} samples and {other} has {length}; cut them to the same number")
    return samples


def is_samples(value: Any) -> TypeGuard[list[Any]]:
    """Whether it is a list of samples, not a structure of arrays."""
    return isinstance(value, list) and not any(map(is_array, value))


def tensors_in(batch: Any) -> Any:
    """The batch with its numpy arrays copied into tensors; lists of samples stay as they are."""
    if isinstance(batch, np.ndarray):
        try:
            return torch.tensor(np.ascontiguousarray(batch))
        except (TypeError, ValueError) as error:
            raise UsageError(f"batch holds an array of {batch.dtype}, which no tensor can hold: {error}") from error
    return _mapped(tensors_in, batch) if _is_structure(batch) else batch


def _rows(value: Any, start: int, end: int) -> Any:
    if _is_structure(value):
        return _mapped(lambda item: _rows(item, start, end), value)
    if is_samples(value):
        return value[start:end]
    return value[torch.arange(start, end) if isinstance(value, torch.Tensor) else np.arange(start, end)]


def _is_structure(value: Any) -> bool:
    return isinstance(value, (tuple, list, Mapping)) and not is_samples(value)


def _mapped(function: Any, structure: Any) -> Any:
    if isinstance(structure, Mapping):
        return {key: function(item) for key, item in structure.items()}
    items = [function(item) for item in structure]
    if isinstance(structure, list):
        return items
    named = getattr(structure, "_make", tuple)
    return named(items)


def _columns(value: Any, path: str) -> Iterator[tuple[str, int]]:
    """(path, length) of everything that is cut."""
    if _is_structure(value):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _columns(item, f"{path}[{key!r}]")
    elif is_samples(value):
        yield path, len(value)
    elif is_array(value) and len(value.shape):
        yield path, int(value.shape[0])
    else:
        raise UsageError(
            f"{path} is {checks.shown(value)} ({type(value).__name__}), which has no first axis to cut; make it an "
            "array or a list with one item per sample, or leave it out of the batch"
        )
