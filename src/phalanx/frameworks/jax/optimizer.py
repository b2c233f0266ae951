"""The optimizer of a run: made, checked, and applied to the mean gradient in one compiled function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.arithmetic import Gradient
from phalanx.frameworks.jax import coupling
from phalanx.frameworks.jax.snapshot import State
from phalanx.frameworks.jax.tree import is_key, plain, strong

Leaves = list[Any]

SMALL = 2  # the length of each dimension of what others own: a program for arrays of one element may be another
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
    """

    def __init__(self, definition: Definition) -> None:
        self._transformation = build(definition)
        self._apply = jax.jit(self._updated)
        self._part: Callable[[Gradient], None] | None = None
        self.lr = definition.lr if definition.optimizer is None else math.nan

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
        self._params, self._state = _specs(params), _specs(start)
        self._of_params, self._of_state = jax.tree.structure(params), jax.tree.structure(start)
        self.steady = _specs(after) == self._state
        return start

    def step(self, state: State, gradient: Gradient) -> None:
        """Take the state to the next; returns when it is computed."""
        if self._part is not None:
            self._part(gradient)
            return
        tree = jax.tree.unflatten(self._of_params, gradient)
        state.params, state.optimizer = jax.block_until_ready(self._apply(tree, state.optimizer, state.params))

    def users(self) -> list[int] | None:
        """The parameter that each leaf of the state belongs to (-1: none); None if all must be updated at once."""
        users = coupling.users(self._of_leaves, self._params, self._params, self._state)
        if users is None or any(user >= 0 and is_key(leaf) for user, leaf in zip(users, self._state, strict=True)):
            return None
        return users

    def fits(self, owned: Sequence[int], held: Sequence[int]) -> bool:
        """Whether these parameters and leaves of the state are updated alike where all other parameters are small."""
        outputs = [*owned, *(len(self._params) + index for index in held)]
        try:
            params, state = jax.tree.leaves(self._small(owned)), jax.tree.leaves(self._small_state(owned))
            small = coupling.part(self._of_leaves, params, state, outputs)
        except Exception:  # the optimizer wants certain shapes
            return False
        return small == coupling.part(self._of_leaves, self._params, self._state, outputs)

    def owned(
        self, owned: Sequence[int], held: Sequence[int], device: Any
    ) -> Callable[..., tuple[list[Any], list[Any]]]:
        """The update of these parameters and leaves of the state alone, as the whole program computes it.

        What is returned takes their gradients, the parameters and the leaves, all on ``device``, and gives the next.
        """
        small, small_state = jax.device_put((self._blank(owned), self._blank_state(owned, held)), device)

        def step(gradient: Sequence[Any], params: Sequence[Any], state: Sequence[Any]) -> tuple[Leaves, Leaves]:
            trees = [jax.tree.unflatten(self._of_params, _with(small, owned, own)) for own in (gradient, params)]
            fixed_state = jax.tree.unflatten(self._of_state, _with(small_state, held, state))
            after = [jax.tree.leaves(tree) for tree in self._apply(trees[0], fixed_state, trees[1])]
            return [after[0][index] for index in owned], [after[1][index] for index in held]

        return step

    def restrict(self, owned: Sequence[int], held: Sequence[int], params: Any, state: Any, homes: Any) -> None:
        """From here on update these parameters and leaves of the state only, in arrays that lie in ``homes``."""
        if not owned:
            self._part = _nothing
            return
        small, small_state = self._blank(owned), self._blank_state(owned, held)
        fixed = jax.tree.unflatten(self._of_params, _with(small, owned, params))
        fixed_state = jax.tree.unflatten(self._of_state, _with(small_state, held, state))
        spread = functools.partial(_with, small, owned)
        part = Part(self._apply, spread, self._of_params, fixed, fixed_state, list(owned), list(held), homes)
        self._part = part.step

    def _blank(self, owned: Sequence[int]) -> list[Any]:
        return [jnp.zeros(spec.shape, spec.dtype) for spec in jax.tree.leaves(self._small(owned))]

    def _blank_state(self, owned: Sequence[int], held: Sequence[int]) -> list[Any]:
        return [
            None if index in held else jnp.zeros(spec.shape, spec.dtype)
            for index, spec in enumerate(jax.tree.leaves(self._small_state(owned)))
        ]

    def _small(self, owned: Sequence[int]) -> Any:
        """The parameters' shapes, those of others cut down: the program stays the same, and so do its bits."""
        cut = [
            spec if index in owned else jax.ShapeDtypeStruct([min(size, SMALL) for size in spec.shape], spec.dtype)
            for index, spec in enumerate(self._params)
        ]
        return jax.tree.unflatten(self._of_params, cut)

    def _small_state(self, owned: Sequence[int]) -> Any:
        state = jax.eval_shape(
            lambda params: jax.tree.map(strong, self._transformation.init(params)), self._small(owned)
        )
        if jax.tree.structure(state) != self._of_state:
            raise UsageError("the state of the optimizer is another for other shapes")
        return state

    def _of_leaves(self, gradient: Any, params: Any, state: Any) -> tuple[list[Any], list[Any]]:
        """The update from leaves to leaves."""
        trees = [(self._of_params, gradient), (self._of_state, state), (self._of_params, params)]
        after = self._updated(*(jax.tree.unflatten(structure, leaves) for structure, leaves in trees))
        return jax.tree.leaves(after[0]), jax.tree.leaves(after[1])

    def _updated(self, gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = self._transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), jax.tree.map(strong, state)


@dataclass(frozen=True)
class Part:
    """The update of what one worker owns, in arrays over memory that is written when all is computed.

    It is the whole program with small arrays for all that others own. Compiled from what remains without them it has
    other bits: whether a product is rounded before it is added to something depends on who else uses it (XLA fuses).
    """

    apply: Callable[..., Any]
    spread: Callable[[Sequence[Any]], list[Any]]
    structure: Any
    params: Any
    state: Any
    owned: list[int]
    held: list[int]
    homes: list[np.ndarray]

    def step(self, gradient: Gradient) -> None:
        """Take it to the next step."""
        tree = jax.tree.unflatten(self.structure, self.spread([gradient[index] for index in self.owned]))
        params, state = map(jax.tree.leaves, self.apply(tree, self.state, self.params))
        found = [*(params[index] for index in self.owned), *(state[index] for index in self.held)]
        for home, leaf in zip(self.homes, found, strict=True):
            home[...] = plain(leaf)


def _nothing(gradient: Gradient) -> None:
    """All parameters are updated by others."""


def _with(leaves: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """``leaves`` with ``values`` in these places."""
    found = list(leaves)
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return found


def _specs(tree: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


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
