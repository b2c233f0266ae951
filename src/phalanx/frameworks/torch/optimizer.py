"""The optimizers and schedulers of a run: made, checked, and stepped with the mean gradient.

Each phase of a step has optimizers of its own, over some of the parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn.modules import module
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from phalanx.definition import generators
from phalanx.definition.checks import parameters_of
from phalanx.definition.data import map_tree
from phalanx.definition.fields import SAMPLING, Definition, Phase, matches
from phalanx.definition.plain import check_like, inexact, is_flag
from phalanx.definition.reachable import values
from phalanx.errors import UsageError, safe_str
from phalanx.frameworks.torch.arithmetic import Gradient, spec_of
from phalanx.frameworks.torch.norm import norm_of_pieces
from phalanx.frameworks.torch.replica.buffers import LOOKED
from phalanx.frameworks.torch.schedules import EXAMPLE, Named, Schedules
from phalanx.plan.keys import update_key
from phalanx.seams.records import Training
from phalanx.shared.layout import Spec

MODULE_HOOKS = tuple(name for name in vars(module) if name.startswith("_global_") and name.endswith("_hooks"))
OLD_STYLE = "optimizer=lambda named: MyOptimizer([parameter for _, parameter in named])"
LIGHTNING = (
    ". Of what configure_optimizers returns for Lightning, give the parts: optimizer=lambda named: AdamW(named), "
    "scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=10), schedule_every='epoch' (or 'step', as its "
    "interval says), and its monitor as schedule_on"
)


class Update:
    """Clipping, optimizers and schedulers over all parameters of a model.

    Parameters
    ----------
    definition : Definition
    named : sequence of (str, torch.nn.Parameter)
        All parameters, by their names in the model.
    model : torch.nn.Module
    chosen : sequence of (str, torch.nn.Parameter), optional
        What the optimizer is made for, if not for all.

    Attributes
    ----------
    foreign : bool
        Whether an optimizer is not torch's own, so that its state may be anywhere.
    custom : bool
        Whether one is foreign or has step hooks, so that it may read and write anything.
    whole : bool
        Whether it has to see all parameters at once.
    apart : bool
        Whether it may keep state that no other process can go on from. Of hooks this is seen when they change some.
    own : bool
        Whether all classes are torch's, and nothing is hooked.
    """

    def __init__(
        self, definition: Definition, named: Named, model: torch.nn.Module, chosen: Named | None = None
    ) -> None:
        self.named = named
        self._parameters = [parameter for _, parameter in named]
        kinds = {(parameter.dtype, parameter.device.type) for parameter in self._parameters}
        self._uniform = len(kinds) == 1 and self._parameters[0].device.type == "cpu"
        self._norm: torch.Tensor | None = None
        self._max_norm, self._shared = definition.max_norm, definition.replicas > 1
        self._model, self._seed, self._count = model, definition.seed, 0
        self.optimizers = build_optimizers(definition, named if chosen is None else chosen, model)
        self._schedules = Schedules(definition, self.optimizers, named, list(model.named_buffers()))  # may add hooks
        self.foreign = self.apart = any(map(_foreign, self.optimizers))
        self.custom = self.foreign or any(map(_hooked, self.optimizers))
        self.whole = self.custom or not self._uniform
        self._idle = False
        self.own = self._schedules.own and not self.custom

    @property
    def lr(self) -> float:
        """Learning rate of the first group."""
        rate = self.optimizers[0].param_groups[0].get("lr", math.nan)
        return math.nan if isinstance(rate, torch.Tensor) and rate.numel() != 1 else float(rate)

    @functools.cached_property
    def _specs(self) -> list[Spec]:
        return list(map(spec_of, self._parameters))

    @functools.cached_property
    def norm_dtype(self) -> torch.dtype:
        """The dtype of the norm of a parameter's gradient; float64 where the whole norm is computed at once."""
        if self.whole:
            return torch.float64
        return torch.linalg.vector_norm(self._parameters[0].detach().reshape(-1)[:0]).dtype

    @property
    def options_checksum(self) -> tuple[float, float]:
        """A checksum of options, and a learning rate; zeros for a custom optimizer: one worker alone has its."""
        return (0.0, 0.0) if self.custom else self._schedules.options_checksum

    def options(self) -> list[Any]:
        """Options of parameter groups and the state of schedules, for a process that continues."""
        return self._schedules.options()

    def take_options(self, options: list[Any]) -> None:
        """Continue with the options and schedules of another process."""
        self._schedules.take_options(*options)

    def restrict(self, owned: Sequence[int]) -> None:
        """Update only these parameters; groups keep their options and the schedule."""
        mine = {id(self._parameters[index]) for index in owned}
        self._idle = self.whole and not mine  # an optimizer from elsewhere may not expect empty groups
        self._schedules.restrict(mine)

    def norm(self, gradient: Gradient) -> float:
        """Global 2-norm with the bits of ``clip_grad_norm_``: norms of whole tensors, stacked in order, their norm.

        Where tensors differ in dtype or live on a GPU, torch groups them and has its own kernels. Then torch does it.
        """
        present = [grad for grad in gradient if grad is not None]
        if not self._uniform or not present:
            self._norm = norm = torch.nn.utils.get_total_norm(present)
            return norm.item()
        return self.total_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in present]))

    def enqueue_norm(self, gradient: Gradient, device: torch.device) -> torch.Tensor:
        """The norm, on the ``device`` of the gradient, which is an accelerator; not waited for."""
        if self._shared:
            norm = norm_of_pieces(gradient, self._specs, device)
        else:  # as a plain loop does it
            norm = torch.nn.utils.get_total_norm([grad for grad in gradient if grad is not None]).to(device)
        self._norm = norm
        return norm

    def total_norm(self, norms: torch.Tensor) -> float:
        """The global norm out of the norms of all parameters that have a gradient, in order."""
        self._norm = norm = torch.linalg.vector_norm(norms)
        return norm.item()

    def apply(self, step: int, gradient: Gradient) -> None:
        """Clip ``gradient`` by the norm computed last, and step the optimizers with it."""
        for parameter, grad in zip(self._parameters, gradient, strict=True):
            parameter.grad = grad
        if self._norm is not None and math.isfinite(self._max_norm):  # None: another worker has all gradients
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_norm, self._norm)
        if self.custom:
            generators.seed(update_key(self._seed, step))
        if not self._idle:
            self._step_all()
        for parameter in self._parameters:
            parameter.grad = None

    def _step_all(self) -> None:
        """Step the optimizers, and see whether hooks keep something apart.

        A replacement has the weights, the buffers, the state that torch's optimizers make, and the schedule's options.
        So a hook may change nothing else. Options, which tensors are state, and what hooks hold are compared in each
        step; what the model holds, which takes milliseconds, only in some. What a hook first changes there is not seen.
        """
        before = self._beside() if self.custom and not self.apart else None
        for optimizer in self.optimizers:
            _step(optimizer)
        if before is not None:
            after = self._beside()
            self.apart = before[0] != after[0] or not before[1] <= after[1]
            self._count += 1

    def _beside(self) -> tuple[Any, set[Any]]:
        """Options, and what hooks and the model hold; and which tensors are the state of each parameter.

        A walk that leaves out the model's modules ends at them, so nothing that they hold has to be known or kept.
        """
        state = [pair for optimizer in self.optimizers for pair in optimizer.state.items() if pair[1]]
        odd = [key for key, _ in state if not isinstance(key, torch.Tensor)]
        held = {(id(key), *map(id, items.values())) for key, items in state if isinstance(items, dict)}
        known = [*self._model.parameters(), *self._model.buffers(), *(each.state for each in self.optimizers)]
        roots: dict[str, Any] = {"optimizers": self.optimizers, "model": self._model}
        if self._count not in LOOKED:
            hooks = [(each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks) for each in self.optimizers]
            roots = {"hooks": hooks, "steps": [vars(each).get("step") for each in self.optimizers]}
            known += self._model.modules()
        return (repr((self.options()[0], odd)), values(roots, known)), held

    def schedule(self, value: float, epoch: int | None = None) -> None:
        """Step the schedulers after a step, or after an ``epoch``."""
        self._schedules.step(value, epoch)


