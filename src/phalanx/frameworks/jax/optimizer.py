"""The optimizer of a run: made, checked, and applied to the mean gradient in one compiled function.

Workers share an update where each parameter's depends on its own gradient alone. A step count or a random key depends
on no gradient, and is kept by all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.interpreters import partial_eval

from phalanx.definition.fields import Definition
from phalanx.errors import UsageError, safe_str
from phalanx.frameworks.arithmetic import Gradient
from phalanx.frameworks.jax.state import Trees, is_key, plain, strong
from phalanx.shared.layout import SHARED

Specs = list[jax.ShapeDtypeStruct]

SMALL = 2  # the length of each dimension of what others own; with arrays of one element the program may differ
NOTHING = jax.ShapeDtypeStruct((), jnp.float32)
ADDRESS = re.compile("0x[0-9a-f]+")  # of functions, in the text of a program
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
        self._part: Callable[[Gradient], object] | None = None  # of several workers: what this one does
        self.lr = definition.lr if definition.optimizer is None else math.nan

    def begin(self, params: Any) -> Any:
        """The optimizer's state before the first step."""
        try:
            start = self._begun(params)
            _, after = jax.eval_shape(self._updated, params, start, params)
        except Exception as error:
            raise UsageError(
                f"optimizer raised {type(error).__name__}: {safe_str(error)}; it is used as in updates, state = "
                f"optimizer.update(gradient, state, params), as in {EXAMPLE}"
            ) from error
        self._params, self._state = _specs(params), _specs(start)
        self._of_params, self._of_state = jax.tree.structure(params), jax.tree.structure(start)
        self.steady = _specs(after) == self._state
        return start

    def step(self, state: Trees, gradient: Gradient) -> None:
        """Take the state to the next; returns when it is computed."""
        if self._part is not None:
            self._part(gradient)
            return
        tree = jax.tree.unflatten(self._of_params, gradient)
        state.params, state.optimizer = jax.block_until_ready(self._apply(tree, state.optimizer, state.params))

    def users(self, owners: Sequence[int]) -> list[int] | None:
        """The parameter that each leaf of the optimizer's state belongs to; SHARED: each owner keeps a copy of its own.

        None if the first owner must update all: an update depends on what another owns, or is another program beside
        small arrays (see ``restrict``). The traced update shows this, so no optimizer has to be known.
        """
        program, leaves = TracedUpdate(self._of_leaves, self._params, self._state), range(len(self._state))
        parts = [[index for index, owner in enumerate(owners) if owner == each] for each in sorted(set(owners))]
        needed = [its for owned in parts if (its := program.needed(owned, [])) is not None]
        if len(needed) < len(parts):
            return None
        keepers = [[owned[0] for owned, its in zip(parts, needed, strict=True) if leaf in its] for leaf in leaves]
        users = [SHARED if len(indices) != 1 else indices[0] for indices in keepers]
        everywhere = [leaf for leaf in leaves if users[leaf] == SHARED]
        keys = [leaf for leaf in leaves if is_key(self._state[leaf])]  # they cannot be made small
        if program.needed([], everywhere) != everywhere or not set(keys) <= set(everywhere):
            return None
        held = [[leaf for leaf in leaves if users[leaf] in (SHARED, owned[0])] for owned in parts]
        return users if all(self._fits(program, *part) for part in zip(parts, held, strict=True)) else None

    def restrict(self, owned: Sequence[int], held: Sequence[int], params: Any, state: Any, homes: Any) -> None:
        """From here on update only these parameters and leaves of the state, in arrays that lie in ``homes``.

        The whole program runs, with small arrays for all that others own. A program without those would have other
        bits: XLA fuses, so whether a product is rounded before it is added depends on its other users.
        """
        self._part = self._updating(owned, held, params, state, homes) if owned else bool

    def _updating(
        self, owned: Sequence[int], held: Sequence[int], params: Any, state: Any, homes: Any
    ) -> Callable[[Gradient], None]:
        small = [[jnp.zeros(spec.shape, spec.dtype) for spec in specs] for specs in self._small(owned, held)]
        fixed = jax.tree.unflatten(self._of_params, _with(small[0], owned, params))
        fixed_state = jax.tree.unflatten(self._of_state, _with(small[1], held, state))

        def update(gradient: Gradient) -> None:
            tree = jax.tree.unflatten(self._of_params, _with(small[0], owned, [gradient[index] for index in owned]))
            after, after_state = map(jax.tree.leaves, self._apply(tree, fixed_state, fixed))
            computed = [*(after[index] for index in owned), *(after_state[index] for index in held)]
            for home, leaf in zip(homes, computed, strict=True):
                home[...] = plain(leaf)

        return update

    def _fits(self, program: TracedUpdate, owned: Sequence[int], held: Sequence[int]) -> bool:
        """Whether these parameters and leaves of the state are updated alike where all other parameters are small."""
        try:
            small = TracedUpdate(self._of_leaves, *self._small(owned))
        except Exception:  # the optimizer wants certain shapes
            return False
        return small.part(owned, held) == program.part(owned, held)

    def _small(self, owned: Sequence[int], held: Sequence[int] = ()) -> tuple[Specs, Specs]:
        """Specs of parameters and state where those of others are small; the program and its bits stay the same.

        A leaf in ``held`` is a stand-in, which the owner's own leaf replaces.
        """
        params = [
            spec if index in owned else jax.ShapeDtypeStruct([min(size, SMALL) for size in spec.shape], spec.dtype)
            for index, spec in enumerate(self._params)
        ]
        state = jax.eval_shape(self._begun, jax.tree.unflatten(self._of_params, params))
        if jax.tree.structure(state) != self._of_state:
            raise UsageError("the state of the optimizer is another for other shapes")
        return params, [NOTHING if index in held else spec for index, spec in enumerate(jax.tree.leaves(state))]

    def _begun(self, params: Any) -> Any:
        return jax.tree.map(strong, self._transformation.init(params))

    def _of_leaves(self, gradient: Any, params: Any, state: Any) -> tuple[list[Any], list[Any]]:
        """The update from leaves to leaves."""
        trees = [(self._of_params, gradient), (self._of_state, state), (self._of_params, params)]
        after = self._updated(*(jax.tree.unflatten(structure, leaves) for structure, leaves in trees))
        return jax.tree.leaves(after[0]), jax.tree.leaves(after[1])

    def _updated(self, gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = self._transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), jax.tree.map(strong, state)


