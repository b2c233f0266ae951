"""The user's model: made or copied, checked, and put on its device."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import torch
from torch.nn.parameter import is_lazy

from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError, safe_str

Model = TypeVar("Model", bound=torch.nn.Module)
TRAINED: Final[weakref.WeakSet[torch.nn.Module]] = weakref.WeakSet()  # what factories returned, while it lives


def checked_new(model: Any) -> torch.nn.Module:
    """A model that a factory made. If it returned the same one again, each run would train on where the last ended.

    Raises
    ------
    UsageError
        It was returned before, or cannot be trained here.
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
    """Modes are the user's choice. But a whole model in eval mode is mostly one that was loaded or evaluated before.

    Raises
    ------
    UsageError
        The model is in eval mode, and the recipe does not say that this is meant.
    """
    if not model.training and modes != "as_made":
        raise UsageError(
            f"make_model returned a {type(model).__name__} in eval mode (as from_pretrained does), which would be "
            "trained without dropout, and with the statistics of BatchNorm as they are; return model.train(), or say "
            "that it is meant: modes='as_made'"
        )


def warn_of_rest(model: torch.nn.Module, definition: Definition) -> None:
    """Warn if BatchNorm gets a single sample of an epoch's last batch, which it refuses only once that is reached."""
    rest, parts = (definition.samples or 0) % definition.global_batch, definition.replicas * definition.micro_batches
    comes = 1 < (definition.per_epoch or 0) <= (definition.total or 0) and not definition.drop_last
    kinds = {type(module) for module in model.modules() if module.training}
    single = comes and 0 < rest < 2 * parts
    if single and torch.nn.BatchNorm1d in kinds and torch.nn.Conv1d not in kinds:  # behind one, a row has values enough
        checks.warn(
            f"the last batch of an epoch has {rest} samples, so that a share or a part of one has 1, and BatchNorm1d "
            "cannot normalise that, unless its input has a further axis; say drop_last=True, or change batch_size"
        )


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
    reason = safe_str(cause or "its copy is not independent")
    raise UsageError(f"{argument} is a {type(model).__name__} that cannot be copied ({reason}){way_out}") from cause


def _check(model: torch.nn.Module) -> None:
    check_values("make_model returned a model that", model)
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise UsageError(f"buffer {name!r} of the model is sparse; keep it dense, or in a plain attribute")
    check_trained("make_model returned", model)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise UsageError(f"make_model returned a model spread over {sorted(map(str, devices))}; put it on one device")


def check_values(model_is: str, model: torch.nn.Module) -> None:
    """Refuse parameters and buffers without values; ``model_is``: how the message begins.

    Raises
    ------
    UsageError
        Some are of lazy modules, or on the meta device.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta:
            raise UsageError(
                f"{model_is} has no values yet for {name!r}; run one batch through lazy modules first, or give their "
                "sizes, and make the model on a real device, not on meta"
            )


def check_trained(model_is: str, model: torch.nn.Module) -> None:
    """Refuse a model of which nothing is trained: a step would do nothing. ``model_is``: how the message begins.

    Raises
    ------
    UsageError
        It is such.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"{model_is} a {type(model).__name__} without trainable parameters, so nothing would be trained; register "
            "them as nn.Parameter or submodules, and leave requires_grad on for some"
        )


def put(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model; what modules share stays shared, though some kinds of devices get new parameters.

    Raises
    ------
    UsageError
        A parameter has hooks that would be lost.
    """
    before, shared = dict(model.named_parameters()), _shared(model)
    model.to(device)
    for first, *others in shared:
        for path in others:
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, _tensors(model)[first])
    for name, parameter in model.named_parameters():
        old = before[name]
        if old is not parameter and (old._backward_hooks or old._post_accumulate_grad_hooks):
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


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; every module's own mode after it.

    The attribute is set, ``eval()`` is not called: modules that do more there (merge adapters, say) would stay changed.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training
