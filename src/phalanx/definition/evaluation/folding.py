"""What chunks gave, put together in their order: weighted means, and outputs one behind the other."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.definition import checks
from phalanx.definition.data import is_array, leaves
from phalanx.errors import UsageError
from phalanx.plan.fold import fold_values


def joined(outputs: Sequence[Any], samples: Sequence[int], name: str) -> Any:
    """Outputs of all chunks as those of one batch: a tree of arrays with a row for each sample.

    Of a dict, what has no row for each sample (a loss, a cache) is left out.

    Raises
    ------
    UsageError
        An output has no row for each sample.
    """
    first = outputs[0]
    if isinstance(first, Mapping):
        rows = {
            key: [output[key] for output in outputs]
            for key, value in first.items()
            if _has_rows(value, samples[0]) and (samples[0] > 1 or key != "loss")
        }
        return {key: joined(column, samples, f"{name}[{key!r}]") for key, column in rows.items()}
    if isinstance(first, (tuple, list)):
        columns = zip(*outputs, strict=True)
        return tuple(joined(column, samples, f"{name}[{number}]") for number, column in enumerate(columns))
    if not is_array(first) or not _has_rows(first, samples[0]):
        raise UsageError(
            f"{name} is {checks.described(first)} for {samples[0]} samples, which has no row for each; pass "
            "forward_fn=lambda model, batch: ... that returns one"
        )
    return concatenated(outputs)


def _has_rows(value: Any, samples: int) -> bool:
    return all(is_array(leaf) and tuple(leaf.shape[:1]) == (samples,) for _, leaf in leaves(value, "", lists=True))


def concatenated(arrays: Sequence[Any]) -> Any:
    """Arrays of one kind, one behind the other."""
    first, total = arrays[0], sum(int(array.shape[0]) for array in arrays)
    if isinstance(first, np.ndarray):
        return np.concatenate(arrays)
    joint, start = first.new_empty((total, *first.shape[1:])), 0
    for array in arrays:
        joint[start : start + len(array)] = array
        start += len(array)
    return joint


def measured(value: Any, samples: int) -> tuple[float, float]:
    """(mean, weight) out of what ``metric_fn`` returned for so many samples.

    Raises
    ------
    UsageError
        It is neither a number nor a pair of them, or the weight is negative.
    """
    pair: tuple[Any, Any] = value if isinstance(value, tuple) and len(value) == 2 else (value, samples)
    try:
        mean, weight = float(pair[0]), float(pair[1])
    except (TypeError, ValueError, RuntimeError):
        mean, weight = math.nan, math.nan
    if not 0 <= weight < math.inf:
        shown = ", ".join(map(checks.described, pair)) if pair is value else checks.described(value)
        raise UsageError(
            f"metric_fn returned {shown}; it must return a mean, or (mean, weight) with a finite weight of at least 0"
        )
    return mean, weight


def averaged(measured: Sequence[tuple[float, float]]) -> float:
    """Weighted mean of (mean, weight) of every chunk, in order, folded as replicas are.

    Raises
    ------
    UsageError
        Every weight is 0.
    """
    value = fold_values([mean * weight if weight else None for mean, weight in measured], operator.add)
    weight = fold_values([weight for _, weight in measured], operator.add)
    if value is None or not weight:
        raise UsageError("metric_fn returned weight 0 for every chunk; there is nothing to average over")
    return value / weight
