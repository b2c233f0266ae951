"""The optimizer of a run: made, checked, and applied to the mean gradient in one compiled function."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax

from phalanx.definition import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.jax.tree import strong

EXAMPLE = "optimizer=optax.adamw(1e-3)"


class Update:
    """Clipping and the optimizer over all parameters, compiled together once.

    Parameters
    ----------
    definition : Definition
    params : pytree

    Attributes
    ----------
    start : pytree
        The optimizer's state before the first step.
    lr : float
        The default optimizer's rate; NaN for others, which keep theirs to themselves.
    """

    def __init__(self, definition: Definition, params: Any) -> None:
        self._transformation = build(definition)
        self._apply = jax.jit(self._updated)
        self.lr = definition.lr if definition.optimizer is None else math.nan
        try:
            self.start = jax.tree.map(strong, self._transformation.init(params))
            jax.eval_shape(self._updated, params, self.start, params)
        except Exception as error:
            raise UsageError(
                f"optimizer raised {type(error).__name__}: {error}; it is used as in updates, state = "
                f"optimizer.update(gradient, state, params), as in {EXAMPLE}"
            ) from error

    def apply(self, gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """The parameters and the state after the update; returns when they are computed."""
        return jax.block_until_ready(self._apply(gradient, state, params))

    def _updated(self, gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = self._transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), state


def build(definition: Definition) -> optax.GradientTransformation:
    """The recipe's transformation, behind ``optax.clip_by_global_norm`` where it clips.

    Raises
    ------
    UsageError
        ``optimizer`` is neither one nor a function that returns one, or there is a ``scheduler``.
    """
    if definition.scheduler is not None:
        raise UsageError(
            "scheduler is given, but a jax recipe has its schedule in the optimizer: leave it out, as in "
            "optimizer=optax.adam(optax.cosine_decay_schedule(1e-3, decay_steps=1000))"
        )
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
