"""The optimizer of a run: made, checked, and applied to the mean gradient in one compiled function.

Of several workers the first updates all: what is compiled together decides the bits, and any update may look at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.arithmetic import Gradient
from phalanx.frameworks.jax.tree import Trees, plain, strong

EXAMPLE = "optimizer=optax.adamw(1e-3)"


class Update:
    """Clipping and the optimizer over all parameters, compiled together once.

    Parameters
    ----------
    definition : Definition

    Attributes
    ----------
    lr : float
        The default optimizer's rate; NaN for others, which keep theirs to themselves.
    steady : bool
        Whether an update leaves the shapes and dtypes of the state as they are.
    homes : sequence of numpy.ndarray or None
        The memory of all parameters and of all of the state, where workers share it.
    """

    def __init__(self, definition: Definition) -> None:
        self._transformation = build(definition)
        self._apply = jax.jit(self._updated)
        self.lr = definition.lr if definition.optimizer is None else math.nan
        self.homes: Sequence[np.ndarray] | None = None

    def begin(self, params: Any) -> Any:
        """The optimizer's state before the first step."""
        try:
            start = jax.tree.map(strong, self._transformation.init(params))
            _, after = jax.eval_shape(self._updated, params, start, params)
        except Exception as error:
            raise UsageError(
                f"optimizer raised {type(error).__name__}: {error}; it is used as in updates, state = "
                f"optimizer.update(gradient, state, params), as in {EXAMPLE}"
            ) from error
        self.steady = _specs(after) == _specs(start)
        return start

    def step(self, state: Trees, gradient: Gradient) -> None:
        """Take the state to the next; returns when it is computed."""
        if gradient[0] is None:  # another worker has the gradient of all, and updates all
            return
        tree = jax.tree.unflatten(jax.tree.structure(state.params), gradient)
        after = jax.block_until_ready(self._apply(tree, state.optimizer, state.params))
        if self.homes is None:
            state.params, state.optimizer = after
        else:
            for home, leaf in zip(self.homes, jax.tree.leaves(after), strict=True):
                home[...] = plain(leaf)

    def _updated(self, gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = self._transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), jax.tree.map(strong, state)


def _specs(tree: Any) -> list[tuple[Any, Any]]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def build(definition: Definition) -> optax.GradientTransformation:
    """The recipe's transformation, behind ``optax.clip_by_global_norm`` where it clips.

    Raises
    ------
    UsageError
        ``optimizer`` is neither one nor a function that returns one.
    """
    made = definition.optimizer
    if made is None:
        made = optax.adam(definition.lr)
    elif not isinstance(made, optax.GradientTransformation):
        try:
            made = made()
        except Exception as error:
            raise UsageError(
                f"optimizer raised {type(error).__name__}: {error}; for parameters in jax arrays it is an "
                f"optax.GradientTransformation, or a function without arguments that returns one, as in {EXAMPLE}"
            ) from error
    if not isinstance(made, optax.GradientTransformation):
        raise UsageError(
            f"optimizer returned a {type(made).__name__}; for parameters in jax arrays it must return an "
            f"optax.GradientTransformation, as in {EXAMPLE}"
        )
    if math.isfinite(definition.max_norm):
        return optax.chain(optax.clip_by_global_norm(definition.max_norm), made)
    return made
