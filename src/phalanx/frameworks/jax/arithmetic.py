"""Elementwise arithmetic over gradients, one compiled call per vector. Elementwise, so slicing moves no bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Gradient = list[Any]


def add(left: Gradient, right: Gradient) -> Gradient:
    """``left + right``."""
    return _add(left, right)


def scale(vector: Gradient, factor: float) -> Gradient:
    """``vector * factor``, each element computed in float32 at least and rounded once."""
    return _scale(vector, factor)


def divide(vector: Gradient, divisor: float) -> Gradient:
    """``vector / divisor``, each element computed in float32 at least and rounded once."""
    return _divide(vector, divisor)


def finite(vector: Gradient) -> bool:
    """Whether every element is finite."""
    return bool(_finite(vector))


def norm(vector: Gradient) -> float:
    """2-norm over all elements, added in float32 at least."""
    return float(_norm(vector))


def wide(leaf: Any) -> Any:
    """``leaf`` in float32 at least."""
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


@jax.jit
def _add(left: Gradient, right: Gradient) -> Gradient:
    return [a + b for a, b in zip(left, right, strict=True)]


@jax.jit
def _scale(vector: Gradient, factor: Any) -> Gradient:
    return [(wide(a) * factor).astype(a.dtype) for a in vector]


@jax.jit
def _divide(vector: Gradient, divisor: Any) -> Gradient:
    return [(wide(a) / divisor).astype(a.dtype) for a in vector]


@jax.jit
def _finite(vector: Gradient) -> Any:
    return jnp.all(jnp.stack([jnp.isfinite(a).all() for a in vector]))


@jax.jit
def _norm(vector: Gradient) -> Any:
    return jnp.sqrt(sum(jnp.sum(jnp.square(wide(a))) for a in vector))
