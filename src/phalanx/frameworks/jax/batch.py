"""Batches on their way from numpy to jax, which would change dtypes that it does not have: those are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from phalanx.errors import UsageError

LIMIT = 1 << 31
NUMBERLESS = "OSUmM"  # numpy's kinds of objects, bytes, text and dates


def column(array: Any) -> np.ndarray:
    """A column as a numpy array over the same memory, from which shares are taken."""
    try:
        return np.asarray(array)
    except (TypeError, RuntimeError) as error:
        raise UsageError(
            f"a column of {array.dtype} cannot be read as a numpy array ({error}); pass one, or a jax array"
        ) from error


def collate(samples: Sequence[Any]) -> Any:
    """A batch out of samples of one form: their leaves stacked, Python's floats as float32."""
    return jax.tree.map(lambda *leaves: _stacked(leaves), *samples)


def checked(batch: Any, origin: str, *, double: bool) -> Any:
    """``batch`` with leaves that jax takes as they are; ``double``: the model has parameters of 64 bits.

    Raises
    ------
    UsageError
        A leaf is of a kind or dtype that jax would change; names it.
    """
    if all(_is_plain(leaf) for leaf in jax.tree.leaves(batch)):
        return batch
    return tree_util.tree_map_with_path(lambda path, leaf: _checked(leaf, origin, path, double), batch)


def _is_plain(leaf: Any) -> bool:
    """What nearly all batches are made of needs no closer look."""
    return type(leaf) is np.ndarray and (leaf.dtype in (np.float32, np.int32) or _is_small(leaf))


def _is_small(array: np.ndarray) -> bool:
    """Whether these are 64-bit integers that fit into 32 bits."""
    return array.dtype == np.int64 and array.size > 0 and array.min() >= -LIMIT and array.max() < LIMIT


def _checked(leaf: Any, origin: str, path: Any, double: bool) -> Any:
    if isinstance(leaf, (jax.Array, bool, int, float)):
        return leaf
    array = np.asarray(leaf)
    name = origin + tree_util.keystr(path)
    if array.dtype.kind in NUMBERLESS:
        raise UsageError(f"{name} is a {type(leaf).__name__}, which no jax array can hold; convert it to numbers")
    if array.dtype.kind in "fc" and array.dtype in (np.float64, np.complex128) and not double:
        raise UsageError(
            f"{name} is {array.dtype}, but the model's parameters are not; dtypes are never changed behind your back: "
            "convert it with .astype(numpy.float32)"
        )
    if _is_cut_off(array):
        raise UsageError(
            f"{name} is {array.dtype} with numbers beyond 32 bits, which jax would cut off; make them smaller, or "
            'allow 64 bits: jax.config.update("jax_enable_x64", True)'
        )
    return array


def _is_cut_off(array: np.ndarray) -> bool:
    if array.dtype not in (np.int64, np.uint64) or not array.size:
        return False
    kept = np.iinfo(jax.dtypes.canonicalize_dtype(array.dtype))
    return bool(array.max() > kept.max or array.min() < kept.min)


def _stacked(leaves: Sequence[Any]) -> np.ndarray:
    if isinstance(leaves[0], float):
        return np.asarray(leaves, dtype=jnp.float32)
    return np.stack([np.asarray(leaf) for leaf in leaves])
