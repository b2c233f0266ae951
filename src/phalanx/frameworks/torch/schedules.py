"""The schedulers of a run: made, and stepped in every worker on the options of whole parameter groups.

No worker waits for another, so what a scheduler does must follow from step and loss alone. Random numbers that it
draws are keyed by the step. Before each update workers compare what their schedulers set. Parameters and optimizer
state lie in memory that all workers share and change, so they are out of a scheduler's reach while it is stepped.
"""

from __future__ import annotations

import functools
import json
import math
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from phalanx.definition import checks, generators
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError, safe_str
from phalanx.plan.keys import update_key

Named = Sequence[tuple[str, torch.nn.Parameter]]
EXAMPLE = "optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)"
AFTER = "do what depends on weights after the update, in optimizer.register_step_post_hook(lambda optimizer, *_: ...)"
WITHHELD = (
    "while it is stepped, the parameters of groups and the optimizer's state are None: every worker steps it, at its "
    "own pace, and has only a part of those. To freeze or thaw parameters, keep them when the scheduler is made "
    f"(self.layers = optimizer.param_groups[0]['params']); {AFTER}"
)
TINY = 0.1  # of a learning rate, left after one epoch
PURE = (  # those of torch without functions of the user's, which might draw random numbers
    lr_scheduler.StepLR, lr_scheduler.MultiStepLR, lr_scheduler.ExponentialLR, lr_scheduler.CosineAnnealingLR,
    lr_scheduler.CosineAnnealingWarmRestarts, lr_scheduler.OneCycleLR, lr_scheduler.LinearLR, ReduceLROnPlateau,
)  # fmt: skip
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
PER_PROCESS = (torch.nn.Parameter, torch.nn.Module, *GENERATORS)  # each process has its own


