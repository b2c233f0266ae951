"""Plain records of what happened in a run. Knows no framework, process or file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


class PhaseReport(NamedTuple):
    """What one phase of a finished step was: its loss, the norm of its gradient before clipping, its learning rate."""

    loss: float
    grad_norm: float
    lr: float


class StepReport(NamedTuple):
    """What one finished step was.

    Attributes
    ----------
    step : int
        The step that just ended, counted from 0.
    epoch : int or None
        The pass over the data that it belongs to, counted from 0; None for batches that the caller brought.
    loss : float
        Weighted mean of the replicas' losses.
    grad_norm : float
        2-norm of the mean gradient over all parameters, before clipping.
    lr : float
        Learning rate of the first parameter group in this step; NaN where the optimizer keeps it to itself.
    samples : int
        Samples in this step, over all replicas.
    seconds : float
        Wall time of this step.
    metric : float or None
        Value of the first metric of the evaluation that followed this step, where one was due.
    metrics : mapping of str to float
        Values of all metrics of all evaluations that followed this step, by name.
    parts : tuple of float
        Loss and weight of each replica, in turn: two numbers each; of one phase after the other.
    phases : mapping of str to PhaseReport
        Of a step with phases, those that were done in it, by name; ``loss``, ``grad_norm`` and ``lr`` are those of the
        first phase that is done in every step.
    """

    step: int
    epoch: int | None
    loss: float
    grad_norm: float
    lr: float
    samples: int
    seconds: float
    metric: float | None = None
    metrics: Mapping[str, float] = MappingProxyType({})
    parts: tuple[float, ...] = ()
    phases: Mapping[str, PhaseReport] = MappingProxyType({})


class Incident(NamedTuple):
    """Something that happened to a worker.

    Attributes
    ----------
    seconds : float
        When, on the clock of ``time.perf_counter``.
    kind : str
        "death", "replaced", or "rollback" for all of them.
    worker, step : int
        Which worker, in which step; for a rollback the step whose update broke off; -1 where nobody can tell who.
    why : str
        What ended it, or was found.
    """

    seconds: float
    kind: str
    worker: int
    step: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation: after how many finished steps, its value, and the metric function's name."""

    steps: int
    value: float
    name: str
