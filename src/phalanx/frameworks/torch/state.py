"""The state of a model and its optimizers as named entries, for digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from phalanx import checks
from phalanx.digest import Entry, digest_of
from phalanx.errors import UsageError
from phalanx.frameworks.torch.buffers import bytes_of


def digest(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    step: int | None = None,
) -> str:
    """The digest of a state: equal digests mean equal bits.

    Parameters
    ----------
    model : torch.nn.Module
    optimizer : torch.optim.Optimizer, sequence of them, or None
        Its per-parameter state is included, tensors and scalars.
    step : int or None
        How many optimizer steps led here.

    Returns
    -------
    str
        64 hexadecimal digits; equals ``result.digest`` of a run that ended in the same state.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; digest takes a torch.nn.Module")
    listed: list[Any] = (
        list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    )
    for item in listed:
        if not isinstance(item, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer is {checks.shown(item)} ({type(item).__name__}); digest takes a torch.optim.Optimizer or a "
                "list of them"
            )
    return digest_of(entries(model, listed), step)


def entries(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Entry]:
    """Parameters, buffers, optimizer state by parameter name, what optimizers keep beside it; tied ones once."""
    named = list(model.named_parameters())
    for name, parameter in named:
        yield _tensor_entry("parameter", name, parameter)
    for name, buffer in model.named_buffers():
        yield _tensor_entry("buffer", name, buffer)
    for name, parameter in named:
        for optimizer in optimizers:
            yield from _state_entries(name, optimizer.state.get(parameter, {}))
    for optimizer in optimizers:
        shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        yield from _state_entries("", shared)


def _state_entries(name: str, value: Any) -> Iterator[Entry]:
    if isinstance(value, torch.Tensor):
        yield _tensor_entry("optimizer", name, value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _state_entries(f"{name}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from _state_entries(f"{name}.{position}", item)
    elif isinstance(value, (bool, int, float, complex, str)):
        yield Entry("optimizer", name, type(value).__name__, (), repr(value).encode())
    elif value is not None:
        raise UsageError(
            f"optimizer keeps a {type(value).__name__} as {name!r}, which has no digest; use tensors or numbers"
        )


def _tensor_entry(kind: str, name: str, tensor: torch.Tensor) -> Entry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Entry(kind, name, dtype, tuple(tensor.shape), bytes_of(tensor.cpu()).numpy())
