"""Random keys of the plan as jax has them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from phalanx.plan.keys import MASK32


def words(key: int) -> np.ndarray:
    """A 64-bit key as the two words that ``jax.random`` makes keys of."""
    return np.array([key >> 32, key & MASK32], dtype=np.uint32)


def prng_key(data: Any) -> jax.Array:
    """``words(key)`` as a typed key, of the same kind whatever jax's default is."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")
