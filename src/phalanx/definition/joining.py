"""Joins outputs and targets of chunks of samples into those of one batch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.definition import checks
from phalanx.definition.data import is_array, like
from phalanx.errors import UsageError

SHOWN = 3  # outputs that a message shows
JOINED = (
    "{} is {} samples, which {}; pass {}: ... that returns one, or a list with an item for each, as list(output) is, "
    "or unpack_sequence(output) of a PackedSequence. Rows are of one shape and dtype in all chunks: pad to one "
    "length, and name the axis of squeeze(), which removes that of a lone sample, too"
)
TWO_WAYS = (
    "{0} is a list of {1} items for chunks of {1} samples, and each item has {1} rows: it may be an item for each "
    "sample, or several outputs; return several as a tuple or dict, or take another batch_size"
)


def joined(outputs: Sequence[Any], samples: Sequence[int], name: str) -> Any:
    """Join the outputs of all chunks into those of one batch: a tree of the same types, with a row for each sample.

    Lists with an item for each sample are joined item by item. Entries of a mapping without a row for each sample (a
    loss, a cache) are left out; of a named tuple they are None.

    Raises
    ------
    UsageError
        An output has no row for each sample, or may be read in two ways.
    """
    first, rows = outputs[0], all(map(_has_rows, outputs, samples))
    sizes = {len(output) if isinstance(output, (tuple, list)) else -1 for output in outputs}
    if all(isinstance(output, Mapping) for output in outputs):
        columns = {key: [output.get(key) for output in outputs] for key in first if max(samples) > 1 or key != "loss"}
        kept = {key: column for key, column in columns.items() if _have_rows(column, samples)}
        if kept or not first:
            return like(first, {key: joined(column, samples, f"{name}[{key!r}]") for key, column in kept.items()})
    elif named := getattr(first, "_asdict", None):
        if not hasattr(first, "batch_sizes"):  # a packed sequence: those are rows, and it has others
            fields = joined([output._asdict() for output in outputs], samples, name)
            return type(first)(**(dict.fromkeys(named()) | fields))
    elif all(map(_is_each, outputs, samples)):
        columns = zip(*outputs, strict=False)
        if len(sizes) == 1 < len(outputs) and is_array(first[0]) and all(_have_rows(each, samples) for each in columns):
            raise UsageError(TWO_WAYS.format(name, len(first)))
        return list(itertools.chain(*outputs))
    elif len(sizes) == 1 and -1 not in sizes:
        columns = enumerate(zip(*outputs, strict=True))
        return type(first)([joined(column, samples, f"{name}[{at}]") for at, column in columns])
    elif rows and all(map(is_array, outputs)) and len({(output.shape[1:], output.dtype) for output in outputs}) == 1:
        return concatenated(outputs)
    shown = dict.fromkeys(
        f"{checks.outline(output)} for {count}" for output, count in zip(outputs, samples, strict=True)
    )
    function = "target_fn=lambda batch" if name.startswith("target") else "forward_fn=lambda model, batch"
    raise UsageError(
        JOINED.format(name, ", ".join([*shown][:SHOWN]), "has unlike rows" if rows else "has no row for each", function)
    )


def _have_rows(column: Sequence[Any], samples: Sequence[int]) -> bool:
    """Whether a value has a row for each sample in all chunks; those of one sample count only if there are no others.

    Chunks tell it together: one may have as many samples as the value happens to have of something else.
    """
    counted = [pair for pair in zip(column, samples, strict=True) if pair[1] > 1 or max(samples) == 1]
    return all(_has_rows(*pair) for pair in counted)


def _has_rows(value: Any, samples: int) -> bool:
    if isinstance(value, (Mapping, tuple, list)):
        parts = value.values() if isinstance(value, Mapping) else value
        return _is_each(value, samples) or all(_has_rows(part, samples) for part in parts)
    return is_array(value) and tuple(value.shape[:1]) == (samples,)


def _is_each(value: Any, samples: int) -> bool:
    """Whether it is a list with an item for each sample."""
    return type(value) is list and len(value) == samples


def concatenated(arrays: Sequence[Any]) -> Any:
    """Concatenate arrays of one kind."""
    first, total = arrays[0], sum(int(array.shape[0]) for array in arrays)
    if isinstance(first, np.ndarray):
        return np.concatenate(arrays)
    joint, start = first.new_empty((total, *first.shape[1:])), 0
    for array in arrays:
        joint[start : start + len(array)] = array
        start += len(array)
    return joint
