"""The user's model: made or copied, checked, and put on its device."""

from __future__ import annotations

import copy
import weakref
from typing import Any, Final, TypeVar

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from phalanx.errors import UsageError

Model = TypeVar("Model", bound=torch.nn.Module)
TRAINED: Final[weakref.WeakSet[torch.nn.Module]] = weakref.WeakSet()  # what factories returned, while it lives


def checked_new(model: Any) -> torch.nn.Module:
    """What a factory made; one that returns the same model again would train on, from run to run, in place.

    Raises
    ------
    UsageError
        It was returned before, or is nothing that can be trained here.
    """
    if model in TRAINED:
        raise UsageError(
            f"make_model returned the {type(model).__name__} that it returned before, already trained; return a new "
            "one each time, or pass the model itself, which is copied: make_model=model"
        )
    TRAINED.add(model)
    return checked(model)


def checked(model: torch.nn.Module) -> torch.nn.Module:
    """A model that can be trained here, without gradients.

    Raises
    ------
    UsageError
        It cannot be.
    """
    _check(model)
    for parameter in model.parameters():
        parameter.grad = None
    return model


def check_mode(model: torch.nn.Module, modes: str) -> None:
    """Modes are the user's; but a whole model in eval mode is mostly one that was loaded or evaluated before.

    Raises
    ------
    UsageError
        It is, and the recipe does not say that this is meant.
    """
    if not model.training and modes != "as_made":
        raise UsageError(
            f"make_model returned a {type(model).__name__} in eval mode (as from_pretrained does), which would be "
            "trained without dropout, and with the statistics of BatchNorm as they are; return model.train(), or say "
            "that it is meant: modes='as_made'"
        )


def named_device(name: str | None) -> torch.device | None:
    """The named device, in use from here on (its random generators can be saved); None for None.

    Raises
    ------
    UsageError
        torch cannot use it here.
    """
    if name is None:
        return None
    try:
        found, asked = torch.empty(0, device=name).device, torch.device(name)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise _unusable(name, reason) from error
    if found.type == "meta":
        raise _unusable(name, "it has no values")
    if asked.index is not None and asked.index != (found.index or 0):  # torch takes any number for the CPU
        raise _unusable(name, f"there is one {found.type}")
    return found


def _unusable(name: str, reason: str) -> UsageError:
    return UsageError(f"devices names {name!r}, which torch cannot use here ({reason}); use ['cpu'], or leave it out")


def copied(argument: str, model: Model, way_out: str) -> Model:
    """An independent copy of a model; the message of an error ends in ``way_out``.

    Raises
    ------
    UsageError
        It cannot be copied, or its copy is in the same memory.
    """
    cause = None
    try:
        copy_of_it = copy.deepcopy(model)
        if {id(parameter) for parameter in copy_of_it.parameters()}.isdisjoint(map(id, model.parameters())):
            return copy_of_it
    except Exception as error:
        cause = error
    reason = cause or "its copy is not independent"
    raise UsageError(f"{argument} is a {type(model).__name__} that cannot be copied ({reason}){way_out}") from cause


def _check(model: torch.nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise UsageError(
                f"make_model returned a model with lazy modules ({name!r} has no shape yet); run one batch through it "
                "in make_model before returning it, or give the sizes"
            )
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise UsageError(f"buffer {name!r} of the model is sparse; keep it dense, or in a plain attribute")
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
