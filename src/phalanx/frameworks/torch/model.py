"""The user's model: made or copied, checked, and put on its device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from phalanx import generators
from phalanx.errors import UsageError


def build_model(make_model: Any, seed: int) -> torch.nn.Module:
    """A model of the run's own: a copy of an ``nn.Module``, or what the factory returns right after seeding.

    Raises
    ------
    UsageError
        The factory raised or returned something else, or the model cannot be trained here.
    """
    if isinstance(make_model, torch.nn.Module):
        model = _copied(make_model)
    else:
        generators.seed(seed)
        try:
            model = make_model()
        except Exception as error:
            raise UsageError(
                f"make_model raised {type(error).__name__}: {error}; it is called without arguments: wrap it in "
                "functools.partial or a lambda if it needs some"
            ) from error
    _check(model)
    for parameter in model.parameters():
        parameter.grad = None
    return model


def pick_device(model: torch.nn.Module, name: str | None) -> torch.device:
    """The named device, or where the model already is.

    Raises
    ------
    UsageError
        torch cannot use the named device here.
    """
    if name is None:
        return next(model.parameters()).device
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"devices names {name!r}, which torch cannot use here ({reason}); use ['cpu'], or leave it out"
        ) from error


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise UsageError(
            f"make_model is a {type(model).__name__} that cannot be copied ({error}), and a model that is passed in is "
            "never trained in place; pass a function that makes it: make_model=lambda: ..."
        ) from error


def _check(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"make_model returned {_described(model)}; it must return a torch.nn.Module")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise UsageError(
                f"make_model returned a model with lazy modules ({name!r} has no shape yet); run one batch through it "
                "in make_model before returning it, or give the sizes"
            )
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise UsageError("make_model returned a model on the meta device, without values; make it on a real device")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"make_model returned a {type(model).__name__} without trainable parameters; register them as "
            "nn.Parameter or submodules, and leave requires_grad on for some"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise UsageError(f"make_model returned a model spread over {sorted(map(str, devices))}; put it on one device")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UsageError(
                f"module {name!r} has sparse=True, and sparse gradients cannot be folded exactly; make it with "
                "sparse=False"
            )


def _described(value: Any) -> str:
    return "None (is a return missing?)" if value is None else f"a {type(value).__name__}"
