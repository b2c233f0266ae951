"""A replica's gradient, read from the parameters and taken away from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.errors import UsageError
from phalanx.frameworks.torch.arithmetic import Gradient


def take(named: Sequence[tuple[str, torch.nn.Parameter]]) -> Gradient:
    """The gradients of all parameters, None where there is none; ``.grad`` is None afterwards."""
    gradient: Gradient = []
    for name, parameter in named:
        grad = parameter.grad
        if grad is not None:
            if grad.layout != torch.strided:
                raise UsageError(
                    f"parameter {name!r} has a sparse gradient, and those cannot be folded exactly; use sparse=False"
                )
            parameter.grad = None
        gradient.append(grad)
    return gradient


def separate(gradient: Gradient) -> Gradient:
    """``gradient`` with no memory shared between entries, so that each can be written.

    Autograd may give several parameters views of one tensor, as the gradient of ``a.view(n) + b.view(n)`` (torch 2.13).
    """
    storages: set[int] = set()
    for position, grad in enumerate(gradient):
        if grad is not None:
            storage = grad.untyped_storage().data_ptr()
            if storage in storages:
                gradient[position] = grad.clone()
            storages.add(storage)
    return gradient


def drop(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Leave no gradient behind."""
    for parameter in parameters:
        parameter.grad = None
