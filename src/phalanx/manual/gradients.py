"""Gradients of several replicas made one: their weighted mean, added in the fold's order unless asked otherwise."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Final

import torch

from phalanx.collectives import all_reduce
from phalanx.definition import checks
from phalanx.errors import UsageError
from phalanx.manual.replicas import Named, Replica, check_trained, tensors_of
from phalanx.plan.fold import fold_values

ORDERED: Final = "ordered"
ALGORITHMS: Final = (ORDERED, "ring", "naive")


def sync_gradients(replicas: Sequence[Replica], weights: Any = None, algorithm: str = ORDERED) -> None:
    """Give every replica the weighted mean of all gradients, ``sum(w_r * g_r) / sum(w_r)``, in ``.grad``.

    A gradient that a replica does not have is skipped, not added as zero, and the divisor stays the sum of all
    weights. A replica of weight 0 adds nothing and gets the mean like the others. A gradient that all lack stays
    None, and so does that of a frozen parameter. Tied parameters are one. Dtypes are kept.

    Parameters
    ----------
    replicas : sequence of torch.nn.Module, or of sequences of parameters
        Alike in names, shapes and dtypes, on any devices.
    weights : sequence of float, optional
        One per replica, such as the sizes of the shards; None: all equal. They count relative to the largest, so equal
        ones multiply nothing, and sizes give the bits of ``phalanx.Recipe`` for uneven batches.
    algorithm : "ordered", "ring" or "naive"
        "ordered" adds in the fold's order and in the gradients' own dtype: it alone has the bits of a ``Recipe`` with
        as many replicas. The others are those of ``phalanx.collectives.all_reduce``.

    Raises
    ------
    UsageError
        The replicas differ, share memory or have nothing to train; a weight is missing, negative or not finite, or all
        are 0; a gradient is sparse. No gradient was changed.
    """
    parameters = tensors_of(replicas)
    check_trained("replicas", parameters[0])
    checks.choice("algorithm", algorithm, ALGORITHMS)
    relative = _relative(weights, len(parameters))
    for replica in parameters:
        check_dense(replica)
    average(parameters, relative, algorithm)


def check_dense(parameters: Named) -> None:
    """Refuse sparse gradients: their sum depends on which rows meet, and no optimizer here steps with them."""
    for name, parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UsageError(
                f"parameter {name!r} has a sparse gradient, and those cannot be folded exactly; use sparse=False"
            )


def average(parameters: Sequence[Named], weights: Sequence[float], algorithm: str) -> None:
    """Write the mean into ``.grad`` of what is trained; weights are taken as they are, 0 where nothing is added."""
    divisor = total(weights)
    with torch.no_grad():
        for tied in zip(*parameters, strict=True):
            tensors = [tensor for _, tensor in tied]
            if not tensors[0].requires_grad:
                continue
            terms = [_term(tensor.grad, weight) for tensor, weight in zip(tensors, weights, strict=True)]
            sums = _folded(terms, tensors) if algorithm == ORDERED else _reduced(terms, tensors, algorithm)
            for tensor, summed in zip(tensors, sums, strict=True):
                tensor.grad = summed if summed is None or divisor == 1 else summed.div_(divisor)


def total(values: Sequence[float]) -> float:
    """The sum of weights, or of weighted losses, in the fold's order; 0 is absent. At least one is not."""
    summed = fold_values([value or None for value in values], operator.add)
    return 0.0 if summed is None else summed


def _relative(weights: Any, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    try:
        numbers = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count or not all(0 <= number < math.inf for number in numbers) or not any(numbers):
        raise UsageError(
            f"weights is {checks.shown(weights)}; it must be a list of {count} finite numbers of at least 0, one per "
            "replica and not all 0, as in [len(shard) for shard in shards]"
        )
    return [number / max(numbers) for number in numbers]


def _term(gradient: torch.Tensor | None, weight: float) -> torch.Tensor | None:
    """What a replica adds: nothing at weight 0; a weight of 1 multiplies nothing."""
    if gradient is None or weight == 0:
        return None
    return gradient if weight == 1 else gradient * weight


def _folded(terms: list[torch.Tensor | None], homes: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The sum by the definition, once for every home."""
    summed = fold_values(terms, lambda left, right: left + right.to(left.device))
    return [None if summed is None else summed.to(home.device, copy=True) for home in homes]


def _reduced(terms: list[torch.Tensor | None], homes: list[torch.Tensor], algorithm: str) -> list[torch.Tensor | None]:
    """The sum by another algorithm, among the replicas that have something; the others get a copy."""
    sums = [None if term is None else term.clone() for term in terms]
    present = [summed for summed in sums if summed is not None]
    if not present:
        return sums
    all_reduce(present, op="sum", algorithm=algorithm)
    return [
        present[0].to(home.device, copy=True) if summed is None else summed
        for home, summed in zip(homes, sums, strict=True)
    ]
