"""An evaluation that is due during training: what to measure, on which samples."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.definition import checks
from phalanx.definition.data import open_data
from phalanx.errors import UsageError
from phalanx.plan.fold import fold_values

DEFAULT_BATCH = 256


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that is due after every epoch and after the last step.

    Parameters
    ----------
    metric_fn : callable
        ``metric_fn(output, target) -> mean``, or ``(mean, weight)``.
    data : Any
        Held-out samples, in any form that a recipe's data may have.
    batch_size : int, default 256
        Samples at once. One by one where the recipe's own ``batch_size`` is None.
    """

    metric_fn: Callable[..., Any]
    data: Any
    batch_size: int = DEFAULT_BATCH

    def __post_init__(self) -> None:
        check_evaluation(self.metric_fn, self.data, self.batch_size)


def check_evaluation(metric_fn: Any, data: Any, batch_size: Any) -> None:
    """Refuse what cannot be evaluated, before anything is computed."""
    if not callable(metric_fn):
        raise UsageError(
            f"metric_fn is {checks.shown(metric_fn)}; it must be callable, as in "
            "metric_fn=lambda output, target: (output.argmax(1) == target).float().mean()"
        )
    open_data(data, "evaluation data")
    checks.integer("batch_size", batch_size, least=1)


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
