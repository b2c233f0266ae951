"""Whether a list of optimizers, one per replica, would keep replicas equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.definition import checks
from phalanx.errors import UsageError

WAY_OUT = "as in [torch.optim.AdamW(replica.parameters(), lr=1e-3) for replica in replicas]"


def check_optimizers(optimizers: Any, replicas: Sequence[torch.nn.Module]) -> None:
    """Refuse optimizers that are not one per replica, over its own parameters, with the options of the first.

    Raises
    ------
    UsageError
        Also for LBFGS, which evaluates the loss several times a step.
    """
    if not isinstance(optimizers, (list, tuple)):
        raise UsageError(f"optimizers is {checks.shown(optimizers)}; it must be a list with one per replica, {WAY_OUT}")
    if len(optimizers) != len(replicas):
        raise UsageError(f"optimizers has {len(optimizers)} for {len(replicas)} replicas; give one to each, {WAY_OUT}")
    described = [_described(number, optimizer, replicas[number]) for number, optimizer in enumerate(optimizers)]
    for number, other in enumerate(described):
        unlike = [what for what in {**described[0], **other} if described[0].get(what) != other.get(what)]
        if unlike:
            raise UsageError(
                f"optimizers[{number}] is unlike optimizers[0] in {', '.join(unlike)}, so the replicas would drift "
                "apart; make all alike, and give a scheduler to each"
            )


def _described(number: int, optimizer: Any, replica: torch.nn.Module) -> dict[str, Any]:
    """What decides the update, by name: the kind, and per group its parameters by position and its options."""
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            f"optimizers[{number}] is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer that needs one "
            f"gradient a step, {WAY_OUT}"
        )
    positions = {id(parameter): position for position, parameter in enumerate(replica.parameters())}
    found: dict[str, Any] = {"its type": type(optimizer)}
    for index, group in enumerate(optimizer.param_groups):
        strangers = sum(id(parameter) not in positions for parameter in group["params"])
        if strangers:
            raise UsageError(
                f"optimizers[{number}] has {strangers} parameters in group {index} that are not those of "
                f"replicas[{number}], so it would not update it; give each its own replica's, {WAY_OUT}"
            )
        found[f"the parameters of group {index}"] = [positions[id(parameter)] for parameter in group["params"]]
        for key, value in group.items():
            if key not in ("params", "param_names"):
                found[f"{key!r} of group {index}"] = value.item() if isinstance(value, torch.Tensor) else value
    return found
