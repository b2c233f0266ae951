"""Replicas: independent copies of one model, what has to hold between them, and how one is copied into the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from phalanx.collectives import arguments, broadcast
from phalanx.definition import checks
from phalanx.errors import UsageError
from phalanx.frameworks.torch.model import Model, copied, put

Replica = torch.nn.Module | Sequence[torch.Tensor]
Named = list[tuple[str, torch.Tensor]]

OTHERWISE = (
    "; keep tensors with a gradient, locks and open files out of its attributes, mend its __deepcopy__, or make one "
    "model per device and call manual.broadcast_parameters"
)
LISTED = "it must be a list of models, as manual.replicate(model, devices) makes it"


def replicate(model: Model, devices: Sequence[str | torch.device]) -> list[Model]:
    """Copy a model once per device. The model itself stays as it is, and is none of the copies.

    Copies have equal weights and buffers, share no memory, and keep ties, dtypes, ``requires_grad``, hooks and every
    module's train or eval mode. They carry no gradients.

    Parameters
    ----------
    model : torch.nn.Module
    devices : sequence of str or torch.device
        One per replica, as in ``["cuda:0", "cuda:1"]``. A device may come several times: ``["cpu"] * 4``.

    Returns
    -------
    list of torch.nn.Module
        One replica per device, in order.

    Raises
    ------
    UsageError
        No devices, or one that torch cannot use here; a model that cannot be copied, has no parameters to train, or
        has some without values (lazy modules, the meta device).
    """
    _check_model(model)
    homes = arguments.usable("devices", devices)
    replicas = [copied("model", model, OTHERWISE) for _ in homes]
    for replica, home in zip(replicas, homes, strict=True):
        put(replica, home)
    return replicas


def broadcast_parameters(replicas: Sequence[Replica], root: int = 0) -> None:
    """Copy one replica's parameters and buffers into all others, in place.

    Parameters
    ----------
    replicas : sequence of torch.nn.Module, or of sequences of parameters
        Alike in names, shapes and dtypes, on any devices.
    root : int
        Which replica is copied, counted from 0.

    Raises
    ------
    UsageError
        The replicas differ or share memory, or there is no such root; nothing was copied.
    """
    states = tensors_of(replicas, buffers=True)
    source = checks.integer("root", root, least=0, most=len(states) - 1)
    for same in zip(*states, strict=True):
        broadcast([tensor.detach() for _, tensor in same], root=source)


def tensors_of(replicas: Sequence[Replica], *, buffers: bool = False) -> list[Named]:
    """The parameters of every replica by name, tied ones once, and then the buffers if they are asked for.

    Raises
    ------
    UsageError
        There are none, they are not alike, or two of them share memory.
    """
    if not isinstance(replicas, (list, tuple)) or not replicas:
        raise UsageError(f"replicas is {checks.shown(replicas)}; {LISTED}")
    named = [_tensors(number, replica, buffers=buffers) for number, replica in enumerate(replicas)]
    _check_alike(named)
    _check_independent(named)
    return named


def check_trained(argument: str, parameters: Named) -> None:
    """Refuse what has nothing to train: a step of it would do nothing, and say nothing."""
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise UsageError(
            f"{argument} has no parameter that requires a gradient, so nothing would be trained; register them as "
            "nn.Parameter or submodules, and leave requires_grad on for some"
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is {checks.shown(model)} ({type(model).__name__}); it must be a torch.nn.Module")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta:
            raise UsageError(
                f"model has no values yet for {name!r}, so its copies would not be equal; run one batch through lazy "
                "modules first, and make the model on a real device"
            )
    check_trained("model", list(model.named_parameters()))


def _tensors(number: int, replica: Any, *, buffers: bool) -> Named:
    if isinstance(replica, torch.nn.Module):
        return [*replica.named_parameters(), *(replica.named_buffers() if buffers else ())]
    if isinstance(replica, (list, tuple)) and all(isinstance(item, torch.Tensor) for item in replica):
        once: dict[int, tuple[str, torch.Tensor]] = {}
        for position, tensor in enumerate(replica):
            once.setdefault(id(tensor), (f"parameter {position}", tensor))
        return list(once.values())
    raise UsageError(
        f"replicas[{number}] is {checks.shown(replica)} ({type(replica).__name__}); it must be a torch.nn.Module, or a "
        "list of parameters: list(model.parameters())"
    )


def _check_alike(named: list[Named]) -> None:
    spelled = [[_spell(name, tensor) for name, tensor in replica] for replica in named]
    for number, other in enumerate(spelled):
        for expected, got in itertools.zip_longest(spelled[0], other, fillvalue="nothing"):
            if expected != got:
                raise UsageError(
                    f"replicas[{number}] is unlike replicas[0]: it has {got} where that has {expected}; make them with "
                    "manual.replicate(model, devices)"
                )


def _spell(name: str, tensor: torch.Tensor) -> str:
    return f"{name!r}: {'trained' if tensor.requires_grad else 'fixed'} {tensor.dtype} {tuple(tensor.shape)}"


def _check_independent(named: list[Named]) -> None:
    owners: dict[int, int] = {}
    for number, replica in enumerate(named):
        for name, tensor in replica:
            owner = owners.setdefault(tensor.untyped_storage().data_ptr(), number) if tensor.numel() else number
            if owner != number:
                raise UsageError(
                    f"replicas[{owner}] and replicas[{number}] share the memory of {name!r}, so each would change the "
                    "other; make independent ones with manual.replicate(model, devices)"
                )
