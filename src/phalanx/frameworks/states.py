"""States of any framework as names and bytes: digests, and tensors as snapshots and files hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from phalanx.errors import UsageError
from phalanx.frameworks import record, registry
from phalanx.seams.records import Tensor


def digest(model: Any, optimizer: Any = None, step: int | None = None, state: Any = ()) -> str:
    """The digest of a state: equal digests mean equal bits.

    Parameters
    ----------
    model : torch.nn.Module, pytree of jax arrays, or object with tensors of tinygrad
    optimizer : torch.optim.Optimizer, sequence of them, optax state, optimizer of tinygrad, or None
        Its state is included, tensors and scalars.
    step : int or None
        How many optimizer steps led here.
    state : pytree
        What a jax model keeps beside its parameters, as ``forward_fn`` returned it.

    Returns
    -------
    str
        64 hexadecimal digits; equals ``result.digest`` of a run that ended in the same state.
    """
    framework = registry.recognised(model) or registry.EVERYWHERE[0]
    return framework.digest(model, optimizer, step, state)


def tensor_of(tensor: Tensor, facts: dict[str, Any]) -> Any:
    """A tensor of a snapshot with these facts as its framework's own; for some, as a numpy array."""
    framework = facts.get("framework", registry.EVERYWHERE[0].name)
    return registry.named(framework).tensor_of(tensor)


def stored(leaf: Any) -> Tensor | None:
    """A tensor or array as a snapshot holds it, in memory of its own; None for all else."""
    if isinstance(leaf, np.ndarray):
        return record.stored(leaf)
    found = (each.stored(leaf) for each in registry.EVERYWHERE)
    return next((tensor for tensor in found if tensor is not None), None)


def weights_of(model: Any, params: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a model by name, as its own framework would load them; ``instead``: other values of parameters."""
    whole = (registry.recognised(model) or registry.EVERYWHERE[0]).weights(model, params, instead)
    if None in whole.values():
        raise UsageError("a parameter has a dtype that safetensors does not have; save it in another way")
    return whole  # type: ignore[return-value]
