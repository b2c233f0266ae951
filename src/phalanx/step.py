"""What a step is: gradients of the replicas, fold, screen, update. ``state[t+1] = step(state[t], t)``.

Two halves: ``propose`` computes and changes nothing, ``commit`` changes the state. Reads top to bottom. Knows no
device, file, process or clock; the framework computes, the plan decides the order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.contracts import Arithmetic, Computed, Steppable, Vector
from phalanx.data import Share
from phalanx.errors import NonFiniteError, PhalanxError, RunError, UsageError, WorkerError, spell_samples
from phalanx.plan import replica_key
from phalanx.plan.fold import Fold
from phalanx.plan.shares import share_weights


@dataclass(frozen=True, slots=True)
class Rules:
    """What a step needs to know of the recipe."""

    replicas: int
    seed: int
    on_nonfinite: str


@dataclass(slots=True)
class Term:
    """A weighted replica, or the sum of several: what the fold adds."""

    loss: float
    weight: float
    gradient: Vector


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
        The mean gradient.
    buffers : list of (samples, buffers)
        What each replica that ran left in the model's buffers.
    accepted : bool
        False if something is not finite and the recipe says to skip such steps.
    """

    loss: float
    norm: float
    gradient: Vector
    buffers: list[tuple[int, list[Any]]]
    accepted: bool


def propose(framework: Steppable, rules: Rules, t: int, shares: Sequence[Share]) -> Proposal:
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
        fold = Fold(rules.replicas, _adder(framework.arithmetic))
        buffers: list[tuple[int, list[Any]]] = []
        returned: set[bool] = set()
        for replica, share in enumerate(shares):
            term = None
            if len(share.samples):
                computed = _compute(framework, rules, t, replica, share)
                term = _weigh(framework.arithmetic, rules, known[replica], computed)
                buffers.append((len(share.samples), computed.buffers))
                returned.add(computed.weight is not None)
            fold.push(replica, term)
        if len(returned) > 1:
            raise UsageError(
                "loss_fn returned a weight for some replicas and none for others; return it always or never"
            )
        loss, gradient = _mean(framework.arithmetic, t, fold.total())
        norm = framework.norm(gradient)
        accepted = rules.on_nonfinite == "ignore" or _finite(framework.arithmetic, loss, norm, gradient)
        if not accepted and rules.on_nonfinite == "stop":
            raise _blame(framework, rules, t, shares)
    except BaseException:
        framework.rewind()
        raise
    return Proposal(loss, norm, gradient, buffers, accepted)


def commit(framework: Steppable, proposal: Proposal) -> None:
    """Take ``framework`` to the state after the step."""
    if proposal.accepted:
        framework.update(proposal.gradient, proposal.loss, proposal.buffers)
    else:
        framework.skip(proposal.loss)


def _compute(framework: Steppable, rules: Rules, t: int, replica: int, share: Share) -> Computed:
    try:
        return framework.gradient(replica_key(rules.seed, t, replica, rules.replicas), share)
    except PhalanxError:
        raise
    except Exception as error:
        raise WorkerError(
            f"{type(error).__name__} in user code at step {t}, replica {replica}, samples "
            f"{spell_samples(share.samples)}: {error}",
            step=t,
            replica=replica,
            samples=share.samples,
        ) from error


def _weigh(arithmetic: Arithmetic, rules: Rules, known: float, computed: Computed) -> Term | None:
    """Multiply a replica's loss and gradient by its weight; None if it weighs nothing."""
    weight = known if computed.weight is None else computed.weight
    if weight == 0 or computed.gradient is None:
        return None
    if weight == 1 or rules.replicas == 1:
        return Term(computed.loss, 1.0, computed.gradient)
    return Term(weight * computed.loss, weight, arithmetic.scale(computed.gradient, weight))


def _adder(arithmetic: Arithmetic) -> Any:
    def add(left: Term, right: Term) -> Term:
        gradient = arithmetic.add(left.gradient, right.gradient)
        return Term(left.loss + right.loss, left.weight + right.weight, gradient)

    return add


def _mean(arithmetic: Arithmetic, t: int, total: Term | None) -> tuple[float, Vector]:
    if total is None:
        raise RunError(
            f"every replica of step {t} has weight 0: loss_fn counted nothing to average over in the whole batch; "
            "leave such batches out, or raise batch_size",
            step=t,
        )
    if total.weight == 1:
        return total.loss, total.gradient
    return total.loss / total.weight, arithmetic.divide(total.gradient, total.weight)


def _finite(arithmetic: Arithmetic, loss: float, norm: float, gradient: Vector) -> bool:
    """The norm screens (one pass); elements are looked at only when it is not finite: it may merely overflow."""
    return math.isfinite(loss) and (math.isfinite(norm) or arithmetic.finite(gradient))


def _blame(framework: Steppable, rules: Rules, t: int, shares: Sequence[Share]) -> NonFiniteError:
    """Name the replica. A replica-step is a pure function, so it can simply be computed again."""
    for replica, share in enumerate(shares):
        if not len(share.samples):
            continue
        computed = _compute(framework, rules, t, replica, share)
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
        f"the sum of the replicas' gradients overflows at step {t}, though each is finite; nothing was updated. "
        "Lower the loss scale or the weights that loss_fn returns",
        step=t,
    )
