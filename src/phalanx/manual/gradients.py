"""Gradients of several replicas made one: their weighted mean, added in the fold's order unless asked otherwise."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from phalanx.collectives import all_reduce
from phalanx.definition import checks
from phalanx.errors import UsageError
from phalanx.manual.moving import Vector, moved
from phalanx.manual.replicas import Named, Replica, check_trained, tensors_of
from phalanx.plan.fold import fold_values
from phalanx.plan.placement import dealt

ORDERED: Final = "ordered"
ALGORITHMS: Final = (ORDERED, "ring", "naive")
GROUP_BYTES = 1 << 22  # of gradients that are folded together: small ones share a copy, and sums take little memory

Placed = tuple[torch.device, Vector]


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
        trained = [tied for tied in zip(*parameters, strict=True) if tied[0][1].requires_grad]
        homes = [[tensor for _, tensor in tied] for tied in trained]
        if algorithm == ORDERED:
            for owner, numbers in _groups(homes):
                _fold_group([homes[number] for number in numbers], weights, owner, divisor)
            return
        for tensors in homes:
            terms = [_term(tensor.grad, weight) for tensor, weight in zip(tensors, weights, strict=True)]
            for tensor, summed in zip(tensors, _reduced(terms, tensors, algorithm), strict=True):
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


def _groups(homes: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[torch.device, list[int]]]:
    """Tied parameters to be averaged together, by number, and the device that does it: each about as many bytes."""
    alike: dict[tuple[torch.device, ...], list[int]] = {}
    for number, tensors in enumerate(homes):
        alike.setdefault(tuple(tensor.device for tensor in tensors), []).append(number)
    for places, numbers in alike.items():
        devices = list(dict.fromkeys(places))
        owners = dealt([homes[number][0].nbytes for number in numbers], len(devices))
        for index, device in enumerate(devices):
            group, size = list[int](), 0
            for number, owner in zip(numbers, owners, strict=True):
                if owner == index:
                    group.append(number)
                    size += homes[number][0].nbytes
                if size >= GROUP_BYTES:
                    yield device, group
                    group, size = [], 0
            if group:
                yield device, group


def _fold_group(
    homes: Sequence[Sequence[torch.Tensor]], weights: Sequence[float], owner: torch.device, divisor: float
) -> None:
    """Fold where the terms lie if that is one device, else at the owner, and copy the mean to each device once."""
    replicas = list(zip(*homes, strict=True))
    terms = [
        (mine[0].device, [_term(tensor.grad, weight) for tensor in mine])
        for mine, weight in zip(replicas, weights, strict=True)
    ]
    folded = fold_values(terms, functools.partial(_added, owner))
    assert folded is not None
    mean = [None if summed is None else summed if divisor == 1 else summed / divisor for summed in folded[1]]
    for device in dict.fromkeys(place for place, _ in terms):
        arrived = moved(mean, device)
        for mine in (mine for mine in replicas if mine[0].device == device):
            for tensor, summed in zip(mine, arrived, strict=True):
                tensor.grad = None if summed is None else summed.clone()


def _added(owner: torch.device, left: Placed, right: Placed) -> Placed:
    """The sum of two vectors, as a new one: gradients may share memory with each other. Absent + x = x."""
    home = left[0] if left[0] == right[0] else owner
    pairs = zip(moved(left[1], home), moved(right[1], home), strict=True)
    return home, [b if a is None else a if b is None else a + b for a, b in pairs]


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