class TracedUpdate:
    """An update as jax traces it, from leaves to leaves. It says what some of its outputs depend on.

    Parameters
    ----------
    update : callable
        ``update(gradient, params, state) -> params, state``, all of them lists of leaves.
    params, state : sequence of shapes
    """

    def __init__(self, update: Callable[..., Any], params: Specs, state: Specs) -> None:
        self._traced = jax.make_jaxpr(update)(params, params, state)
        self._count = len(params)

    def needed(self, owned: Sequence[int], held: list[int]) -> list[int] | None:
        """The leaves of the state that updates of these parameters and leaves need, directly or through others.

        None if they need other parameters, or gradients of others.
        """
        while True:
            _, used = self._reduced(owned, held)
            more = sorted({*held, *(leaf for leaf, is_used in enumerate(used[2 * self._count :]) if is_used)})
            if more == held:
                others = [number for number in range(2 * self._count) if number % self._count not in owned]
                return None if any(used[number] for number in others) else held
            held = more

    def part(self, owned: Sequence[int], held: Sequence[int]) -> tuple[str, list[bool], list[bytes]]:
        """What leads to these parameters and leaves: operations, the inputs that go in, and constants.

        It is equal for other shapes of the rest if nothing depends on those, not even a number in the program.
        """
        operations, used = self._reduced(owned, held)
        constants = [np.asarray(constant).tobytes() for constant in self._traced.consts]
        return ADDRESS.sub("", str(operations)), used, constants

    def _reduced(self, owned: Sequence[int], held: Sequence[int]) -> tuple[Any, list[bool]]:
        results = {*owned, *(self._count + leaf for leaf in held)}
        wanted = [number in results for number in range(len(self._traced.jaxpr.outvars))]
        return partial_eval.dce_jaxpr(self._traced.jaxpr, wanted)


def _with(leaves: Sequence[Any], positions: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """``leaves`` with ``values`` at these positions."""
    replaced = list(leaves)
    for position, value in zip(positions, values, strict=True):
        replaced[position] = value
    return replaced


def _specs(tree: Any) -> Specs:
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def build(definition: Definition) -> optax.GradientTransformation:
    """The recipe's transformation, behind ``optax.clip_by_global_norm`` where it clips.

    Raises
    ------
    UsageError
        ``optimizer`` is neither one nor a function that returns one.
    """
    transformation = definition.optimizer
    if transformation is None:
        transformation = optax.adam(definition.lr)
    elif not isinstance(transformation, optax.GradientTransformation):
        try:
            transformation = transformation()
        except Exception as error:
            raise UsageError(
                f"optimizer raised {type(error).__name__}: {safe_str(error)}; for parameters in jax arrays it is an "
                f"optax.GradientTransformation, or a function without arguments that returns one, as in {EXAMPLE}"
            ) from error
    if not isinstance(transformation, optax.GradientTransformation):
        raise UsageError(
            f"optimizer returned a {type(transformation).__name__}; for parameters in jax arrays it must return an "
            f"optax.GradientTransformation, as in {EXAMPLE}; optax.MultiSteps(...).gradient_transformation() is one"
        )
    if math.isfinite(definition.max_norm):
        return optax.chain(optax.clip_by_global_norm(definition.max_norm), transformation)
    return transformation
