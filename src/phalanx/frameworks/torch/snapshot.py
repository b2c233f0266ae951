"""A torch state as snapshots hold it: tensors by name, and all else as plain values."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.errors import SnapshotError, UsageError
from phalanx.frameworks.torch.buffers import Buffers, bytes_of
from phalanx.frameworks.torch.optimizer import Update
from phalanx.state.captured import Captured
from phalanx.state.plain import decoded, encoded
from phalanx.state.tensors import CODES, Tensor


@dataclass(frozen=True)
class Snapshots:
    """Implements ``contracts.Snapshots`` for PyTorch."""

    model: torch.nn.Module
    updates: Update
    buffers: Buffers

    def capture(self, *, copy: bool) -> Captured:
        """See ``contracts.Snapshots.capture``."""
        return captured(self.model, self.updates, copy=copy)

    def adopt(self, state: Captured) -> None:
        """See ``contracts.Snapshots.adopt``."""
        if self.updates.foreign:
            warnings.warn(
                "the optimizer is not one of torch's own: what it keeps outside optimizer.state is not in snapshots, "
                "so that the run may go on differently",
                stacklevel=2,
            )
        adopt(self.model, self.updates, state)
        self.buffers.renew()

    def adopt_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See ``contracts.Snapshots.adopt_weights``."""
        adopt_weights(self.model, weights)
        self.buffers.renew()


def captured(model: torch.nn.Module, updates: Update, *, copy: bool) -> Captured:
    """Everything that a run needs to go on: weights, buffers, optimizer state, options, schedules."""
    weights = {name: _taken(tensor, copy=copy) for name, tensor in _weights(model).items()}
    training: dict[str, Tensor] = {}

    def keep(leaf: Any, path: str) -> Any:
        if not isinstance(leaf, torch.Tensor) or _name(leaf.dtype) not in CODES:
            return None
        training[path] = _taken(leaf, copy=copy)
        return [path, list(leaf.stride()), leaf.device.type]

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizers: list[Any] = []
    for number, optimizer in enumerate(updates.optimizers):
        state = {names[id(key)]: value for key, value in optimizer.state.items() if isinstance(key, torch.Tensor)}
        beside = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        optimizers.append([encoded(part, keep, f"optimizer.{number}") for part in (state, beside)])
    facts = {"optimizers": optimizers, "options": encoded(updates.options(), keep, "options")}
    return Captured(weights, training, facts)


def adopt(model: torch.nn.Module, updates: Update, state: Captured) -> None:
    """Make a captured state that of ``model`` and its optimizers.

    Raises
    ------
    SnapshotError
        It is of another model, or not what ``captured`` makes.
    """
    adopt_weights(model, state.weights)
    parameters = dict(model.named_parameters())
    find = functools.partial(_found, state.training, next(iter(parameters.values())).device)
    try:
        for optimizer, (described, beside) in zip(updates.optimizers, state.facts["optimizers"], strict=True):
            optimizer.state.clear()
            for name, value in decoded(described, find).items():
                optimizer.state[parameters[name]] = value
            optimizer.state.update(decoded(beside, find))
        updates.take_options(decoded(state.facts["options"], find))
        for optimizer in updates.optimizers:
            _check_fused(optimizer, parameters.values())
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise SnapshotError(f"the optimizers' state in the snapshot does not fit this recipe's: {error}") from error


def _check_fused(optimizer: torch.optim.Optimizer, parameters: Collection[torch.Tensor]) -> None:
    """Fused kernels take for granted that state lies as the parameter does, and write wherever that leads."""
    known = set(map(id, parameters))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError("its options name other parameters")
            like = torch.empty_like(parameter, device="meta")
            for name, value in optimizer.state.get(parameter, {}).items() if group.get("fused") else ():
                if isinstance(value, torch.Tensor) and (name != "step" or value.dim()):
                    spec = [(part.dtype, part.shape, part.stride()) for part in (like, value)]
                    if spec[0] != spec[1]:
                        raise ValueError(f"{name} is {_spelled(value)}, which does not lie as its parameter does")


def adopt_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write parameters and buffers.

    Raises
    ------
    SnapshotError
        They are of another model; names the first that differs.
    """
    mine = _weights(model)
    for name in [*mine, *weights]:
        spec = [None if tensor is None else _spelled(tensor) for tensor in (mine.get(name), weights.get(name))]
        if spec[0] != spec[1]:
            raise SnapshotError(f"{name} is {spec[1] or 'missing'} in the snapshot, but {spec[0] or 'missing'} here")
    with torch.no_grad():
        for name, tensor in mine.items():
            value = tensor_of(weights[name])
            if not torch.equal(bytes_of(tensor.detach().cpu()), bytes_of(value)):  # constants may not be writable
                tensor.copy_(value)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _taken(tensor: torch.Tensor, *, copy: bool) -> Tensor:
    if _name(tensor.dtype) not in CODES:
        raise UsageError(f"a tensor of the model is {tensor.dtype}, which no snapshot can hold; train without run_dir")
    content: Any = bytes_of(tensor.detach().cpu()).numpy()
    return Tensor(_name(tensor.dtype), tuple(tensor.shape), content.copy() if copy else content)


def _found(training: Mapping[str, Tensor], device: torch.device, place: Any) -> torch.Tensor:
    name, strides, kind = place
    tensor = tensor_of(training[name])
    target = "cpu" if kind == "cpu" else device
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=target).copy_(tensor)


def tensor_of(stored: Tensor) -> torch.Tensor:
    """A stored tensor, in memory of its own."""
    dtype = getattr(torch, stored.dtype)
    if not math.prod(stored.shape):
        return torch.empty(stored.shape, dtype=dtype)
    return torch.frombuffer(bytearray(stored.content), dtype=dtype).reshape(stored.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spelled(tensor: torch.Tensor | Tensor) -> str:
    dtype = _name(tensor.dtype) if isinstance(tensor, torch.Tensor) else tensor.dtype
    return f"{dtype}{list(tensor.shape)}"
