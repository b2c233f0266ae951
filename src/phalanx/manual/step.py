"""One step of data parallelism by hand: deal, compute, average, clip, update. Changes nothing until all is computed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.errors import RunError, UsageError
from phalanx.frameworks.torch.replica.ambiguous import AmbiguousMean
from phalanx.frameworks.torch.replica.buffers import Buffers, Left
from phalanx.frameworks.torch.replica.forward import check_stateless
from phalanx.manual.computing import ReplicaStep, compute
from phalanx.manual.gradients import ALGORITHMS, ORDERED, average
from phalanx.manual.moving import Unlooked, moved
from phalanx.manual.replicas import check_trained, tensors_of
from phalanx.manual.shards import samples_in, shard_batch, tensors_in
from phalanx.plan.shares import share_bounds, share_weights
from phalanx.step import ABSENT, check_consistent, mean_loss, total_weight, weighed
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import alone

WAY_OUT = "as in [torch.optim.AdamW(replica.parameters(), lr=1e-3) for replica in replicas]"


@alone
def data_parallel_step(
    replicas: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    *,
    algorithm: str = ORDERED,
    max_norm: float = math.inf,
    before_shard: Callable[[Any], Any] | None = None,
    after_sync: Callable[[Sequence[torch.nn.Module]], Any] | None = None,
    after_step: Callable[[Sequence[torch.nn.Module]], Any] | None = None,
) -> float:
    """Take all replicas one step further on a batch. Equal replicas stay equal, bit for bit.

    Each replica computes the gradient of its share, the gradients are averaged by the shares' sizes and clipped, and
    each optimizer updates its own replica. With "ordered" and ``torch.set_num_threads(1)`` the weights, buffers and
    optimizer states are those of ``phalanx.Recipe`` with as many replicas, unless the model draws random numbers:
    those come from each device's generator, which is not seeded here.

    Replicas on one device run one after another, several devices at the same time: all have their work before the first
    is waited for, which is once a step, when losses are read. Kernels are those that torch's settings choose.

    Parameters
    ----------
    replicas : sequence of torch.nn.Module
        From ``manual.replicate``; buffers are settled as in a ``Recipe``: the mean, if replicas left different ones.
    optimizers : sequence of torch.optim.Optimizer
        One per replica, over that replica's parameters, all with the same options.
    batch : (x, y), dict, tensor, list of samples, or structure of them
        Cut by ``shard_batch`` and called as in a ``Recipe``: ``model(x)`` for a pair, ``model(**batch)`` for a dict,
        else ``model(batch)``. Empty shares are not computed. Lists of samples are collated share by share.
    loss_fn : callable or None
        ``loss_fn(output, target)`` returns the mean loss over the share, or (mean loss, weight). The target is ``y`` of
        a pair, else the batch. None: the model returns that itself.
    algorithm : "ordered", "ring" or "naive"
        As in ``sync_gradients``.
    max_norm : float
        Clips the averaged gradient of each replica, as ``torch.nn.utils.clip_grad_norm_`` does.
    before_shard : callable, optional
        ``before_shard(batch)`` returns the batch to use, or None to keep it.
    after_sync, after_step : callable, optional
        Called with the replicas once a step: when gradients are averaged and not yet clipped; when all is updated. What
        they change must be changed in every replica alike. What they raise comes through.

    Returns
    -------
    float
        The mean loss, weighted as the gradients are.

    Raises
    ------
    UsageError
        The call is wrong.
    WorkerError
        The model or the loss raised on a replica; ``__cause__`` is that exception, ``.replica`` its number.
    NonFiniteError
        A replica's loss or gradient is not finite.
    RunError
        The loss returned the weight 0 for every share.

    After any of these, weights, buffers and optimizers are as before, and there are no gradients.
    """
    definition = _checked(replicas, optimizers, loss_fn, algorithm, max_norm)
    for name, hook in (("before_shard", before_shard), ("after_sync", after_sync), ("after_step", after_step)):
        checks.function(name, hook, f"{name}=print")
    changed = None if before_shard is None else before_shard(batch)
    works = _deal(replicas, batch if changed is None else changed)
    try:
        _drop(works)
        loss = _average(definition, works, algorithm)
        if after_sync is not None:
            after_sync(replicas)
        if math.isfinite(definition.max_norm):
            for replica in replicas:
                torch.nn.utils.clip_grad_norm_(replica.parameters(), definition.max_norm)
    except BaseException:
        _undo(works)
        raise
    for optimizer in optimizers:
        optimizer.step()
    _settle(works)
    if after_step is not None:
        after_step(replicas)
    return loss


def _checked(replicas: Any, optimizers: Any, loss_fn: Any, algorithm: Any, max_norm: Any) -> Definition:
    """What a recipe would know of this step, once everything but the batch is found right."""
    tensors_of(replicas, buffers=True)
    for number, replica in enumerate(replicas):
        if not isinstance(replica, torch.nn.Module):
            raise UsageError(
                f"replicas[{number}] is a {type(replica).__name__}; a step calls the models, so pass them: "
                "manual.replicate(model, devices)"
            )
    check_trained("replicas", list(replicas[0].named_parameters()))
    _check_optimizers(optimizers, replicas)
    checks.choice("algorithm", algorithm, ALGORITHMS)
    check_stateless(loss_fn)
    return Definition(replicas[0], None, loss_fn, replicas=len(replicas), max_norm=max_norm)


def _check_optimizers(optimizers: Any, replicas: Sequence[torch.nn.Module]) -> None:
    """Refuse optimizers that are not one per replica, over its own parameters, with the options of the first.

    Raises
    ------
    UsageError
        Also for LBFGS, which evaluates the loss several times a step.
    """
    if not isinstance(optimizers, (list, tuple)):
        raise UsageError(f"optimizers is {checks.shown(optimizers)}; it must be a list with one per replica, {WAY_OUT}")
    if len(optimizers) != len(replicas):
        raise UsageError(f"optimizers has {len(optimizers)} for {len(replicas)} replicas; give one to each, {WAY_OUT}")
    described = [_described(number, optimizer, replicas[number]) for number, optimizer in enumerate(optimizers)]
    for number, other in enumerate(described):
        unlike = [what for what in {**described[0], **other} if described[0].get(what) != other.get(what)]
        if unlike:
            raise UsageError(
                f"optimizers[{number}] is unlike optimizers[0] in {', '.join(unlike)}, so the replicas would drift "
                "apart; make all alike, and give a scheduler to each"
            )


def _described(number: int, optimizer: Any, replica: torch.nn.Module) -> dict[str, Any]:
    """What decides the update, by name: the kind, and per group its parameters by position and its options."""
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            f"optimizers[{number}] is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer that needs one "
            f"gradient a step, {WAY_OUT}"
        )
    positions = {id(parameter): position for position, parameter in enumerate(replica.parameters())}
    facts: dict[str, Any] = {"its type": type(optimizer)}
    for index, group in enumerate(optimizer.param_groups):
        strangers = sum(id(parameter) not in positions for parameter in group["params"])
        if strangers:
            raise UsageError(
                f"optimizers[{number}] has {strangers} parameters in group {index} that are not those of "
                f"replicas[{number}], so it would not update it; give each its own replica's, {WAY_OUT}"
            )
        facts[f"the parameters of group {index}"] = [positions[id(parameter)] for parameter in group["params"]]
        for key, value in group.items():
            if key not in ("params", "param_names"):
                facts[f"{key!r} of group {index}"] = value.item() if isinstance(value, torch.Tensor) else value
    return facts


def _deal(replicas: Sequence[torch.nn.Module], batch: Any) -> list[ReplicaStep]:
    samples = samples_in(batch)
    if not samples:
        raise UsageError("batch is empty (its length is 0); it needs at least one sample")
    shards = shard_batch(tensors_in(batch), len(replicas))
    bounds = share_bounds(samples, len(replicas))
    return [
        ReplicaStep(number, model, _buffers(model), range(*ends), shard)
        for number, (model, ends, shard) in enumerate(zip(replicas, bounds, shards, strict=True))
    ]


def _buffers(model: torch.nn.Module) -> Buffers:
    return Buffers(model, Unlooked() if any(buffer.device.type != "cpu" for buffer in model.buffers()) else None)


def _drop(works: Sequence[ReplicaStep]) -> None:
    """Leave no gradient behind: a stale one would be added to the next, or averaged in its place."""
    for work in works:
        for parameter in work.model.parameters():
            parameter.grad = None


def _undo(works: Sequence[ReplicaStep]) -> None:
    """Leave no gradient, and buffers as they were before."""
    _drop(works)
    for work in works:
        with contextlib.suppress(RuntimeError):  # a device that failed has nothing left to put back
            work.buffers.restore()


def _average(definition: Definition, works: Sequence[ReplicaStep], algorithm: str) -> float:
    """Compute all shares and average their gradients; the mean loss."""
    with interrupts.held(), interrupts.user_code():
        compute(definition, [work for work in works if work.samples])
    AmbiguousMean(definition).warn(works[0].weight, works[0].share)
    known = share_weights([len(work.samples) for work in works])
    parts = [
        weighed(work.loss, work.weight, share, len(work.samples), len(works)) if work.samples else ABSENT
        for work, share in zip(works, known, strict=True)
    ]
    check_consistent(parts)
    weight = total_weight(parts)
    if weight is None:
        raise RunError("loss_fn returned the weight 0 for every share: it counted nothing to average over in the batch")
    average([list(work.model.named_parameters()) for work in works], [part.weight for part in parts], algorithm)
    return mean_loss([part.loss for part in parts], parts, weight)


def _settle(works: Sequence[ReplicaStep]) -> None:
    """Buffers by the recipe's rule on the first replica, then the same bytes on the others."""
    first = works[0].buffers
    if not first.starts:
        return
    first.settle([(len(work.samples), _moved(work.left, first.starts)) for work in works if work.samples])
    for work in works[1:]:
        work.buffers.settle([(1, _moved(first.starts, work.buffers.starts))])


def _moved(values: Left, homes: Left) -> Left:
    """The values where their homes are: those of one device together."""
    result = list(values)
    for device in dict.fromkeys(home.device for home in homes):
        numbers = [number for number, home in enumerate(homes) if home.device == device]
        for number, value in zip(numbers, moved([values[number] for number in numbers], device), strict=True):
            assert value is not None
            result[number] = value
    return result
