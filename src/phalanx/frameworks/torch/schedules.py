"""The schedulers of a run: made, and stepped on whole parameter groups in every worker, though each updates a part.

Most schedulers change options and look at nothing else, so every worker steps its own, and none waits for another. One
that looks at parameters (freezes them, takes their norm, moves them to another group) is noticed by the lists that it
looks into: what it came to is then told after each step, because it cannot be done again with other weights. Weights
and optimizer state lie in memory that all workers share, so a scheduler that writes weights, or looks at the state, is
refused in every engine.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.torch.epochs import Epochs, is_own, warn_of_units
from phalanx.frameworks.torch.replica.buffers import bytes_of
from phalanx.frameworks.torch.watched import WAY_OUT, Watched, Withheld, refuse_state

Named = Sequence[tuple[str, torch.nn.Parameter]]
Groups = list[list[list[torch.nn.Parameter]]]  # by optimizer and group
EXAMPLE = "optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)"
VERSION = operator.attrgetter("_version")
PARAMETER = "phalanx.parameter"  # what stands for one in the state of a scheduler


class Schedules:
    """Steps schedulers, and knows which parameters each group has.

    Parameters
    ----------
    definition : Definition
        Its ``scheduler`` is called with each optimizer.
    optimizers : sequence of torch.optim.Optimizer
    named : sequence of (str, torch.nn.Parameter)
        All parameters of the model.

    Attributes
    ----------
    touched : bool
        Whether a scheduler looked at parameters so far.
    """

    def __init__(self, definition: Definition, optimizers: Sequence[torch.optim.Optimizer], named: Named) -> None:
        make, self._epochs = definition.scheduler, Epochs.of(definition)
        self.touched = False
        self._optimizers, self._named = optimizers, named
        self._parameters = [parameter for _, parameter in named]
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._labels = {id(parameter): name for name, parameter in named}
        self._mine: set[int] | None = None
        self._withheld, self._stepping = Withheld(), False
        self._before: list[tuple[int, int, torch.Tensor]] | None = None
        self._take_groups()
        self._first = self._structure()
        self._deal()
        self._show()
        self._schedulers = [] if make is None else [_made(make, optimizer) for optimizer in optimizers]
        self.own = all(map(is_own, self._schedulers))
        warn_of_units(definition, self._schedulers)
        self._always = self.touched  # it may have kept parameters when it was made, and look at those
        self._settle()

    def restrict(self, mine: set[int]) -> None:
        """Leave the optimizers only the parameters with these ids, except while schedulers run."""
        self._mine = mine
        self._deal()

    def group_of(self, optimizer: int, parameter: torch.Tensor) -> dict[str, Any] | None:
        """The group of an optimizer that a parameter is in, whoever updates it."""
        groups = zip(self._optimizers[optimizer].param_groups, self._groups[optimizer], strict=True)
        return next((group for group, members in groups if id(parameter) in map(id, members)), None)

    def step(self, loss: float, *, expected: bool) -> None:
        """Count a step; step all if they are due. Not ``expected``: no update came before, which is right.

        Raises
        ------
        UsageError
            A scheduler wrote weights, or looked at the state of an optimizer.
        """
        if self._schedulers and (value := loss if self._epochs is None else self._epochs.count(loss)) is not None:
            self._step_all(value, expected=expected)

    def step_metric(self, epoch: int, value: float, *, expected: bool) -> None:
        """Step all with the value of a metric, once for an epoch. Raises as ``step`` does."""
        if self._schedulers and self._epochs is not None and self._epochs.reach(epoch):
            self._step_all(value, expected=expected)

    def _step_all(self, loss: float, *, expected: bool) -> None:
        versions = self._versions()
        states = [optimizer.state for optimizer in self._optimizers]
        self._show()
        for optimizer in self._optimizers:
            optimizer.state = self._withheld
        self._stepping = True
        if self._always:
            self._touch()
        try:
            if expected:
                self._step(loss)
            else:
                with warnings.catch_warnings():  # torch would take it for a wrong order
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                    self._step(loss)
            self._check(versions)
        finally:
            self._stepping, self._before = False, None
            for optimizer, state in zip(self._optimizers, states, strict=True):
                optimizer.state = state
            self._settle()

    def options(self) -> list[Any]:
        """Options of groups, states of schedulers, and, if a scheduler looks at parameters, who is where and trained.

        Plain values and tensors; parameters that a scheduler keeps are numbers.
        """
        groups = [
            [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in item]
            for item in (optimizer.param_groups for optimizer in self._optimizers)
        ]
        states = [self._outward(scheduler.state_dict()) for scheduler in self._schedulers]
        states += [] if self._epochs is None else [self._epochs.state()]
        return [groups, states, *([self._structure()] if self.touched else [])]

    def take_options(self, groups: list[Any], states: list[Any], structure: dict[str, Any] | None = None) -> None:
        """Continue with what ``options`` of another process were."""
        if structure is not None or self.touched:
            self._restructure(structure or self._first)
        self.touched = structure is not None or self._always
        for optimizer, theirs in zip(self._optimizers, groups, strict=True):
            for group, values in zip(optimizer.param_groups, theirs, strict=True):
                group.update(values)
        if self._epochs is not None:
            *states, counted = states
            self._epochs.load(counted)
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(self._inward(state))

    def _step(self, loss: float) -> None:
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()

    def _show(self) -> None:
        """Give the groups all of their parameters, in lists that notice who looks."""
        for optimizer, groups in zip(self._optimizers, self._shown, strict=True):
            for group, shown in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = shown

    def _settle(self) -> None:
        """Leave the groups what this process updates; parameters that were moved stay where they are now."""
        found = [id(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]
        if self.touched or found != self._ids:
            self._touch()
            self._take_groups()
            self._deal()
        else:
            self._hide()

    def _hide(self) -> None:
        for optimizer, groups in zip(self._optimizers, self._kept, strict=True):
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = kept

    def _deal(self) -> None:
        """Make the lists that are shown and those that are kept, and leave the groups the latter."""
        mine = self._mine
        touch = weakref.WeakMethod(self._touch)  # a circle would keep the parameters until it is collected
        self._shown = [[Watched(whole, lambda: touch()()) for whole in groups] for groups in self._groups]  # type: ignore[misc]
        self._kept: Groups = [
            [[item for item in whole if mine is None or id(item) in mine] for whole in groups]
            for groups in self._groups
        ]
        self._ids = [id(shown) for groups in self._shown for shown in groups]
        self._hide()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if "param_names" in group:
                    group["param_names"] = [self._labels[id(item)] for item in group["params"]]

    def _take_groups(self) -> None:
        """Take over what is in which group; each parameter must be the model's, and in one."""
        owners: dict[str, str] = {}
        self._groups: Groups = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                self._labels.update(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
            self._groups.append([list(group["params"]) for group in optimizer.param_groups])
            for parameter in (parameter for group in self._groups[-1] for parameter in group):
                number = self._numbers.get(id(parameter))
                _claim(None if number is None else self._named[number][0], optimizer, owners)

    def _touch(self) -> None:
        """Somebody looks at parameters: note what they are, to see whether they are written."""
        self.touched = True
        if self._stepping and self._before is None:
            with torch.no_grad():
                self._before = [(one._version, one.data_ptr(), one.detach().clone()) for _, one in self._named]

    def _check(self, versions: list[int]) -> None:
        """Refuse schedulers that wrote weights, gave a parameter other memory, or replaced the optimizer's state."""
        if any(optimizer.state is not self._withheld for optimizer in self._optimizers):
            refuse_state()
        if self._before is None and self._versions() == versions:
            return
        for number, (name, parameter) in enumerate(self._named):
            written = parameter._version != versions[number]
            if not written and self._before is not None:
                version, address, content = self._before[number]
                same = (parameter._version, parameter.data_ptr()) == (version, address)
                written = not (same and torch.equal(bytes_of(parameter), bytes_of(content)))
            if written:
                kinds = ", ".join(sorted({type(scheduler).__name__ for scheduler in self._schedulers}))
                raise UsageError(
                    f"scheduler ({kinds}) wrote parameter {name!r}; every worker runs the scheduler, and they share "
                    f"the weights: {WAY_OUT}"
                )

    def _versions(self) -> list[int]:
        return list(map(VERSION, self._parameters))

    def _structure(self) -> dict[str, Any]:
        """Which parameters are in which group, by number, and which are trained."""
        numbers = [[[self._numbers[id(item)] for item in group] for group in groups] for groups in self._groups]
        return {"groups": numbers, "trained": [parameter.requires_grad for _, parameter in self._named]}

    def _restructure(self, structure: dict[str, Any]) -> None:
        for (_, parameter), trained in zip(self._named, structure["trained"], strict=True):
            parameter.requires_grad_(trained)
        self._groups = [
            [[self._named[number][1] for number in group] for group in groups] for groups in structure["groups"]
        ]
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            names = {"param_names": []} if "param_names" in optimizer.param_groups[0] else {}
            optimizer.param_groups[len(groups) :] = []
            missing = len(groups) - len(optimizer.param_groups)
            optimizer.param_groups += [{"params": [], **names} for _ in range(missing)]
        self._deal()

    def _outward(self, value: Any) -> Any:
        """A scheduler's state with numbers in place of the model's parameters, which are everybody's own."""
        if isinstance(value, torch.nn.Parameter) and id(value) in self._numbers:
            return {PARAMETER: self._numbers[id(value)]}
        return _mapped(self._outward, value)

    def _inward(self, value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {PARAMETER}:
            return self._named[value[PARAMETER]][1]
        return _mapped(self._inward, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``function`` of what lists, tuples and dicts hold; a state without parameters comes out equal."""
    if type(value) in (list, tuple):
        return type(value)(map(function, value))
    if type(value) is dict:
        return {key: function(item) for key, item in value.items()}
    return value


def _claim(name: str | None, optimizer: torch.optim.Optimizer, owners: dict[str, str]) -> None:
    kind = type(optimizer).__name__
    if name is None:
        raise UsageError(
            f"optimizer made a {kind} over other parameters than the model's: it must use the named parameters that it "
            f"is called with, as in {EXAMPLE}"
        )
    if name in owners:
        raise UsageError(f"optimizer put parameter {name!r} into {owners[name]} and into {kind}; give each to one")
    owners[name] = kind


def _made(make: Callable[..., Any], optimizer: torch.optim.Optimizer) -> LRScheduler | ReduceLROnPlateau:
    try:
        scheduler = make(optimizer)
    except Exception as error:
        raise UsageError(
            f"scheduler raised {type(error).__name__}: {error}; it is called with the optimizer, as in "
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
