"""The state of a jax run: trees of arrays, and what these may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from phalanx.errors import UsageError
from phalanx.frameworks.arrays import State
from phalanx.plan.keys import MASK32

ALONE = "params"  # the name of a tree that is one array
BESIDE = "state."  # before the names of what a model keeps beside its parameters, in a snapshot


@dataclass
class Trees:
    """What changes from step to step: two trees of arrays that are replaced, never written.

    ``buffers``: what the model keeps beside its parameters, a tree of numpy arrays. They are written between steps.
    """

    params: Any
    optimizer: Any
    buffers: Any = ()

    def read(self) -> State:
        """The state by name. Buffers are copies; jax arrays are never written, so theirs are views."""
        copies = {name: leaf.copy() for name, leaf in named(self.buffers).items()}
        return State(numbers(self.params), copies, numbers(self.optimizer), BESIDE)

    def write(self, state: State) -> None:
        """Continue from copies of these numbers."""
        self.params = copied(self.params, list(state.params.values()))
        self.optimizer = copied(self.optimizer, list(state.optimizer.values()))
        for leaf, array in zip(jax.tree.leaves(self.buffers), state.buffers.values(), strict=True):
            leaf[...] = array


def state_of(params: Any, optimizer: Any, buffers: Any) -> State:
    """The state of a loop written by hand."""
    params, buffers, optimizer = (numbers(jax.tree.map(strong, tree)) for tree in (params, buffers, optimizer))
    return State(params, buffers, optimizer)


def numbers(tree: Any) -> dict[str, np.ndarray]:
    """The leaves by name, as numpy has them."""
    return {name: plain(leaf) for name, leaf in named(tree).items()}


def named(tree: Any) -> dict[str, Any]:
    """The leaves by name, in their order. A name joins keys, positions and attributes by dots."""
    paths = [path for path, _ in tree_util.tree_flatten_with_path(tree)[0]]
    names = [tree_util.keystr(path, simple=True, separator=".") or ALONE for path in paths]
    if len(set(names)) < len(names):  # a key with a dot in it
        names = [tree_util.keystr(path) for path in paths]
    return dict(zip(names, jax.tree.leaves(tree), strict=True))


def replaced(tree: Any, weights: Mapping[str, Any]) -> Any:
    """``tree`` with these values instead of the leaves of these names, on the leaves' devices."""
    leaves = [like(leaf, np.asarray(weights[name])) if name in weights else leaf for name, leaf in named(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves) if weights else tree


def placed(params: Any, device: Any) -> Any:
    """Parameters on ``device`` (None: where they are), in containers of the run's own; arrays cannot be written.

    Raises
    ------
    UsageError
        A leaf cannot be trained; names it.
    """
    for name, leaf in named(params).items():
        if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            kind = f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, jax.Array) else type(leaf).__name__
            raise UsageError(
                f"make_model returned a tree in which {name!r} is a {kind}; every leaf must be a jax array of floating "
                "numbers, as all of them are trained: use jnp.asarray(value, jnp.float32) for a number. Of a module, "
                "return what nnx.split(model, nnx.Param, ...) or eqx.filter(model, eqx.is_inexact_array) gives; the "
                "rest goes into forward_fn, which puts both together by nnx.merge or eqx.combine"
            )
    places = set[Any]().union(*(leaf.devices() for leaf in jax.tree.leaves(params)))
    if device is None and len(places) > 1:
        raise UsageError(f"make_model returned parameters spread over {sorted(map(str, places))}; put them on one")
    return jax.device_put(jax.tree.map(strong, params), next(iter(places)) if device is None else device)


def parted(model: Any, *, stateful: bool) -> tuple[Any, Any]:
    """Split what ``make_model`` returned into parameters and state; the state in writable numpy arrays.

    Raises
    ------
    UsageError
        ``forward_fn`` takes a state, but this is no pair, or the state has dtypes that cannot be settled.
    """
    if not stateful:
        return model, ()
    if not isinstance(model, tuple) or len(model) != 2:
        raise UsageError(
            f"forward_fn takes a state, but make_model returned a {type(model).__name__}; return (params, state), or "
            "call that parameter otherwise"
        )
    params, state = model
    for name, leaf in named(state).items():
        dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        if getattr(dtype, "kind", "V") not in "fiub":
            raise UsageError(
                f"make_model returned a state in which {name!r} is {dtype}; use float32, integers or booleans, and the "
                "key of forward_fn for random numbers"
            )
    return params, jax.tree.map(lambda leaf: np.array(strong(leaf)), state)


def strong(leaf: Any) -> Any:
    """A leaf as a strongly typed array: one made of a Python number would take the dtype of others."""
    array = jnp.asarray(leaf)
    return array if is_key(array) else jax.lax.convert_element_type(array, array.dtype)


def plain(leaf: jax.Array) -> np.ndarray:
    """The numbers of a leaf in C order; of a random key, its words."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf, order="C")


def like(leaf: jax.Array, numbers: np.ndarray) -> jax.Array:
    """An array of these numbers on the device of ``leaf``; random keys if ``leaf`` holds those."""
    (device,) = leaf.devices()
    array = jax.device_put(numbers, device)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key(leaf) else array


def copied(tree: Any, arrays: Sequence[np.ndarray]) -> Any:
    """``tree`` with copies of these arrays as its leaves, on the same devices."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [like(leaf, array.copy()) for leaf, array in zip(leaves, arrays, strict=True)])


def is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a leaf holds random keys, which are no numbers."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def words(key: int) -> np.ndarray:
    """A 64-bit key as the two words that ``jax.random`` makes keys of."""
    return np.array([key >> 32, key & MASK32], dtype=np.uint32)


def prng_key(data: Any) -> jax.Array:
    """``words(key)`` as a typed key, of the same kind whatever jax's default is."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")
