"""Models of several devices are alike and apart: nothing of one is used on another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.definition.fields import Definition
from phalanx.definition.reachable import reachable
from phalanx.errors import UsageError
from phalanx.frameworks.torch.replica.buffers import same_bytes


def check_apart(definition: Definition, models: Sequence[torch.nn.Module]) -> None:
    """See that functions of the recipe lead to none of these models, if they are several.

    Raises
    ------
    UsageError
        One does; names the way there.
    """
    if len(models) == 1:
        return
    own = {id(part) for model in models for part in (*model.modules(), *model.parameters(), *model.buffers())}
    functions = {"optimizer": definition.optimizer, "scheduler": definition.scheduler, **definition.holders}
    for path, thing in reachable({name: function for name, function in functions.items() if function is not None}):
        if id(thing) in own:
            raise UsageError(
                f"{path} is a {type(thing).__name__} of the model that make_model returned, but each of several "
                "devices has a model of its own; take what is needed from the arguments (forward_fn gets the model, "
                "optimizer the named parameters), or name one device"
            )


def same(first: torch.nn.Module, other: torch.nn.Module) -> torch.nn.Module:
    """Another model for another device, if it begins with the same bytes, and others can be written to it.

    Raises
    ------
    UsageError
        It does not, or they cannot.
    """
    for name, parameter in other.named_parameters():
        if any(length > 1 and not stride for length, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            raise UsageError(
                f"parameter {name!r} of shape {tuple(parameter.shape)} is expanded: its elements lie in one place, so "
                "it cannot be copied from device to device; .clone() it in make_model, or name one device"
            )
    pairs = [(list(one.named_parameters()), list(one.named_buffers())) for one in (first, other)]
    for mine, theirs in zip(*pairs, strict=True):
        same = [name for name, _ in mine] == [name for name, _ in theirs] and all(
            (a.shape, a.dtype) == (b.shape, b.dtype) and same_bytes(a.detach(), b.detach())
            for (_, a), (_, b) in zip(mine, theirs, strict=True)
        )
        if not same:
            raise UsageError(
                "make_model returned another model for the second device than for the first; it must return the same "
                "parameters and buffers each time: draw random numbers only from random, numpy.random and torch"
            )
    return other


def hooked(named: Sequence[tuple[str, torch.nn.Parameter]]) -> dict[str, int]:
    """How many hooks each parameter has."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return {name: sum(len(getattr(parameter, kind, None) or ()) for kind in kinds) for name, parameter in named}


def put(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model; what modules share stays shared, though some kinds of devices get new parameters.

    Raises
    ------
    UsageError
        A parameter has hooks that would be lost.
    """
    before, shared = dict(model.named_parameters()), _shared(model)
    counts = hooked(list(before.items()))
    model.to(device)
    for first, *others in shared:
        for path in others:
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, _tensors(model)[first])
    for name, parameter in model.named_parameters():
        if counts[name] and before[name] is not parameter:
            raise UsageError(
                f"parameter {name!r} has hooks, which torch does not take along to {device.type!r}; make the model on "
                "the device in make_model, and register them there"
            )


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by every path that leads to one."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(named)


def _shared(model: torch.nn.Module) -> list[list[str]]:
    """The paths of each tensor that several modules have."""
    paths: dict[int, list[str]] = {}
    for path, tensor in _tensors(model).items():
        paths.setdefault(id(tensor), []).append(path)
    return [listed for listed in paths.values() if len(listed) > 1]
