"""Evaluations: what to measure, on which samples, and when. ``metrics`` has how it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.definition import checks
from phalanx.definition.checks import answering
from phalanx.definition.data import open_data, unframed
from phalanx.definition.metrics import Metrics
from phalanx.errors import UsageError
from phalanx.plan.orders import Plan

DEFAULT_BATCH = 256
WATCHED = (0, *(10**power for power in range(2, 16)))  # evaluations of which a chunk is measured again
FUNCTIONS = {
    "forward_fn": "lambda model, batch: model(batch[0])",
    "target_fn": "lambda batch: batch['label']",
    "collate_fn": "lambda samples: ...",
}


@answering(
    every="it is called every_epochs or every_steps",
    metric="it is called metric_fn",
    metrics="it is called metric_fn, which may be a list or dict of them",
    dataset="it is called data",
)
@dataclass(frozen=True)
class Evaluation:
    """An evaluation after every epoch, or as often as its arguments say, and after the last step.

    Parameters
    ----------
    metric_fn : callable, metric object, "loss", or list or dict of them
        A function ``metric_fn(output, target)`` returns the mean over the samples that it is given, or (mean, weight).
        "loss" is the recipe's own loss, with its weights; of phases, the first that is done in every step.
        For what is no mean over samples (F1, AUC), pass ``phalanx.whole(function)`` or an object of torchmetrics.
        Several are named by their keys, else by ``__name__``.
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
    forward_fn, target_fn, collate_fn : callable, optional
        For this evaluation, in place of the recipe's. For jax, ``forward_fn`` is called with what ``make_model``
        returned, and x. tinygrad refuses ``forward_fn``.

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
    forward_fn: Callable[..., Any] | None = None
    target_fn: Callable[..., Any] | None = None
    collate_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        metrics = self.metrics(single=False)
        object.__setattr__(self, "data", check_samples(self.data, self.batch_size))
        if len(open_data(self.data, "evaluation data")) > self.batch_size:
            metrics.check_merges()
        for name, example in FUNCTIONS.items():
            checks.function(f"{name} of an evaluation", getattr(self, name), f"{name}={example}")
        checks.integer("every_epochs", self.every_epochs, least=1)
        if self.every_steps is not None:
            checks.integer("every_steps", self.every_steps, least=1)

    def metrics(self, *, single: bool) -> Metrics:
        """Its metrics; ``single``: the recipe hands samples over as they are."""
        return Metrics(self.metric_fn, self.forward_fn, self.target_fn, self.collate_fn, single=single)

    def full(self, metric: str) -> str:
        """The name of a metric in results and reports."""
        return f"{self.name}/{metric}" if self.name else metric

    def is_due(self, steps: int, epoch: int, *, epoch_ended: bool) -> bool:
        """Whether it is due after so many steps, of which the last was of this epoch."""
        if self.every_steps is not None:
            return steps % self.every_steps == 0
        return epoch_ended and (epoch + 1) % self.every_epochs == 0

    def following(self, steps: int, plan: Plan) -> int:
        """After how many steps it is due next, once ``steps`` are done."""
        if self.every_steps is not None:
            return (steps // self.every_steps + 1) * self.every_steps
        return plan.start((plan.epoch(steps) // self.every_epochs + 1) * self.every_epochs)


def check_samples(data: Any, batch_size: Any) -> Any:
    """The data as engines take it; refuse what cannot be evaluated, before anything is computed."""
    data = unframed(data, "evaluation data")
    open_data(data, "evaluation data")
    checks.integer("batch_size", batch_size, least=1)
    return data


def names_of(evaluations: Iterable[Evaluation], before: Iterable[Any] = ()) -> dict[str, bool]:
    """Full names in their order, and whether a value of that name will come: objects return one or several.

    ``before``: what was evaluated before a resume, as names of those values must mean the same as without a kill.
    """
    names = {each.full(name): one for each in evaluations for name, one in each.metrics(single=False).names.items()}
    several = tuple(f"{name}/" for name, one in names.items() if not one)
    return names | {each.name: True for each in before if each.name.startswith(several)}


def meant(metric: str, names: Iterable[str]) -> str | None:
    """The name that ``metric`` means: itself, or the only one that ends in it, as "f1" means "test/f1".

    Raises
    ------
    UsageError
        Several end in it.
    """
    known = list(names)
    ending = [metric] if metric in known else [name for name in known if name.endswith(f"/{metric}")]
    if len(ending) > 1:
        raise UsageError(f"metric {metric!r} may be {' or '.join(ending)}; name one of them in full")
    return ending[0] if ending else None


def deciding(metrics: Iterable[str], names: Mapping[str, bool]) -> frozenset[str]:
    """Of the names of metrics, those that ``metrics`` mean, or an object's that may compute what they mean."""
    found = set[str]()
    for metric in metrics:
        several = [name for name, alone in names.items() if not alone]
        exact = [name for name in names if meant(metric, [name])]
        found.update(exact or [name for name in several if metric.startswith(f"{name}/")] or several)
    return frozenset(found)


def check_metric(argument: str, metric: str, names: Mapping[str, bool], *, told: bool = False) -> None:
    """Refuse a metric that no evaluation has; ``names``: as of ``names_of``; ``told``: no more of them will come."""
    known = [name for name, one in names.items() if one]
    if meant(metric, names) not in known and (told or len(known) == len(names)):
        raise UsageError(f"{argument} is {metric!r}, but what is evaluated is {', '.join(known)}; name one of those")


def listed_evaluations(evaluation: Any) -> tuple[Evaluation, ...]:
    """The evaluations in what was passed as ``evaluation``; keys of a dict become names.

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