class Phased:
    """The ``Update`` of a step with phases: that of the next phase, except for what concerns all phases.

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
        for name in ("foreign", "custom", "whole"):
            setattr(self, name, any(getattr(phase, name) for phase in self._phases))
        self.norm_dtype = torch.float64 if self.whole else self._phases[0].norm_dtype

    @property
    def _next(self) -> Update:
        """The update of the next phase."""
        return self._phases[self._rounds.at(self._done).phase]

    @property
    def apart(self) -> bool:
        """Whether that of any phase may keep state that no other process can go on from."""
        return any(phase.apart for phase in self._phases)

    @apart.setter
    def apart(self, value: bool) -> None:
        for phase in self._phases:
            phase.apart = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._next, name)

    def options(self) -> list[Any]:
        """The number of updates, and then the options of each phase."""
        return [self._done, *(phase.options() for phase in self._phases)]

    def take_options(self, options: list[Any]) -> None:
        """Continue with the options and schedules of another process."""
        self._done, *others = options
        for phase, theirs in zip(self._phases, others, strict=True):
            phase.take_options(theirs)

    def restrict(self, owned: Sequence[int]) -> None:
        """Update only these parameters, in all phases."""
        for phase in self._phases:
            phase.restrict(owned)

    def schedule(self, value: float, epoch: int | None = None) -> None:
        """Step the phase's schedulers; the next phase begins."""
        self._next.schedule(value, epoch)
        self._done += 1


