"""One step of data parallelism by hand: deal, compute, average, clip, update. Changes nothing until all is computed.

Each replica is computed by a lane, as in a run. All devices have their work before one is waited for. One thread gives
it to them, replica by replica, so that what user code draws from generators does not depend on the devices.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from phalanx.collectives.schedules import ALGORITHMS
from phalanx.definition import checks
from phalanx.definition.batches import dealt
from phalanx.definition.data import Columns, OneByOne, Share, map_tree, open_batch
from phalanx.definition.fields import Definition
from phalanx.errors import NonFiniteError, PhalanxError, RunError, UsageError, WorkerError, safe_str, spell_samples
from phalanx.frameworks.torch import accelerators, arithmetic
from phalanx.frameworks.torch.arithmetic import DeviceArithmetic, placed
from phalanx.frameworks.torch.environment import plain_autograd
from phalanx.frameworks.torch.model import check_trained
from phalanx.frameworks.torch.replica.buffers import Buffers
from phalanx.frameworks.torch.replica.feed import DeviceFeed
from phalanx.frameworks.torch.replica.forward import NoMean, as_tensors, check_stateless
from phalanx.frameworks.torch.replica.gradient import drop
from phalanx.frameworks.torch.replica.lane import Lane
from phalanx.manual.replicas import ORDERED, average, tensors_of
from phalanx.plan.orders import Indices
from phalanx.plan.shares import share_weights
from phalanx.seams.records import Computed, Part, Todo, losses_of, with_losses
from phalanx.step import ABSENT, check_consistent, mean_loss, total_weight, weighed
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import alone

# There is nothing else that stays from step to step. Entries go with their models.
LOOKED: weakref.WeakKeyDictionary[torch.nn.Module, NoMean] = weakref.WeakKeyDictionary()
WAY_OUT = "as in [torch.optim.AdamW(replica.parameters(), lr=1e-3) for replica in replicas]"


def shard_batch(batch: Any, n: int) -> list[Any]:
    """Cut a batch into ``n`` shards along the first axis, as ``numpy.array_split`` does.

    Parameters
    ----------
    batch : tensor, numpy array, tuple or dict of them, or list of samples
        As ``run.step`` takes it: a list of arrays is what a loader yields for a tuple; any other list is cut itself.
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
        The batch is empty, parts of it differ in length, or it cannot be cut.
    """
    return [share.read() for share in _dealt(batch, checks.integer("n", n, least=1))]


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
    shares = _dealt(batch if changed is None else changed, len(replicas))
    no_mean = LOOKED.setdefault(replicas[0], NoMean(len(replicas), {0}))
    tasks = [_task(definition, no_mean, *one) for one in zip(range(len(replicas)), replicas, shares, strict=True)]
    try:
        for task in tasks:
            drop(task.lane.parameters)  # a stale gradient would be added to the next, or averaged in its place
        _compute([task for task in tasks if len(task.share.samples)])
        loss = _average(tasks, algorithm)
        if after_sync is not None:
            after_sync(replicas)
        if math.isfinite(definition.max_norm):
            for replica in replicas:
                torch.nn.utils.clip_grad_norm_(replica.parameters(), definition.max_norm)
    except BaseException:
        for task in tasks:
            with contextlib.suppress(RuntimeError):  # a device that failed has nothing left to put back
                task.lane.rewind()
        raise
    for optimizer in optimizers:
        optimizer.step()
    _settle(tasks)
    if after_step is not None:
        after_step(replicas)
    return loss


@dataclass(slots=True)
class Task:
    """One replica with its share of the batch, and what it computed: None for an empty share."""

    replica: int
    lane: Lane
    share: Share
    computed: Computed | None = None

    @property
    def device(self) -> torch.device:
        """Where the replica is."""
        return self.lane.parameters[0].device

    def __str__(self) -> str:
        return f"replica {self.replica} on {self.device}, samples {spell_samples(self.share.samples)} of the batch"

    @contextlib.contextmanager
    def addressed(self) -> Iterator[None]:
        """Say of an error which replica and samples it is about."""
        try:
            with accelerators.watched([self.device]):
                yield
        except PhalanxError as error:
            error.add_note(f"at {self}")
            raise
        except Exception as error:
            message = f"{type(error).__name__} in user code at {self}: {safe_str(error)}"
            raise WorkerError(message, replica=self.replica, samples=self.share.samples) from error


class Given:
    """Reads shares of a batch in memory, and seeds nothing."""

    def batch(self, key: int | None, share: Share) -> Any:
        """A share of it, as the model is called with it."""
        return map_tree(as_tensors, share.batch(share.read(), default_collate))


def _dealt(batch: Any, count: int) -> list[Share]:
    """The batch in ``count`` shares."""
    source = open_batch(batch)
    reader = replace(source, rows=_rows) if isinstance(source, Columns) else OneByOne(source, copies=False)
    return dealt(Share(np.arange(len(source)), reader, "batch"), count)


def _rows(arrays: Sequence[Any], indices: Indices) -> list[Any]:
    """Rows that follow one another; a device makes the indices itself, so that nothing of the host has to go there."""
    first = int(indices[:1].sum())
    return [
        array[torch.arange(first, first + len(indices), device=array.device) if torch.is_tensor(array) else indices]
        for array in arrays
    ]


def _task(definition: Definition, no_mean: NoMean, replica: int, model: torch.nn.Module, share: Share) -> Task:
    feed = DeviceFeed(Given(), next(model.parameters()).device, ahead=False)
    return Task(replica, Lane(definition, model, feed.batch, Buffers(model), no_mean, later=True), share)


def _compute(tasks: Sequence[Task]) -> None:
    """Give all devices their work, replica by replica; none is waited for."""
    torch.clear_autocast_cache()  # it may hold casts of weights from before the last update
    with interrupts.held(), interrupts.user_code(), plain_autograd():
        for task in tasks:
            with task.addressed(), accelerators.current(task.device):
                task.computed = task.lane.gradient(Todo(task.replica, 0, task.share, 1.0))


def _average(tasks: Sequence[Task], algorithm: str) -> float:
    """Average what was computed into ``.grad`` of every replica; the mean loss, once the devices are done."""
    known = share_weights([len(task.share.samples) for task in tasks])
    parts = [_part(task, weight, len(tasks)) for task, weight in zip(tasks, known, strict=True)]
    check_consistent(parts)
    weight = total_weight(parts)
    if weight is None:
        raise RunError("loss_fn returned the weight 0 for every share: it counted nothing to average over in the batch")
    gradients = [task.computed and task.computed.gradient for task in tasks]
    parameters = [task.lane.parameters for task in tasks]
    average(parameters, gradients, [part.weight for part in parts], algorithm)
    whole = [parameter.grad for parameter in parameters[0] if parameter.grad is not None]
    norm, *losses = DeviceArithmetic().read([torch.nn.utils.get_total_norm(whole), *losses_of(parts)])
    parts = with_losses(parts, losses)
    loss = mean_loss(parts, weight)
    if not math.isfinite(loss) or not math.isfinite(norm):
        for task, part in zip(tasks, parts, strict=True):
            if part.weight:
                _check_finite(task, part.loss)
    return loss


def _part(task: Task, known: float, replicas: int) -> Part:
    computed = task.computed
    if computed is None:
        return ABSENT
    with task.addressed():
        weight = computed.weight() if callable(computed.weight) else computed.weight
    return weighed(computed.loss, weight, known, len(task.share.samples), replicas)


def _check_finite(task: Task, loss: float) -> None:
    """Elements are looked at only where a mean is not finite, since its norm may merely overflow."""
    gradient = (task.computed and task.computed.gradient) or []
    if math.isfinite(loss) and arithmetic.finite(gradient):
        return
    what = "the gradient has values that are not finite" if math.isfinite(loss) else f"the loss is {loss}"
    raise NonFiniteError(
        f"{what} at {task}; nothing was updated. Look at these samples, lower the learning rate or set max_norm",
        replica=task.replica,
        samples=task.share.samples,
    )


def _settle(tasks: Sequence[Task]) -> None:
    """Settle buffers by the recipe's rule on the first replica, and copy those bytes to the others."""
    first = tasks[0].lane.buffers.starts
    if not first:
        return
    contributions = [(len(task.share.samples), task.computed.buffers) for task in tasks if task.computed is not None]
    for task in tasks:
        buffers = task.lane.buffers
        homes = [start.device for start in buffers.starts]
        buffers.settle([(samples, placed(values, homes)) for samples, values in contributions])  # type: ignore[misc]
        contributions = [(1, first)]


