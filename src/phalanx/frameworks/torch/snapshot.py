"""A torch state by name: tensors and plain values as snapshots hold them, and entries for digests."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from phalanx.definition import checks
from phalanx.definition.digest import Entry
from phalanx.definition.plain import check_like, check_specs, decoded, encoded, taking_over
from phalanx.errors import UsageError
from phalanx.frameworks.torch.arithmetic import brought, bytes_of
from phalanx.frameworks.torch.optimizer import Updates, fit_options
from phalanx.frameworks.torch.optimizer_state import check_state, find_pieces, on_device
from phalanx.seams.records import CODES, STATE_DICT, Captured, Tensor


def captured(model: torch.nn.Module, updates: Updates, *, copy: bool) -> Captured:
    """Everything that a run needs to go on: weights, buffers, optimizer state, options, schedules."""
    weights = {name: _taken(tensor, copy=copy) for name, tensor in _weights(model).items()}
    training: dict[str, Tensor] = {}

    def keep(leaf: Any, path: str) -> Any:
        if isinstance(leaf, torch.dtype) and _name(leaf) in CODES:
            return [_name(leaf)]
        if not isinstance(leaf, torch.Tensor) or _name(leaf.dtype) not in CODES:
            return None
        training[path] = _taken(leaf, copy=copy)
        return [path, list(leaf.stride()), leaf.device.type]

    names = {id(parameter): name for name, parameter in updates.named}
    optimizers: list[Any] = []
    for number, optimizer in enumerate(updates.optimizers):
        state = {names[id(key)]: value for key, value in optimizer.state.items() if isinstance(key, torch.Tensor)}
        beside = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        optimizers.append([encoded(part, keep, f"optimizer.{number}") for part in (state, beside)])
    facts: dict[str, Any] = {"optimizers": optimizers, "options": encoded(updates.options(), keep, "options")}
    facts[STATE_DICT] = _other_names(model)
    facts["device"] = next((parameter.device.type for _, parameter in updates.named), "cpu")
    return Captured(weights, training, facts)


def adopt(model: torch.nn.Module, updates: Updates, state: Captured) -> None:
    """Give ``model`` and its optimizers a captured state; without facts, give the model its weights only.

    Raises
    ------
    SnapshotError
        It is of another model, or not what ``captured`` makes.
    """
    if updates.custom and state.facts:
        checks.warn(
            "the optimizer is not one of torch's own, or has step hooks: what these keep outside optimizer.state is "
            "not in snapshots, so that the run may go on differently"
        )
    _adopt_weights(model, state.weights)
    if not state.facts:
        return
    parameters = dict(updates.named)
    remaining = {name: tensor for name, tensor in state.training.items() if name.startswith(("optimizer.", "options."))}
    find = functools.partial(_found, remaining)
    with taking_over("the optimizers' state"):
        pieces = find_pieces(updates, list(parameters.values()))
        for number, (optimizer, theirs) in enumerate(zip(updates.optimizers, state.facts["optimizers"], strict=True)):
            optimizer.state.clear()
            described, beside = (decoded(part, find, f"optimizer.{number}") for part in theirs)
            for name, value in described.items():
                optimizer.state[parameters[name]] = on_device(value, parameters[name], optimizer)
            check_like(beside, beside if updates.custom else {}, f"optimizer.{number}")
            optimizer.state.update(beside)
        options = decoded(state.facts["options"], find, "options")
        if remaining:
            raise ValueError(f"nothing names the tensors {', '.join(remaining)}")
        fit_options(updates, options)
        updates.take_options(options)
        _ = updates.lr  # which is a number, or raises
        check_state(updates, pieces)


def _adopt_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write parameters and buffers.

    Raises
    ------
    SnapshotError
        They are of another model; names the first that differs.
    """
    mine = _weights(model)
    check_specs(mine, weights)
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
    content: Any = bytes_of(brought(tensor.detach())).numpy()
    own = tensor.device.type != "cpu"  # what came from a device is in memory of its own already
    return Tensor(_name(tensor.dtype), tuple(tensor.shape), content.copy() if copy and not own else content)


def stored(leaf: Any) -> Tensor | None:
    """A tensor in memory of its own, as snapshots hold it; None for all else."""
    return _taken(leaf, copy=True) if isinstance(leaf, torch.Tensor) and _name(leaf.dtype) in CODES else None


def state_dict(model: torch.nn.Module, instead: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """What ``model.state_dict()`` has, with some parameters replaced by name."""
    others = {id(parameter): instead[name] for name, parameter in model.named_parameters() if name in instead}
    whole = model.state_dict(keep_vars=True)
    return {name: stored(others.get(id(item), item)) for name, item in whole.items() if isinstance(item, torch.Tensor)}


def _other_names(model: torch.nn.Module) -> list[tuple[str, str | None]] | None:
    """Names in ``model.state_dict()`` that weights here lack, as tied ones, each with the weight that it is.

    None stands for a weight that it lacks; None as a whole: it has tensors that are no weights, or cannot be asked.
    """
    own = {id(tensor): name for name, tensor in _weights(model).items()}
    try:
        entries = model.state_dict(keep_vars=True).items()
    except Exception:  # of user code, which may never want to load it
        return None
    listed = {name: own.get(id(item)) for name, item in entries if isinstance(item, torch.Tensor)}
    if None in listed.values():
        return None
    others = [(name, weight) for name, weight in listed.items() if name != weight]
    return others + [(name, None) for name in own.values() if name not in listed]


def _found(training: dict[str, Tensor], reference: Any, path: str) -> Any:
    name, *more = reference
    if not more and name in CODES:
        return getattr(torch, name)
    if name != path:
        raise ValueError(f"{path} is {name!r:.80}")
    tensor = tensor_of(training.pop(path))
    return torch.empty_strided(tensor.shape, more[0], dtype=tensor.dtype, device="cpu").copy_(tensor)


def tensor_of(stored: Tensor) -> torch.Tensor:
    """A stored tensor, in memory of its own."""
    dtype = getattr(torch, stored.dtype)
    if not math.prod(stored.shape):
        return torch.empty(stored.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(stored.content), dtype=dtype).reshape(stored.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def entries_of_loop(model: Any, optimizer: Any) -> Iterator[Entry]:
    """The state of a loop written by hand: a module with an optimizer, several, or none.

    Raises
    ------
    UsageError
        They are something else.
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
    return entries(model, listed)


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
    return Entry(kind, name, _name(tensor.dtype), tuple(tensor.shape), bytes_of(brought(tensor.detach())).numpy())
