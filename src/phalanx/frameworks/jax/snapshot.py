"""A jax state by name, for snapshots and digests. Arrays are never written, so nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.definition.digest import Entry
from phalanx.definition.plain import check_specs
from phalanx.errors import SnapshotError, UsageError
from phalanx.frameworks.jax.environment import recorded
from phalanx.frameworks.jax.tree import is_key, named, plain, strong
from phalanx.seams.snapshots import CODES, Captured, Tensor

OPTIMIZER, STATE = "optimizer.", "state."
FRAMEWORK, ENVIRONMENT = "framework", "environment"


@dataclass
class State:
    """What changes from step to step: two trees of arrays that are replaced, never written.

    ``buffers``: what the model keeps beside, if it does, a tree of numpy's arrays, which are written between steps.
    """

    params: Any
    optimizer: Any
    buffers: Any = ()


def captured(state: State, device: Any) -> Captured:
    """See ``seams.Framework.capture``."""
    weights = {name: _taken(name, leaf) for name, leaf in named(state.params).items()}
    weights |= {STATE + name: _taken(name, leaf.copy()) for name, leaf in named(state.buffers).items()}
    training = {OPTIMIZER + name: _taken(name, leaf) for name, leaf in named(state.optimizer).items()}
    return Captured(weights, training, {FRAMEWORK: "jax", ENVIRONMENT: recorded(device)})


def adopt(mine: State, device: Any, state: Captured) -> None:
    """See ``seams.Framework.adopt``."""
    optimizer = mine.optimizer
    if state.facts:
        if state.facts.get(FRAMEWORK) != "jax":
            raise SnapshotError("the snapshot is not of a jax recipe")
        stored = {name: tensor for name, tensor in state.training.items() if name.startswith(OPTIMIZER)}
        optimizer = _fitted(optimizer, stored, OPTIMIZER, device)
    buffers = {STATE + name: leaf for name, leaf in named(mine.buffers).items()}
    params = {name: tensor for name, tensor in state.weights.items() if name not in buffers}
    mine.params = _fitted(mine.params, params, "", device)
    check_specs(buffers, {name: tensor for name, tensor in state.weights.items() if name in buffers}, _spelled)
    for name, leaf in buffers.items():
        leaf[...] = array_of(state.weights[name])
    mine.optimizer = optimizer


def _fitted(tree: Any, stored: Mapping[str, Tensor], prefix: str, device: Any) -> Any:
    """``tree`` with the stored arrays in place of its own."""
    mine = {prefix + name: leaf for name, leaf in named(tree).items()}
    check_specs(mine, stored, _spelled)
    arrays = [_made(stored[name], leaf) for name, leaf in mine.items()]
    return jax.device_put(jax.tree.unflatten(jax.tree.structure(tree), arrays), device)


def array_of(stored: Tensor) -> np.ndarray:
    """A stored tensor as a numpy array of its own: one of jax would start its backend with whatever threads."""
    return np.frombuffer(bytearray(stored.content), dtype=jnp.dtype(stored.dtype)).reshape(stored.shape)


def _made(stored: Tensor, like: jax.Array) -> jax.Array:
    array = jnp.array(array_of(stored))
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like)) if is_key(like) else array


def _taken(name: str, leaf: jax.Array) -> Tensor:
    numbers = plain(leaf)
    if str(numbers.dtype) not in CODES:
        raise UsageError(f"{name} is {numbers.dtype}, which no snapshot can hold; train without run_dir")
    return Tensor(str(numbers.dtype), numbers.shape, numbers.reshape(-1).view(np.uint8))


def _spelled(part: jax.Array | Tensor) -> str:
    if isinstance(part, Tensor):
        return f"{part.dtype}{list(part.shape)}"
    numbers = plain(part)
    return f"{numbers.dtype}{list(numbers.shape)}"


def entries(params: Any, optimizer: Any, buffers: Any = ()) -> Iterator[Entry]:
    """Parameters, the state beside them, then the optimizer's state, by name."""
    for kind, tree in (("parameter", params), ("buffer", buffers), ("optimizer", optimizer)):
        for name, leaf in named(tree).items():
            numbers = plain(strong(leaf))
            content = numbers.reshape(-1).view(np.uint8)
            yield Entry(kind, name, str(numbers.dtype), numbers.shape, content)
