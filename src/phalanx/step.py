"""What a step is: gradients of the replicas, fold, screen, update. ``state[t+1] = step(state[t], t)``.

Two halves: ``propose`` computes and changes nothing, ``commit`` changes the state. Reads top to bottom. Knows no
device, file, process or clock; the framework computes, the plan decides the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.contracts import Arithmetic, Computed, Steppable, Vector
from phalanx.data import Share
from phalanx.definition import Definition
from phalanx.errors import RunError, UsageError
from phalanx.plan.fold import Fold
from phalanx.plan.shares import share_weights
from phalanx.replica import blame, compute


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


def propose(framework: Steppable, definition: Definition, t: int, shares: Sequence[Share]) -> Proposal:
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
        fold = Fold(definition.replicas, _adder(framework.arithmetic))
        buffers: list[tuple[int, list[Any]]] = []
        returned: set[bool] = set()
        for replica, share in enumerate(shares):
            term = None
            if len(share.samples):
                computed = compute(framework, definition, t, replica, share)
                term = _weigh(framework.arithmetic, definition.replicas, known[replica], computed)
                buffers.append((len(share.samples), computed.buffers))
                returned.add(computed.weight is not None)
            fold.push(replica, term)
        _check_consistent(returned)
        loss, gradient = _mean(framework.arithmetic, t, fold.total())
        norm = framework.norm(gradient)
        accepted = definition.on_nonfinite == "ignore" or _finite(framework.arithmetic, loss, norm, gradient)
        if not accepted and definition.on_nonfinite == "stop":
            raise blame(framework, definition, t, shares)
    except BaseException:
        framework.rewind()
        raise
    return Proposal(loss, norm, gradient, buffers, accepted)


def commit(framework: Steppable, t: int, proposal: Proposal) -> None:
    """Take ``framework`` to the state after step ``t``; a step that is skipped leaves it as it was."""
    if proposal.accepted:
        framework.update(t, proposal.gradient, proposal.buffers)
    else:
        framework.rewind()


def _check_consistent(returned: set[bool]) -> None:
    if len(returned) > 1:
        raise UsageError("loss_fn returned a weight for some replicas and none for others; return it always or never")


def _weigh(arithmetic: Arithmetic, replicas: int, known: float, computed: Computed) -> Term | None:
    """Multiply a replica's loss and gradient by its weight; None if it weighs nothing."""
    weight = known if computed.weight is None else computed.weight
    if weight == 0 or computed.gradient is None:
        return None
    if weight == 1 or replicas == 1:
        return Term(computed.loss, 1.0, computed.gradient)
    return Term(weight * computed.loss, weight, arithmetic.scale(computed.gradient, weight))


def _adder(arithmetic: Arithmetic) -> Callable[[Term, Term], Term]:
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
