"""A tinygrad state by name, for snapshots and digests; it names no device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad.nn.state import get_state_dict

from phalanx.definition.digest import Entry
from phalanx.definition.plain import check_specs
from phalanx.errors import SnapshotError
from phalanx.frameworks.tinygrad import optimizer as updates
from phalanx.frameworks.tinygrad.forward import plain
from phalanx.seams.snapshots import Captured, Tensor

NAME, OPTIMIZER = "tinygrad", "optimizer."
FRAMEWORK, ENVIRONMENT = "framework", "environment"

Named = dict[str, np.ndarray]


@dataclass
class State:
    """What changes from step to step, read from the first device: numpy arrays by name."""

    params: Named
    buffers: Named
    optimizer: Named


def captured(state: State, environment: Mapping[str, str]) -> Captured:
    """See ``seams.Framework.capture``. ``environment``: what changes bits and is not in a recipe."""
    training = {OPTIMIZER + name: array for name, array in state.optimizer.items()}
    facts = {FRAMEWORK: NAME, ENVIRONMENT: environment}
    return Captured(_stored({**state.params, **state.buffers}), _stored(training), facts)


def adopted(own: State, environment: Mapping[str, str], state: Captured) -> State:
    """See ``seams.Framework.adopt``: ``own`` with what was stored."""
    if state.facts:
        if state.facts.get(FRAMEWORK) != NAME:
            raise SnapshotError("the snapshot is not of a tinygrad recipe")
        training = [(name, tensor) for name, tensor in state.training.items() if name.startswith(OPTIMIZER)]
        own.optimizer = _fitted(own.optimizer, {name.removeprefix(OPTIMIZER): tensor for name, tensor in training})
    fitted = _fitted({**own.params, **own.buffers}, state.weights)
    own.params, own.buffers = ({name: fitted[name] for name in part} for part in (own.params, own.buffers))
    return own


def array_of(stored: Tensor) -> np.ndarray:
    """A stored tensor as a numpy array of its own."""
    return np.frombuffer(bytearray(stored.content), dtype=np.dtype(stored.dtype)).reshape(stored.shape)


def entries(state: State) -> Iterator[Entry]:
    """Parameters, buffers, then the optimizer's state, by name."""
    for kind, part in (("parameter", state.params), ("buffer", state.buffers), ("optimizer", state.optimizer)):
        for name, array in part.items():
            yield Entry(kind, name, array.dtype.name, array.shape, _bytes(array))


def state_of(model: Any, optimizer: Any) -> State:
    """The state of a loop written by hand: a model, and an optimizer, several, or none."""
    named: dict[str, Any] = {}
    for name, tensor in get_state_dict(model).items():
        if not any(tensor is other for other in named.values()):
            named[name] = tensor
    whole = optimizer if not isinstance(optimizer, Sequence) or len(optimizer) != 1 else optimizer[0]
    state = {} if whole is None else dict(updates.entries(whole, list(named.values())))
    return State(
        {name: plain(tensor) for name, tensor in named.items() if tensor.is_param},
        {name: plain(tensor) for name, tensor in named.items() if not tensor.is_param},
        {name: plain(tensor) for name, tensor in state.items()},
    )


def _stored(named: Named) -> dict[str, Tensor]:
    return {name: Tensor(array.dtype.name, array.shape, _bytes(array)) for name, array in named.items()}


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _fitted(own: Named, stored: Mapping[str, Tensor]) -> Named:
    """The stored arrays, if they are those that there are here."""
    check_specs(own, stored, lambda part: f"{part.dtype}{list(part.shape)}")
    return {name: array_of(stored[name]) for name in own}