def _checked(replicas: Any, optimizers: Any, loss_fn: Any, algorithm: Any, max_norm: Any) -> Definition:
    """Check everything but the batch; returns what a recipe would know of this step."""
    tensors_of(replicas, buffers=True)
    check_trained("replicas[0] is", replicas[0])
    _check_optimizers(optimizers, replicas)
    checks.choice("algorithm", algorithm, tuple(ALGORITHMS))
    check_stateless(loss_fn)
    return Definition(replicas[0], None, loss_fn, replicas=len(replicas), max_norm=max_norm, modes="as_made")


def _check_optimizers(optimizers: Any, replicas: Sequence[torch.nn.Module]) -> None:
    """Refuse optimizers that are not one per replica, over its own parameters, with the options of the first.

    Raises
    ------
    UsageError
        Also for LBFGS, which evaluates the loss several times a step.
    """
    listed = isinstance(optimizers, (list, tuple))
    if not listed or len(optimizers) != len(replicas):
        given = f"has {len(optimizers)}" if listed else f"is {checks.shown(optimizers)}"
        raise UsageError(
            f"optimizers {given} for {len(replicas)} replicas; it must be a list with one for each, {WAY_OUT}"
        )
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
        own = [positions.get(id(parameter)) for parameter in group["params"]]
        if None in own:
            raise UsageError(
                f"optimizers[{number}] has {own.count(None)} parameters in group {index} that are not those of "
                f"replicas[{number}], so it would not update it; give each its own replica's, {WAY_OUT}"
            )
        for key, value in {**group, "params": own}.items():
            if key != "param_names":
                facts[f"{key!r} of group {index}"] = value.item() if isinstance(value, torch.Tensor) else value
    return facts
