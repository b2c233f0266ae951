"""States of any framework as names and bytes: digests, and tensors as snapshots and files hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from phalanx.definition.digest import Entry, digest_of
from phalanx.errors import UsageError
from phalanx.frameworks.jax import outside
from phalanx.frameworks.registry import opened_jax, opened_tinygrad
from phalanx.frameworks.tinygrad import outside as outside_tinygrad
from phalanx.seams.snapshots import CODES, Tensor


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
    if outside.is_pytree(model) or outside_tinygrad.is_model(model):
        return digest_of(_entries(model, optimizer, state), step)
    from phalanx.frameworks.torch import snapshot as torch_snapshot

    return torch_snapshot.digest(model, optimizer, step)


def tensor_of(stored: Tensor, facts: dict[str, Any]) -> Any:
    """A tensor of a snapshot with these facts as its framework's own; for jax and tinygrad, as a numpy array."""
    if facts.get("framework") == "jax":
        opened_jax()
        from phalanx.frameworks.jax import snapshot

        return snapshot.array_of(stored)
    if facts.get("framework") == "tinygrad":
        return opened_tinygrad().array_of(stored)
    from phalanx.frameworks.torch import snapshot as torch_snapshot

    return torch_snapshot.tensor_of(stored)


def stored(leaf: Any) -> Tensor | None:
    """A tensor or array as a snapshot holds it, in memory of its own; None for all else."""
    if isinstance(leaf, np.ndarray):
        return Tensor(str(leaf.dtype), leaf.shape, np.array(leaf, order="C")) if str(leaf.dtype) in CODES else None
    from phalanx.frameworks.torch import snapshot as torch_snapshot

    return torch_snapshot.stored(leaf)


def weights_of(model: Any, params: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a model by name, as its own framework would load them; ``instead``: other values of parameters."""
    from phalanx.frameworks.torch import snapshot as torch_snapshot

    whole = torch_snapshot.state_dict(model, instead)
    if whole is None:  # a tree of arrays, or an object with tensors
        arrays = {name: instead.get(name, value) for name, value in params.items()}
        whole = {name: stored(_numbers(value)) for name, value in arrays.items()}
    if None in whole.values():
        raise UsageError("a parameter has a dtype that safetensors does not have; save it in another way")
    return whole  # type: ignore[return-value]


def _entries(model: Any, optimizer: Any, state: Any = ()) -> Iterable[Entry]:
    if outside.is_pytree(model):
        from phalanx.frameworks.jax import snapshot

        return snapshot.entries(model, optimizer, state)
    from phalanx.frameworks.tinygrad import snapshot as tinygrad_snapshot

    return tinygrad_snapshot.entries(tinygrad_snapshot.state_of(model, optimizer))


def _numbers(array: Any) -> np.ndarray:
    """An array of any framework as numpy's; tinygrad's do not convert by themselves."""
    return array.numpy() if type(array).__name__ == "Tensor" else np.asarray(array)
