"""The updates of a step with phases: each phase has optimizers of its own, over some of the parameters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.definition.fields import Definition, Phase
from phalanx.definition.plain import check_like, is_flag
from phalanx.errors import UsageError
from phalanx.frameworks.torch.arithmetic import Gradient
from phalanx.frameworks.torch.optimizer import Update
from phalanx.frameworks.torch.schedules import Named


class Phased:
    """Is to a step with phases what ``Update`` is to others; knows which phase is next.

    Parameters
    ----------
    definition : Definition
    named : sequence of (str, torch.nn.Parameter)
        All parameters, as for ``Update``.
    model : torch.nn.Module
    """

    def __init__(self, definition: Definition, named: Named, model: torch.nn.Module) -> None:
        self.named = named
        self._rounds = definition.rounds
        self._phases = [
            Update(_alone(definition, phase), named, model, covered(phase, named, model))
            for phase in definition.phases or ()
        ]
        self.optimizers = [optimizer for phase in self._phases for optimizer in phase.optimizers]
        self._done = 0

    @property
    def _next(self) -> Update:
        """Of the phase that comes next."""
        return self._phases[self._rounds.at(self._done).phase]

    @property
    def lr(self) -> float:
        """See ``Update.lr``: of the next phase."""
        return self._next.lr

    @property
    def foreign(self) -> bool:
        """Whether an optimizer is not torch's own."""
        return any(phase.foreign for phase in self._phases)

    @property
    def whole(self) -> bool:
        """See ``Update.whole``: of any phase."""
        return any(phase.whole for phase in self._phases)

    @property
    def norm_dtype(self) -> torch.dtype:
        """See ``Update.norm_dtype``."""
        return torch.float64 if self.whole else self._phases[0].norm_dtype

    @property
    def told(self) -> tuple[float, float]:
        """See ``Update.told``: of the next phase."""
        return self._next.told

    def options(self) -> list[Any]:
        """See ``Update.options``; how many updates there were comes first."""
        return [self._done, *(phase.options() for phase in self._phases)]

    def take_options(self, options: list[Any]) -> None:
        """Continue with the options and schedules of another process."""
        self._done, *others = options
        for phase, theirs in zip(self._phases, others, strict=True):
            phase.take_options(theirs)

    def restrict(self, owned: Sequence[int]) -> None:
        """See ``Update.restrict``."""
        for phase in self._phases:
            phase.restrict(owned)

    def norm(self, gradient: Gradient) -> float:
        """See ``Update.norm``."""
        return self._next.norm(gradient)

    def enqueue_norm(self, gradient: Gradient, device: torch.device) -> torch.Tensor:
        """See ``Update.enqueue_norm``."""
        return self._next.enqueue_norm(gradient, device)

    def total_norm(self, norms: torch.Tensor) -> float:
        """See ``Update.total_norm``."""
        return self._next.total_norm(norms)

    def apply(self, step: int, gradient: Gradient) -> None:
        """See ``Update.apply``; ``step`` counts updates."""
        self._next.apply(step, gradient)

    def schedule(self, value: float, epoch: int | None = None) -> None:
        """See ``seams.Framework.schedule``: the phase that was done, or skipped, is over."""
        self._next.schedule(value, epoch)
        self._done += 1


Updates = Update | Phased


def fit_options(updates: Updates, options: list[Any]) -> None:
    """Refuse options of a snapshot that are not like these, as far as classes are torch's own; see ``check_like``.

    Flags become the recipe's: no schedule of torch's changes them.
    """
    if isinstance(updates, Phased):
        check_like(options[0], int, "options.0")
        for phase, theirs in zip(updates._phases, options[1:], strict=True):
            fit_options(phase, theirs)
    elif updates.own:
        groups, *others = updates.options()[:3]
        check_like(options[:3], [[[_rates(group) for group in item] for item in groups], *others], "options")
        for group, theirs in zip(itertools.chain(*groups), itertools.chain(*options[0]), strict=True):
            theirs.update({name: value for name, value in group.items() if is_flag(value)})


def _rates(group: dict[str, Any]) -> dict[str, Any]:
    """Options of which integers may become other numbers."""
    return {name: float(value) if type(value) is int else value for name, value in group.items()}


def updates_of(definition: Definition, named: Named, model: torch.nn.Module) -> Updates:
    """The optimizers of a recipe, over all parameters."""
    return Phased(definition, named, model) if definition.phases else Update(definition, named, model)


def covered(phase: Phase, named: Named, model: torch.nn.Module) -> Named:
    """The parameters that a phase updates; one that is tied has several names, of which any will do.

    Raises
    ------
    UsageError
        A name is of none, or none of them is trained.
    """
    first: dict[int, str] = {}  # the name under which ``named`` has a parameter
    names = {
        path: first.setdefault(id(parameter), path)
        for path, parameter in model.named_parameters(remove_duplicate=False)
    }
    for name in phase.chosen or ():
        if not any(path == name or path.startswith(f"{name}.") for path in names):
            there = ", ".join(dict.fromkeys(path.partition(".")[0] for path in names))
            raise UsageError(
                f"parameters of a phase names {name!r}, of which the model has nothing (at its top are: {there}); give "
                "the name of a module or parameter, as model.named_parameters() has it"
            )
    chosen = {name for path, name in names.items() if phase.covers(path)}
    mine = [(path, parameter) for path, parameter in named if path in chosen]
    if not any(parameter.requires_grad for _, parameter in mine):
        raise UsageError(f"parameters of a phase is {phase.parameters!r}, of which none is trained; name others")
    return mine


def _alone(definition: Definition, phase: Phase) -> Definition:
    """A recipe that has this phase's optimizer and scheduler as its own."""
    nothing = dict.fromkeys(("data", "steps", "epochs", "phases"))
    return dataclasses.replace(definition, optimizer=phase.optimizer, scheduler=phase.scheduler, **nothing)
