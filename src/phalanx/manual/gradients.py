"""Gradients of several replicas made one: their weighted mean, added in the fold's order unless asked otherwise."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Final

import torch

from phalanx.collectives import all_reduce
from phalanx.collectives.schedules import ALGORITHMS
from phalanx.definition import checks
from phalanx.errors import UsageError
from phalanx.frameworks.torch.arithmetic import Gradient, placed
from phalanx.frameworks.torch.replica.gradient import sparse
from phalanx.manual.replicas import Replica, check_trained, tensors_of
from phalanx.plan.fold import dealt, fold_values

ORDERED: Final = "ordered"


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
    named = tensors_of(replicas)
    check_trained("replicas", named[0])
    checks.choice("algorithm", algorithm, tuple(ALGORITHMS))
    relative = _relative(weights, len(named))
    for name, parameter in [pair for replica in named for pair in replica]:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise sparse(name)
    parameters = [[parameter for _, parameter in replica if parameter.requires_grad] for replica in named]
    average(parameters, [[parameter.grad for parameter in replica] for replica in parameters], relative, algorithm)


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


def average(
    parameters: Sequence[Sequence[torch.Tensor]],
    gradients: Sequence[Gradient | None],
    weights: Sequence[float],
    algorithm: str,
) -> None:
    """Write the mean of ``gradients`` into ``.grad`` of each replica's parameters; at weight 0 nothing is added."""
    divisor = fold_values([weight or None for weight in weights], operator.add)
    assert divisor is not None
    with torch.no_grad():
        terms = [_term(*pair) for pair in zip(gradients, weights, strict=True)]
        if algorithm == ORDERED:
            total = fold_values(terms, functools.partial(_added, _owners(parameters)))
            assert total is not None
        else:
            there = [term for term in terms if term is not None]
            total = [_reduced(column, algorithm) for column in zip(*there, strict=True)]
        mean = [None if summed is None else summed if divisor == 1 else summed / divisor for summed in total]
        arrived: dict[tuple[torch.device, ...], Gradient] = {}
        for replica in parameters:
            homes = tuple(parameter.device for parameter in replica)
            if homes not in arrived:
                arrived[homes] = placed(mean, homes)
            for parameter, entry in zip(replica, arrived[homes], strict=True):
                parameter.grad = None if entry is None else entry.clone()


def _term(gradient: Gradient | None, weight: float) -> Gradient | None:
    """What a replica adds: nothing at weight 0; a weight of 1 multiplies nothing."""
    if gradient is None or weight in (0, 1):
        return gradient if weight else None
    return [None if entry is None else entry * weight for entry in gradient]


def _owners(parameters: Sequence[Sequence[torch.Tensor]]) -> list[torch.device]:
    """Where sums over several devices are taken: each device adds up about as many bytes."""
    devices = list(dict.fromkeys(parameter.device for replica in parameters for parameter in replica))
    return [devices[owner] for owner in dealt([parameter.nbytes for parameter in parameters[0]], len(devices))]


def _added(owners: Sequence[torch.device], left: Gradient, right: Gradient) -> Gradient:
    """The sum as new tensors, since gradients may share memory: where both are, or at the owner. Absent + x = x."""
    homes = [
        owner if a is not None and b is not None and a.device != b.device else None
        for owner, a, b in zip(owners, left, right, strict=True)
    ]
    pairs = zip(placed(left, homes), placed(right, homes), strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]


def _reduced(column: Sequence[torch.Tensor | None], algorithm: str) -> torch.Tensor | None:
    """The sum by another algorithm, among the replicas that have something."""
    sums = [term.clone() for term in column if term is not None]
    if sums:
        all_reduce(sums, op="sum", algorithm=algorithm)
    return sums[0] if sums else None
