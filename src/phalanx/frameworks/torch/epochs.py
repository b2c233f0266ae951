"""Schedules that are stepped once an epoch: what they are told then, and a warning where that was mostly meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import lr_scheduler

from phalanx.definition import checks
from phalanx.definition.fields import Definition

TINY = 0.1  # of a learning rate after one epoch


class Epochs:
    """Counts steps, and says what an epoch's loss was. Its state follows from losses, so it can be found again.

    Parameters
    ----------
    steps_per_epoch : int
    on_metric : bool
        Whether schedulers wait for the value of a metric instead.
    """

    def __init__(self, steps_per_epoch: int, *, on_metric: bool) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._on_metric = on_metric
        self._steps, self._total, self._metrics = 0, 0.0, 0

    @classmethod
    def of(cls, definition: Definition) -> Epochs | None:
        """What a recipe asks for; None where schedulers are stepped once a step."""
        if definition.schedule_every != "epoch":
            return None
        per_epoch = definition.per_epoch
        assert per_epoch is not None, "the definition refuses epochs of unknown length here"
        return cls(per_epoch, on_metric=definition.schedule_on is not None)

    def count(self, loss: float) -> float | None:
        """Count a step; the mean loss of the epoch if that was its last step, and no metric is waited for."""
        self._steps += 1
        self._total += loss
        if self._steps % self._steps_per_epoch:
            return None
        mean, self._total = self._total / self._steps_per_epoch, 0.0
        return None if self._on_metric else mean

    def reach(self, epoch: int) -> bool:
        """Take note of a metric after an epoch, counted from 0; whether it is news."""
        news, self._metrics = epoch >= self._metrics, max(self._metrics, epoch + 1)
        return news

    def state(self) -> dict[str, Any]:
        """What was counted."""
        return {"steps": self._steps, "total": self._total, "metrics": self._metrics}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._steps, self._total, self._metrics = int(state["steps"]), float(state["total"]), int(state["metrics"])


def warn_of_units(definition: Definition, schedulers: Sequence[Any]) -> None:
    """A recipe that counts epochs, with a schedule that ends within the first, mostly meant epochs there too."""
    if definition.schedule_every is not None or definition.epochs is None:
        return
    per_epoch = definition.per_epoch
    for scheduler in schedulers:
        told = None if per_epoch is None else _horizon(scheduler, per_epoch)
        if per_epoch and told is not None and told[1] < per_epoch and definition.epochs > 1:
            checks.warn(
                f"scheduler made a {type(scheduler).__name__} with {told[0]}={told[1]}, which counts steps here, and "
                f"an epoch has {per_epoch}: the schedule is through before the first epoch is. If epochs are meant, "
                "say schedule_every='epoch'; if steps are, schedule_every='step'"
            )


def is_own(scheduler: Any) -> bool:
    """Whether a scheduler, and what it consists of, is torch's own, and keeps no object of the caller's."""
    parts = [scheduler, *getattr(scheduler, "_schedulers", ())]
    kept = any(any(part.state_dict().get("lr_lambdas", ())) for part in parts)
    return not kept and all(type(part).__module__.startswith("torch.optim") for part in parts)


def _horizon(scheduler: Any, steps_per_epoch: int) -> tuple[str, float] | None:
    """The option that says how long a schedule is, and how long."""
    match scheduler:
        case lr_scheduler.StepLR():
            return "step_size", scheduler.step_size
        case lr_scheduler.MultiStepLR() if scheduler.milestones:
            return "milestones up to", max(scheduler.milestones)
        case lr_scheduler.CosineAnnealingLR():
            return "T_max", scheduler.T_max
        case lr_scheduler.ReduceLROnPlateau():
            return "patience", scheduler.patience
        case lr_scheduler.ExponentialLR() if scheduler.gamma**steps_per_epoch < TINY:
            return "gamma", scheduler.gamma
        case _:
            return None


def exponential(optimizer: Any, lowest: float, growth: float) -> Any:
    """All rates are ``lowest`` first, then ``growth`` times higher from step to step."""
    for group in optimizer.param_groups:
        group["lr"] = lowest
    return lr_scheduler.ExponentialLR(optimizer, growth)