Updates = Update | Phased


def fit_options(updates: Updates, options: list[Any]) -> None:
    """Refuse options of a snapshot that are not like these, if all classes are torch's own; see ``check_like``.

    Flags are taken from the recipe: no schedule of torch's changes them.
    """
    if isinstance(updates, Phased):
        check_like(options[0], int, "options.0")
        for phase, theirs in zip(updates._phases, options[1:], strict=True):
            fit_options(phase, theirs)
    elif updates.own:
        groups, *others = updates.options()[:3]
        # Other numbers may replace integers.
        rates = map_tree(lambda value: float(value) if type(value) is int else value, groups)
        check_like(options[:3], [rates, *others], "options")
        for group, theirs in zip(itertools.chain(*groups), itertools.chain(*options[0]), strict=True):
            theirs.update({name: value for name, value in group.items() if is_flag(value)})


def retrain(updates: Updates, change: Training) -> None:
    """Freeze or thaw parameters.

    Raises
    ------
    UsageError
        No optimizer has one that is to be thawed, or an optimizer would have nothing to train any more.
    """
    schedules = [each._schedules for each in (updates._phases if isinstance(updates, Phased) else [updates])]
    chosen = {name: item for name, item in updates.named if name in change.names and inexact(item.dtype)}
    updated = {id(item) for schedule in schedules for members in schedule.members for item in members}
    if lacking := [name for name, item in chosen.items() if change.trained and id(item) not in updated]:
        raise UsageError(
            f"thaw: no optimizer has {lacking[0]!r}; let optimizer take all parameters that it is called with: those "
            "that are frozen are left as they are"
        )
    frozen = () if change.trained else [id(item) for item in chosen.values()]
    for schedule in schedules:
        if not any(item.requires_grad and id(item) not in frozen for members in schedule.members for item in members):
            one = "an optimizer of phases" if len(schedules) > 1 else "the optimizer"
            raise UsageError(f"freeze: {one} would have no parameter to train any more; leave some out")
    for parameter in chosen.values():
        parameter.requires_grad_(change.trained)
    for schedule in schedules:
        vars(schedule).pop("options_checksum", None)


def eval_point(updates: Updates) -> dict[str, torch.Tensor]:
    """The parameters where optimizers with two modes, as schedule-free ones, want a model evaluated.

    It is computed on a copy: ``train()`` is not the inverse of ``eval()`` in bits. Hooks are not copied.
    """
    named = copy.deepcopy(updates.named, memo := dict[int, Any]())
    for optimizer in filter(has_modes, updates.optimizers):
        other = _alike(optimizer)  # optimizers copy themselves without attributes of their own
        vars(other).update(copy.deepcopy(vars(other), memo))
        other.eval()
    return {name: parameter.detach() for name, parameter in named}


def has_modes(optimizer: Any) -> bool:
    """Whether an optimizer has a point to train at, and another to evaluate at."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def updates_of(definition: Definition, named: Named, model: torch.nn.Module) -> Updates:
    """The optimizers of a recipe, over all parameters."""
    return Phased(definition, named, model) if definition.phases else Update(definition, named, model)


def covered(phase: Phase, named: Named, model: torch.nn.Module) -> Named:
    """The parameters that a phase updates. A tied one has several names, and any of them will do.

    Raises
    ------
    UsageError
        A name matches no parameter, or none of them is trained.
    """
    first: dict[int, str] = {}  # the name under which ``named`` has a parameter
    names = {
        path: first.setdefault(id(parameter), path)
        for path, parameter in model.named_parameters(remove_duplicate=False)
    }
    for name in phase.chosen or ():
        if not any(matches(name, path) for path in names):
            there = ", ".join(dict.fromkeys(path.partition(".")[0] for path in names))
            raise UsageError(
                f"parameters of a phase names {name!r}, of which the model has nothing (at its top are: {there}); give "
                "the name of a module or parameter, as model.named_parameters() has it, or a pattern"
            )
    chosen = {name for path, name in names.items() if phase.covers(path)}
    mine = [(path, parameter) for path, parameter in named if path in chosen]
    if not any(parameter.requires_grad for _, parameter in mine):
        raise UsageError(f"parameters of a phase is {phase.parameters!r}, of which none is trained; name others")
    return mine


def _alone(definition: Definition, phase: Phase) -> Definition:
    """A recipe that has this phase's optimizer and scheduler as its own."""
    nothing = dict.fromkeys(("data", "steps", "epochs", "phases", *SAMPLING))
    return dataclasses.replace(definition, optimizer=phase.optimizer, scheduler=phase.scheduler, **nothing)