class Schedules:
    """Steps schedulers, and knows which parameters each group has.

    Parameters
    ----------
    definition : Definition
        Its ``scheduler`` is called with each optimizer.
    optimizers : sequence of torch.optim.Optimizer
    named : sequence of (str, torch.nn.Parameter)
        All parameters of the model.
    buffers : sequence of (str, torch.Tensor)
        All its buffers.
    """

    def __init__(
        self,
        definition: Definition,
        optimizers: Sequence[torch.optim.Optimizer],
        named: Named,
        buffers: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        make, by_epochs = definition.scheduler, definition.schedule_every == "epoch"
        self._epoch_ended = definition.epoch_ended if by_epochs else None
        self._on_metric = definition.schedule_on is not None
        self._counted = {"steps": 0, "total": 0.0, "metrics": 0}  # where epochs are counted; follows from losses
        self._seed, self._steps = definition.seed, 0
        self._optimizers, self._tensors = optimizers, [*named, *buffers]
        self._parameters = [parameter for _, parameter in named]
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._schedulers = [] if make is None else [_made(make, optimizer) for optimizer in optimizers]
        self._drawing = [scheduler for scheduler in self._schedulers if type(scheduler) not in PURE]
        self._owned = generators.find({"scheduler": self._drawing})
        self.own = all(map(is_own, self._schedulers))
        for optimizer in optimizers:  # an update may be skipped, which torch would take for a wrong order
            optimizer._opt_called = True  # type: ignore[attr-defined]
        warn_of_units(definition, self._schedulers)
        self._grouped = [list(optimizer.param_groups) for optimizer in optimizers]
        self._groups = [group for groups in self._grouped for group in groups]
        self.members = [list(group["params"]) for group in self._groups]
        # A scheduler may have kept the lists in which it found parameters.
        self.restrict(set(_homes(optimizers, named)))

    def restrict(self, mine: set[int]) -> None:
        """Leave the optimizers only the parameters with these ids."""
        for group, parameters in zip(self._groups, self.members, strict=True):
            group["params"] = [parameter for parameter in parameters if id(parameter) in mine]

    @functools.cached_property
    def options_checksum(self) -> tuple[float, float]:
        """What workers compare before an update: a checksum of options and what is frozen; the first group's rate."""
        lr = torch.as_tensor(self._groups[0].get("lr", math.nan), dtype=torch.float64).mean()
        options = [_options(group) for group in self._groups]
        return float(zlib.crc32(ENCODE([options, self._retrained()]).encode())), lr.item()

    def _retrained(self) -> dict[int, bool]:
        """What was frozen (False) or thawed since the optimizers were made, by the parameter's number."""
        now = (parameter.requires_grad for parameter in self._parameters)
        return {
            number: is_now for number, (is_now, was) in enumerate(zip(now, self._trained, strict=True)) if is_now != was
        }

    def step(self, value: float, epoch: int | None = None) -> None:
        """Count a step that was done or skipped, and had this loss; step all schedulers if they are due.

        With an ``epoch`` the value is that of a metric after it, with which all are stepped once.

        Raises
        ------
        UsageError
            A scheduler used parameters or the state of an optimizer.
        """
        if epoch is None:
            self._steps += 1
            if self._schedulers and (due := value if self._epoch_ended is None else self._count(value)) is not None:
                self._step_all(due)
        elif self._schedulers and self._epoch_ended is not None and epoch >= self._counted["metrics"]:
            self._counted["metrics"] = epoch + 1
            self._step_all(value)

    def _count(self, loss: float) -> float | None:
        """Count a step; the mean loss of the epoch if that was its last step, and no metric is waited for."""
        assert self._epoch_ended is not None, "who asks has looked"
        self._counted["steps"] += 1
        self._counted["total"] += loss
        if not (length := self._epoch_ended(self._counted["steps"])):
            return None
        mean, self._counted["total"] = self._counted["total"] / length, 0.0
        return None if self._on_metric else mean

    def _step_all(self, loss: float) -> None:
        vars(self).pop("options_checksum", None)
        if self._drawing:
            generators.seed(update_key(self._seed, self._steps - 1), self._owned)
        versions = [tensor._version for _, tensor in self._tensors]
        states = [optimizer.state for optimizer in self._optimizers]
        members = [group["params"] for group in self._groups]
        self._put([None] * len(states), [None] * len(members))
        try:
            for scheduler in self._schedulers:
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step(loss)
                else:
                    scheduler.step()
            self._check(versions)
        except (TypeError, AttributeError) as error:
            raise UsageError(f"scheduler raised {type(error).__name__}: {safe_str(error)}; {WITHHELD}") from error
        finally:
            self._put(states, members)

    def _put(self, states: Sequence[Any], members: Sequence[Any]) -> None:
        for optimizer, state, groups in zip(self._optimizers, states, self._grouped, strict=True):
            optimizer.state = state
            optimizer.param_groups[:] = groups  # also brings back what a refused scheduler dropped
        for group, parameters in zip(self._groups, members, strict=True):
            group["params"] = parameters

    def _check(self, versions: list[int]) -> None:
        """Refuse schedulers that replaced what was withheld, or wrote weights that they had from elsewhere."""
        groups = [group.get("params", versions) for optimizer in self._optimizers for group in optimizer.param_groups]
        states = [optimizer.state for optimizer in self._optimizers]
        if [states, groups] != [[None] * len(states), [None] * len(self._groups)]:
            raise UsageError(f"scheduler replaced what is not its own; {WITHHELD}")
        now = [tensor._version for _, tensor in self._tensors]
        if written := [name for (name, _), *pair in zip(self._tensors, versions, now, strict=True) if len({*pair}) > 1]:
            raise UsageError(
                f"scheduler wrote parameter or buffer {written[0]!r}; every worker steps the scheduler, and they "
                f"share the weights: {AFTER}"
            )

    def options(self) -> list[Any]:
        """Options of groups, states of schedulers, how many steps there were, and what was frozen or thawed.

        Plain values and tensors. Not the model and generators that a scheduler keeps: each process has its own.
        """
        groups = [[_options(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        states = [
            {key: value for key, value in scheduler.state_dict().items() if not _per_process(value)}
            for scheduler in self._schedulers
        ]
        states += [] if self._epoch_ended is None else [dict(self._counted)]
        return [groups, states, self._steps, self._retrained()]

    def take_options(self, groups: list[Any], states: list[Any], steps: int, trained: dict[int, bool]) -> None:
        """Continue with the ``options`` of another process."""
        vars(self).pop("options_checksum", None)
        self._steps = int(steps)
        for number, (parameter, was) in enumerate(zip(self._parameters, self._trained, strict=True)):
            parameter.requires_grad_(trained.get(number, was))
        for optimizer, theirs in zip(self._optimizers, groups, strict=True):
            for group, values in zip(optimizer.param_groups, theirs, strict=True):
                group.update(values)
        if self._epoch_ended is not None:
            *states, counted = states
            self._counted = {name: type(value)(counted[name]) for name, value in self._counted.items()}
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _plain(value: Any) -> Any:
    """An option that JSON does not know, as numbers; None if it cannot be compared."""
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) else None


ENCODE = json.JSONEncoder(default=_plain, skipkeys=True).encode


def _per_process(value: Any) -> bool:
    """Whether a value is, or contains, what each process has of its own."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    return isinstance(value, PER_PROCESS) or any(map(_per_process, inner))


def _homes(optimizers: Sequence[torch.optim.Optimizer], named: Named) -> dict[int, int]:
    """The number of each parameter's only optimizer, by id. Parameters must be the model's."""
    names = {id(parameter): name for name, parameter in named}
    homes: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            for at in map(id, group["params"]):
                if at not in names:
                    raise UsageError(
                        f"optimizer made a {kind} over other parameters than the model's: it must use the named "
                        f"parameters that it is called with, as in {EXAMPLE}"
                    )
                if at in homes:
                    first = type(optimizers[homes[at]]).__name__
                    raise UsageError(
                        f"optimizer put parameter {names[at]!r} into {first} and into {kind}; give each to one"
                    )
                homes[at] = number
    return homes


def _made(make: Callable[..., Any], optimizer: torch.optim.Optimizer) -> LRScheduler | ReduceLROnPlateau:
    try:
        scheduler = make(optimizer)
    except Exception as error:
        raise UsageError(
            f"scheduler raised {type(error).__name__}: {safe_str(error)}; it is called with the optimizer, as in "
            "scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 30)"
        ) from error
    if not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
        raise UsageError(
            f"scheduler returned a {type(scheduler).__name__}; it must return a torch.optim.lr_scheduler.LRScheduler"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UsageError(
            f"scheduler returned a {type(scheduler).__name__} of another optimizer, so it would do nothing; make it "
            "with the optimizer that it is called with"
        )
    return scheduler


def warn_of_units(definition: Definition, schedulers: Sequence[Any]) -> None:
    """Warn if a recipe counts epochs, and a schedule ends within the first: its lengths were probably epochs, too."""
    if definition.schedule_every is not None or definition.epochs is None:
        return
    per_epoch = definition.per_epoch
    for scheduler in schedulers:
        span = None if per_epoch is None else _horizon(scheduler, per_epoch)
        if per_epoch and span is not None and span[1] < per_epoch and definition.epochs > 1:
            checks.warn(
                f"scheduler made a {type(scheduler).__name__} with {span[0]}={span[1]}, which counts steps here, and "
                f"an epoch has {per_epoch}: the schedule is through before the first epoch is. If epochs are meant, "
                "say schedule_every='epoch'; if steps are, schedule_every='step'"
            )


def is_own(scheduler: Any) -> bool:
    """Whether a scheduler, and what it consists of, is torch's own, and keeps no object of the caller's."""
    parts = [scheduler, *getattr(scheduler, "_schedulers", ())]
    kept = any(any(part.state_dict().get("lr_lambdas", ())) for part in parts)
    return not kept and all(type(part).__module__.startswith("torch.optim") for part in parts)


def _horizon(scheduler: Any, steps_per_epoch: int) -> tuple[str, float] | None:
    """The option that sets the length of a schedule, and the length."""
    options = vars(scheduler)
    for name in ("step_size", "milestones", "T_max", "patience"):
        if length := options.get(name):
            return name, max(length) if name == "milestones" else length
    gamma = options.get("gamma", 1.0)
    return ("gamma", gamma) if gamma**steps_per_epoch < TINY else None


def exponential(optimizer: Any, lowest: float, growth: float) -> Any:
    """All rates are ``lowest`` first, then ``growth`` times higher from step to step."""
    for group in optimizer.param_groups:
        group["lr"] = lowest
    return lr_scheduler.ExponentialLR(optimizer, growth)
