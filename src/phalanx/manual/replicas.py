"""Replicas: independent copies of one model, what has to hold between them, and what makes them equal again.

The parameters of one are copied into the others. Gradients become their weighted mean, added in the fold's order
by default.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, Final

import torch

from phalanx.collectives import all_reduce, broadcast, usable
from phalanx.collectives.schedules import ALGORITHMS
from phalanx.definition import checks
from phalanx.errors import UsageError
from phalanx.frameworks.torch.arithmetic import Gradient, placed
from phalanx.frameworks.torch.model import Model, check_trained, check_values, copied, put
from phalanx.frameworks.torch.replica.gradient import sparse
from phalanx.plan.fold import fold_values

Named = list[tuple[str, torch.Tensor]]

ORDERED: Final = "ordered"

OTHERWISE = (
    "; keep tensors with a gradient, locks and open files out of its attributes, mend its __deepcopy__, or make one "
    "model per device and call manual.broadcast_parameters"
)
MADE = ", as manual.replicate(model, devices) makes them, or torch.nn.ParameterList(parameters)"
LISTED = "it must be a list of models, as manual.replicate(model, devices) makes it"


def replicate(model: Model, devices: Sequence[str | torch.device]) -> list[Model]:
    """Copy a model once per device. The model itself stays as it is, and is none of the copies.

    Copies have equal weights and buffers, share no memory, and keep ties, dtypes, ``requires_grad``, hooks and every
    module's train or eval mode. They carry no gradients.

    Parameters
    ----------
    model : torch.nn.Module
    devices : sequence of str or torch.device
        One per replica, as in ``["cuda:0", "cuda:1"]``. A device may come several times: ``["cpu"] * 4``.

    Returns
    -------
    list of torch.nn.Module
        One replica per device, in order.

    Raises
    ------
    UsageError
        No devices, or one that torch cannot use here; a model that cannot be copied, has no parameters to train, or
        has some without values (lazy modules, the meta device).
    """
    _check_module("model", model, "")
    check_values("model", model)
    check_trained("model is", model)
    homes = usable("devices", devices)
    replicas = [copied("model", model, OTHERWISE) for _ in homes]
    for replica, home in zip(replicas, homes, strict=True):
        put(replica, home)
    return replicas


def broadcast_parameters(replicas: Sequence[torch.nn.Module], root: int = 0) -> None:
    """Copy one replica's parameters and buffers into all others, in place.

    Parameters
    ----------
    replicas : sequence of torch.nn.Module
        Alike in names, shapes and dtypes, on any devices. Mere parameters: in a ``torch.nn.ParameterList``.
    root : int
        Which replica is copied, counted from 0.

    Raises
    ------
    UsageError
        The replicas differ or share memory, or there is no such root; nothing was copied.
    """
    states = tensors_of(replicas, buffers=True)
    source = checks.integer("root", root, least=0, most=len(states) - 1)
    for same in zip(*states, strict=True):
        broadcast([tensor.detach() for _, tensor in same], root=source)


def sync_gradients(replicas: Sequence[torch.nn.Module], weights: Any = None, algorithm: str = ORDERED) -> None:
    """Give every replica the weighted mean of all gradients, ``sum(w_r * g_r) / sum(w_r)``, in ``.grad``.

    A gradient that a replica does not have is skipped, not added as zero, and the divisor stays the sum of all
    weights. A replica of weight 0 adds nothing and gets the mean like the others. A gradient that all lack stays
    None, and so does that of a frozen parameter. Tied parameters are one. Dtypes are kept.

    Parameters
    ----------
    replicas : sequence of torch.nn.Module
        Alike in names, shapes and dtypes, on any devices. Mere parameters: in a ``torch.nn.ParameterList``.
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
    check_trained("replicas[0] is", replicas[0])
    checks.choice("algorithm", algorithm, tuple(ALGORITHMS))
    relative = _relative(weights, len(named))
    for name, parameter in itertools.chain(*named):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise sparse(name)
    parameters = [[parameter for _, parameter in replica if parameter.requires_grad] for replica in named]
    average(parameters, [[parameter.grad for parameter in replica] for replica in parameters], relative, algorithm)


def tensors_of(replicas: Sequence[torch.nn.Module], *, buffers: bool = False) -> list[Named]:
    """The parameters of every replica by name, tied ones once, and then the buffers if they are asked for.

    Raises
    ------
    UsageError
        There are none, they are not alike, or two of them share memory.
    """
    if not isinstance(replicas, (list, tuple)) or not replicas:
        raise UsageError(f"replicas is {checks.shown(replicas)}; {LISTED}")
    for number, replica in enumerate(replicas):
        _check_module(f"replicas[{number}]", replica, MADE)
    named = [[*replica.named_parameters(), *(replica.named_buffers() if buffers else ())] for replica in replicas]
    _check_alike(named)
    _check_independent(named)
    return named


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
            total = fold_values(terms, _added)
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


def _check_module(name: str, value: Any, way: str) -> None:
    if not isinstance(value, torch.nn.Module):
        raise UsageError(f"{name} is {checks.shown(value)} ({type(value).__name__}); it must be a torch.nn.Module{way}")


def _check_alike(named: list[Named]) -> None:
    spelled = [[_spell(name, tensor) for name, tensor in replica] for replica in named]
    for number, other in enumerate(spelled):
        for expected, got in itertools.zip_longest(spelled[0], other, fillvalue="nothing"):
            if expected != got:
                raise UsageError(
                    f"replicas[{number}] is unlike replicas[0]: it has {got} where that has {expected}; make them with "
                    "manual.replicate(model, devices)"
                )


def _spell(name: str, tensor: torch.Tensor) -> str:
    return f"{name!r}: {'trained' if tensor.requires_grad else 'fixed'} {tensor.dtype} {tuple(tensor.shape)}"


def _check_independent(named: list[Named]) -> None:
    owners: dict[int, int] = {}
    for number, replica in enumerate(named):
        for name, tensor in replica:
            owner = owners.setdefault(tensor.untyped_storage().data_ptr(), number) if tensor.numel() else number
            if owner != number:
                raise UsageError(
                    f"replicas[{owner}] and replicas[{number}] share the memory of {name!r}, so each would change the "
                    "other; make independent ones with manual.replicate(model, devices)"
                )


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


def _term(gradient: Gradient | None, weight: float) -> Gradient | None:
    """What a replica adds: nothing at weight 0; a weight of 1 multiplies nothing."""
    if gradient is None or weight in (0, 1):
        return gradient if weight else None
    return [None if entry is None else entry * weight for entry in gradient]


def _added(left: Gradient, right: Gradient) -> Gradient:
    """The sum as new tensors on the left one's devices, as gradients may share memory. Absent + x = x."""
    pairs = zip(left, placed(right, [None if a is None else a.device for a in left]), strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]


def _reduced(column: Sequence[torch.Tensor | None], algorithm: str) -> torch.Tensor | None:
    """The sum by another algorithm, over the replicas that have this gradient."""
    sums = [term.clone() for term in column if term is not None]
    if sums:
        all_reduce(sums, op="sum", algorithm=algorithm)
    return sums[0] if sums else None