def check_no_global_hooks() -> None:
    """Refuse hooks for all modules or optimizers in the caller's process: workers would not have them."""
    of_optimizers = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    if of_optimizers or any(getattr(module, name) for name in MODULE_HOOKS):
        raise UsageError(
            f"hooks for all {'optimizers' if of_optimizers else 'modules'} are registered in this process, which "
            "workers do not have; register them on what make_model and optimizer return, or use engine='inline'"
        )


def _foreign(optimizer: torch.optim.Optimizer) -> bool:
    return not type(optimizer).__module__.startswith("torch.optim")


def _hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody else's code runs with its step. A schedule's wrapper only notes that there was a step."""
    own = vars(optimizer).get("step")
    wrapped = own is not None and inspect.unwrap(own) is not inspect.unwrap(type(optimizer).step)
    return wrapped or bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()`` without what torch wraps around its own: a profiler's record and marks for its compiler.

    That saves 11 us a step, and importing the compiler (0.7 s) in a worker. With hooks or a differentiable optimizer,
    and for optimizers from elsewhere, it is called as it is.
    """
    if (
        _foreign(optimizer)
        or _hooked(optimizer)
        or optimizer.defaults.get("differentiable", True)
        or any((_global_optimizer_pre_hooks, _global_optimizer_post_hooks))
    ):
        try:
            optimizer.step()
        except Exception as error:
            if "closure" not in safe_str(error):
                raise
            raise _with_closure(type(optimizer)) from error
        return
    optimizer._opt_called = True  # type: ignore[attr-defined]
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def step_alone(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> dict[str, Any]:
    """The state that a throw-away optimizer of the same kind makes in a step, for one parameter in one group."""
    trial, state = _alike(optimizer), defaultdict[Any, dict[str, Any]](dict)
    vars(trial).update(param_groups=[options], state=state)
    with torch.no_grad():
        inspect.unwrap(type(trial).step)(trial)
    return state[options["params"][0]]


def _alike(optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer with the attributes of another, but for its hooks and ``step``, which a schedule wraps."""
    trial = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step":
            vars(trial)[name] = {} if name.startswith("_optimizer_") else value
    return trial


def build_optimizers(definition: Definition, named: Named, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """What the recipe's ``optimizer`` makes of the named parameters, or the model: one optimizer, or a list of them.

    Raises
    ------
    UsageError
        It raised, returned something else, was given other parameters, or cannot be exact in data parallel.
    """
    factory = definition.optimizer or functools.partial(torch.optim.Adam, lr=definition.lr)
    if hasattr(factory, "init") and hasattr(factory, "update"):
        raise UsageError(
            f"optimizer is optax's, which is for jax recipes, but make_model returned a torch module; as in {EXAMPLE}"
        )
    try:
        returned = factory(*_wanted(factory, list(named), model))
    except Exception as error:
        raise UsageError(
            f"optimizer raised {type(error).__name__}: {safe_str(error)}; mend its arguments. It gets (name, "
            "parameter) pairs; the model, if its parameter is called model. If it takes parameters without names: "
            f"{OLD_STYLE}"
        ) from error
    optimizers: list[torch.optim.Optimizer] = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    if not optimizers:
        raise UsageError(f"optimizer returned an empty {type(returned).__name__}; as in {EXAMPLE}")
    for optimizer in optimizers:
        _check_kind(optimizer)
        if has_modes(optimizer):
            cast("Any", optimizer).train()
        for group in optimizer.param_groups:
            if not math.isfinite(group.get("lr", 0.0)):
                raise UsageError(
                    f"optimizer made a {type(optimizer).__name__} with lr={group['lr']}; give a finite rate"
                )
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"] = group["lr"].clone()  # schedulers write into it, and the recipe's own is for every run
    return optimizers


def _wanted(factory: Any, named: list[Any], model: torch.nn.Module) -> list[Any]:
    """What a factory is called with: named parameters, and the model where a parameter is called ``model``."""
    given = set(factory.keywords) if isinstance(factory, functools.partial) else set[str]()
    names = [name for name in list(parameters_of(factory))[:2] if name not in given]
    if names[:1] == ["model"]:
        return [model]
    return [named, model] if names[1:] == ["model"] else [named]


def _check_kind(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        apart = LIGHTNING if isinstance(optimizer, (dict, list, tuple)) else ""
        raise UsageError(f"optimizer returned a {kind}; it must return a torch.optim.Optimizer, as in {EXAMPLE}{apart}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise _with_closure(type(optimizer))


def _with_closure(kind: type) -> UsageError:
    return UsageError(
        f"optimizer is {kind.__name__}, which evaluates the loss several times a step and couples all parameters; "
        "a step here has one gradient: use a first-order optimizer such as AdamW"
    )
