"""What a step is: gradients of the replicas, fold, screen, update. ``state[t+1] = step(state[t], t)``.

Two halves: ``propose`` computes and changes nothing, ``commit`` changes the state. Reads top to bottom; every worker
runs the same lines and meets the others through its link. Knows no device, file, process or clock; the framework
computes, the plan decides the order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.definition.data import Share
from phalanx.definition.fields import Definition
from phalanx.errors import NonFiniteError, PhalanxError, RunError, UsageError, WorkerError, spell_samples
from phalanx.plan import replica_key
from phalanx.plan.fold import fold_values
from phalanx.plan.shares import share_weights
from phalanx.seams import Arithmetic, Computed, Framework, Link, Part, Steppable, Vector
from phalanx.surroundings import interrupts

ABSENT = Part(0.0, 0.0, returned=False, samples=0)


@dataclass(slots=True)
class Proposal:
    """The first half of a step, done: everything computed, nothing changed yet.

    Attributes
    ----------
    loss : float
        Weighted mean of the replicas' losses.
    norm : float
        2-norm of the mean gradient, before clipping.
    gradient : Vector
        The mean gradient, as far as this worker owns it.
    accepted : bool
        False if something is not finite and the recipe says to skip such steps.
    """

    loss: float
    norm: float
    gradient: Vector
    accepted: bool


def propose(framework: Steppable, link: Link, definition: Definition, t: int, shares: Sequence[Share]) -> Proposal:
    """Compute step ``t``: gradients of the replicas, fold, screen.

    Raises
    ------
    WorkerError
        User code raised.
    NonFiniteError
        A loss or gradient is not finite and ``on_nonfinite="stop"``.

    After any error the state is the one before the step.
    """
    try:
        known = share_weights([len(share.samples) for share in shares])
        ran = [replica for replica in link.hosted if len(shares[replica].samples)]
        computing = begin(framework, definition, t, ran, shares)
        mine = [
            _part(framework, link, definition, computing, t, replica, shares[replica], known[replica])
            for replica in link.hosted
        ]
        parts = link.all_gather(mine)
        _check_consistent(parts)
        loss, weight = _mean(t, parts)
        gradient = link.mean(weight)
        norm = link.norm(gradient)
        accepted = definition.on_nonfinite == "ignore" or _finite(framework.arithmetic, link, loss, norm, gradient)
        if not accepted and definition.on_nonfinite == "stop":
            raise blame(framework, definition, t, shares, link.hosted)
    except BaseException:
        framework.rewind()
        raise
    return Proposal(loss, norm, gradient, accepted)


def commit(framework: Steppable, link: Link, t: int, proposal: Proposal) -> None:
    """Take the state to the one after step ``t``; a step that is skipped leaves it as it was."""
    if not proposal.accepted:
        framework.rewind()
    link.commit(t, proposal.gradient if proposal.accepted else None)


def _part(
    framework: Steppable,
    link: Link,
    definition: Definition,
    computing: Iterator[Computed],
    t: int,
    replica: int,
    share: Share,
    known: float,
) -> Part:
    """Take the next replica's gradient, weigh it and hand it to the fold."""
    if not len(share.samples):
        link.push(replica, 0, None, [])
        return ABSENT
    computed = compute(computing, t, replica, share)
    part = _weigh(framework.arithmetic, definition.replicas, known, computed, len(share.samples))
    link.push(replica, len(share.samples), computed.gradient if part.weight else None, computed.buffers)
    return part


def _weigh(arithmetic: Arithmetic, replicas: int, known: float, computed: Computed, samples: int) -> Part:
    """Multiply a replica's loss and gradient by its weight; a lone replica is multiplied by nothing."""
    returned = computed.weight is not None
    weight = known if computed.weight is None else computed.weight
    if weight == 0 or computed.gradient is None:
        return Part(0.0, 0.0, returned, samples)
    if weight == 1 or replicas == 1:
        return Part(computed.loss, 1.0, returned, samples)
    computed.gradient = arithmetic.scale(computed.gradient, weight)
    return Part(weight * computed.loss, weight, returned, samples)


