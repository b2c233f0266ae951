"""A replica's gradient, read from the parameters and taken away from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.errors import UsageError
from phalanx.frameworks.torch.arithmetic import Gradient


def take(named: Sequence[tuple[str, torch.nn.Parameter]]) -> Gradient:
    """The gradients of all parameters, None where there is none; ``.grad`` is None afterwards.

    Autograd may give several parameters views of one tensor (the gradient of ``a.view(n) + b.view(n)``, torch 2.13).
    Whoever writes into one would change the other, so such gradients are copied.
    """
    gradient: Gradient = []
    storages: set[int] = set()
    for name, parameter in named:
        grad = parameter.grad
        parameter.grad = None
        if grad is not None:
            if grad.layout != torch.strided:
                raise UsageError(
                    f"parameter {name!r} has a sparse gradient, and those cannot be folded exactly; use sparse=False"
                )
            storage = grad.untyped_storage().data_ptr()
            if storage in storages:
                grad = grad.clone()
            storages.add(storage)
        gradient.append(grad)
    return gradient


def drop(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Leave no gradient behind."""
    for parameter in parameters:
        parameter.grad = None
