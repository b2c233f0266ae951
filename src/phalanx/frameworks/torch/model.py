"""The user's model: made or copied, checked, and put on its device."""

from __future__ import annotations

import copy
import weakref
from typing import Any, Final, TypeVar

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from phalanx.definition import device_generators, generators
from phalanx.errors import UsageError

Model = TypeVar("Model", bound=torch.nn.Module)
TRAINED: Final[weakref.WeakSet[torch.nn.Module]] = weakref.WeakSet()  # what factories returned, while it lives


def made(make_model: Any, seed: int) -> Any:
    """What is trained, of the run's own: a copy of an ``nn.Module``, or what the factory returns right after seeding.

    Raises
    ------
    UsageError
        The factory raised, or returned a model that it returned before.
    """
    if isinstance(make_model, torch.nn.Module):
        way = (
            "a model that is passed in is never trained in place; pass a function that makes it: make_model=lambda: ..."
        )
        return copied("make_model", make_model, f", and {way}")
    try:
        while True:
            generators.seed(seed)
            seeded = bool(device_generators.in_use())
            model = make_model()
            if seeded or not _on_accelerator(model):
                break  # else it was the first to use the devices: once more, now that their generators are there
    except Exception as error:
        called = "it is called without arguments: wrap it in functools.partial or a lambda if it needs some"
        way = called if isinstance(error, TypeError) else "the traceback above says where"
        raise UsageError(f"make_model raised {type(error).__name__}: {error}; {way}") from error
    _check_new(model)
    return model


def _on_accelerator(model: Any) -> bool:
    first = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    return first is not None and first.device.type not in ("cpu", "meta")


def checked(model: Any) -> torch.nn.Module:
    """What was made, if it is a model that can be trained here; without gradients.

    Raises
    ------
    UsageError
        It is something else, or cannot be.
    """
    _check(model)
    for parameter in model.parameters():
        parameter.grad = None
    return model


def home_of(model: Any) -> torch.device:
    """Where a model was made."""
    return next(checked(model).parameters()).device


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


def is_module(model: Any) -> bool:
    """Whether it is a module."""
    return isinstance(model, torch.nn.Module)


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


def _check_new(model: Any) -> None:
    """A factory that returns one model again and again would train on, from run to run, in place."""
    if isinstance(model, torch.nn.Module):
        if model in TRAINED:
            raise UsageError(
                f"make_model returned the {type(model).__name__} that it returned before, already trained; return a "
                "new one each time, or pass the model itself, which is copied: make_model=model"
            )
        TRAINED.add(model)


def _check(model: Any) -> None:
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            f"make_model returned {_described(model)}; it must return a plain torch.nn.Module, a tree of jax arrays "
            "(jnp.asarray makes them), or an object with tensors of tinygrad"
        )
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


def _described(value: Any) -> str:
    return "None (is a return missing?)" if value is None else f"a {type(value).__name__}"