def _check_consistent(parts: Sequence[Part]) -> None:
    if len({part.returned for part in parts if part.samples}) > 1:
        raise UsageError("loss_fn returned a weight for some replicas and none for others; return it always or never")


def _mean(t: int, parts: Sequence[Part]) -> tuple[float, float]:
    """The mean loss, and the sum of weights that the gradient is divided by."""
    loss = fold_values([part.loss if part.weight else None for part in parts], operator.add)
    weight = fold_values([part.weight or None for part in parts], operator.add)
    if loss is None or weight is None:
        raise RunError(
            f"every replica of step {t} has weight 0: loss_fn counted nothing to average over in the whole batch; "
            "leave such batches out, or raise batch_size",
            step=t,
        )
    return (loss if weight == 1 else loss / weight), weight


def _finite(arithmetic: Arithmetic, link: Link, loss: float, norm: float, gradient: Vector) -> bool:
    """The norm screens (one pass); elements are looked at only when it is not finite: it may merely overflow."""
    return math.isfinite(loss) and (math.isfinite(norm) or link.all_true(arithmetic.finite(gradient)))


def begin(
    framework: Steppable, definition: Definition, t: int, replicas: Sequence[int], shares: Sequence[Share]
) -> Iterator[Computed]:
    """Gradients of these replicas in step ``t``, each computed when it is asked for."""
    keys = [replica_key(definition.seed, t, replica, definition.replicas) for replica in replicas]
    return framework.gradients([(key, shares[replica]) for key, replica in zip(keys, replicas, strict=True)])


def compute(computing: Iterator[Computed], t: int, replica: int, share: Share) -> Computed:
    """What one replica computes in step ``t``; what user code raises becomes a WorkerError with the address."""
    try:
        with interrupts.breakable():
            return next(computing)
    except PhalanxError as error:
        error.add_note(f"at step {t}, replica {replica}, samples {spell_samples(share.samples)}")
        raise
    except Exception as error:
        raise WorkerError(
            f"{type(error).__name__} in user code at step {t}, replica {replica}, samples "
            f"{spell_samples(share.samples)}: {error}",
            step=t,
            replica=replica,
            samples=share.samples,
        ) from error


def measure(framework: Framework, metric_fn: Callable[..., Any], key: int, share: Share) -> tuple[float, float]:
    """(mean, weight) of a metric over one chunk; what user code raises becomes a WorkerError with the samples."""
    try:
        return framework.measure(metric_fn, key, share)
    except PhalanxError:
        raise
    except Exception as error:
        samples = spell_samples(share.samples)
        message = f"{type(error).__name__} in user code while evaluating samples {samples}: {error}"
        raise WorkerError(message, samples=share.samples) from error


def blame(
    framework: Steppable, definition: Definition, t: int, shares: Sequence[Share], hosted: Sequence[int]
) -> NonFiniteError:
    """Name the replica. A replica-step is a pure function, so it can simply be computed again."""
    for replica in hosted:
        share = shares[replica]
        if not len(share.samples):
            continue
        computed = compute(begin(framework, definition, t, [replica], shares), t, replica, share)
        if computed.gradient is None:
            continue
        what = None if math.isfinite(computed.loss) else f"the loss is {computed.loss}"
        if what is None and not framework.arithmetic.finite(computed.gradient):
            what = "the gradient has values that are not finite"
        if what is not None:
            return NonFiniteError(
                f"{what} at step {t}, replica {replica}, samples {spell_samples(share.samples)}; nothing was updated. "
                "Look at these samples, lower the learning rate or set max_norm; on_nonfinite='skip' goes on without "
                "such steps",
                step=t,
                replica=replica,
                samples=share.samples,
            )
    return NonFiniteError(
        f"the mean loss or gradient of step {t} is not finite, though no replica's is when computed again; nothing was "
        "updated. Either their sum overflows (lower the loss or the weights that loss_fn returns), or the model does "
        "not compute the same twice",
        step=t,
    )
