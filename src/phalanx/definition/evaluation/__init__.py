"""An evaluation that is due during training: what to measure, on which samples, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.definition import checks
from phalanx.definition.checks.elsewhere import answering
from phalanx.definition.data import open_data
from phalanx.definition.evaluation.metrics import Metrics
from phalanx.errors import UsageError

DEFAULT_BATCH = 256


@answering(
    every="it is called every_epochs or every_steps",
    metric="it is called metric_fn",
    metrics="it is called metric_fn, which may be a list or dict of them",
    dataset="it is called data",
)
@dataclass(frozen=True)
class Evaluation:
    """An evaluation that is due after every epoch, or as often as it says, and after the last step.

    Parameters
    ----------
    metric_fn : callable, metric object, or list or dict of them
        A function ``metric_fn(output, target)`` returns the mean over the samples that it is given, or (mean, weight).
        What is no mean over samples (F1, AUC): ``phalanx.whole(function)``, or an object of torchmetrics. Several are
        named by their keys, else by ``__name__``.
    data : Any
        Held-out samples, in any form that a recipe's data may have.
    batch_size : int, default 256
        Samples at once. One by one where the recipe's own ``batch_size`` is None.
    every_epochs : int, default 1
        Due at the end of every so many epochs.
    every_steps : int, optional
        Due after every so many steps instead.
    name : str, optional
        Put before the metrics' names, as in "test/accuracy": for several evaluations.

    Raises
    ------
    UsageError
        An argument is wrong; the message names it.
    """

    metric_fn: Any
    data: Any
    batch_size: int = DEFAULT_BATCH
    every_epochs: int = 1
    every_steps: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        check_evaluation(self.metric_fn, self.data, self.batch_size)
        checks.integer("every_epochs", self.every_epochs, least=1)
        if self.every_steps is not None:
            checks.integer("every_steps", self.every_steps, least=1)

    def spelled(self, metric: str) -> str:
        """What a metric of this evaluation is called in histories and reports."""
        return f"{self.name}/{metric}" if self.name else metric

    def is_due(self, steps: int, epoch: int, *, epoch_ended: bool) -> bool:
        """Whether it is due after so many steps, of which the last was of this epoch."""
        if self.every_steps is not None:
            return steps % self.every_steps == 0
        return epoch_ended and (epoch + 1) % self.every_epochs == 0

    def period(self, steps_per_epoch: int) -> int:
        """Steps from one time to the next."""
        return self.every_epochs * steps_per_epoch if self.every_steps is None else self.every_steps


def check_evaluation(metric_fn: Any, data: Any, batch_size: Any) -> None:
    """Refuse what cannot be evaluated, before anything is computed."""
    Metrics(metric_fn)
    open_data(data, "evaluation data")
    checks.integer("batch_size", batch_size, least=1)


def listed_evaluations(evaluation: Any) -> tuple[Evaluation, ...]:
    """What was passed as ``evaluation``, one by one; keys of a dict become names.

    Raises
    ------
    UsageError
        It is something else, or several have one name.
    """
    if evaluation is None:
        return ()
    if isinstance(evaluation, Mapping):
        items: list[Any] = [
            replace(item, name=str(name)) if isinstance(item, Evaluation) else item for name, item in evaluation.items()
        ]
    else:
        items = list(evaluation) if isinstance(evaluation, (list, tuple)) else [evaluation]
    for item in items:
        if not isinstance(item, Evaluation):
            raise UsageError(
                f"evaluation has a {type(item).__name__}; it must be a phalanx.Evaluation(metric_fn, data), a list or "
                "dict of them, or None: say what is measured, and on what, as in "
                "evaluation=phalanx.Evaluation(metric_fn, (x, y)) with metric_fn(output, target)"
            )
    if len({item.name for item in items}) < len(items):
        raise UsageError("evaluation has several of one name; give them names: {'test': ..., 'train': ...}")
    return tuple(items)
