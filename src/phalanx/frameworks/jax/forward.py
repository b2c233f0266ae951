"""From a batch to a loss and its gradient: ``forward_fn``, ``target_fn`` and ``loss_fn``, compiled once per shape."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from phalanx.definition import checks, generators
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.jax.tree import prng_key, words
from phalanx.frameworks.jax.watching import tell_equations
from phalanx.seams import Computed, Watch
from phalanx.surroundings.presence import outside as no_step


class Forward:
    """Calls the recipe's functions inside two compiled ones.

    Parameters
    ----------
    definition : Definition

    Attributes
    ----------
    stateful : bool
        Whether ``forward_fn`` takes a state, and returns the next one beside its output.
    """

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._keyed = checks.takes(definition.forward_fn, "key")
        self.stateful = checks.takes(definition.forward_fn, "state")
        self._value_and_grad = jax.jit(jax.value_and_grad(self._loss, has_aux=True))
        self._evaluated = jax.jit(self._output)

    def begun(
        self, params: Any, batch: Any, key: int, part: int | None = None, *, state: Any = ()
    ) -> Callable[[], Computed]:
        """Begin to compute loss and gradient, where ``params`` are; what is returned waits for them.

        ``state``: what the model keeps beside. ``part``: of which micro-batch; each has a key of its own, folded in.
        """
        data = words(key) if self._keyed else None
        if data is not None and part is not None:
            data = np.asarray(jax.random.key_data(jax.random.fold_in(prng_key(data), part)))
        return functools.partial(self._ended, state, *self._value_and_grad(params, batch, data, state))

    def _ended(self, state: Any, found: tuple[Any, Any], gradient: Any) -> Computed:
        loss, (weight, after) = found
        name = "forward_fn" if self._definition.loss_fn is None else "loss_fn"
        told = None if weight is None else checks.weight(name, weight)
        return Computed(float(loss), told, None if told == 0 else jax.tree.leaves(gradient), left(state, after))

    def output(self, params: Any, batch: Any, state: Any = ()) -> Any:
        """The output for ``batch`` in an evaluation: ``key`` is None."""
        try:
            return self._evaluated(params, batch, None, state)[0]
        except Exception as error:
            if self._keyed:
                error.add_note("in an evaluation forward_fn's key is None: leave out there what draws random numbers")
            raise

    def tell(self, watch: Watch, params: Any, batch: Any, key: int, state: Any = ()) -> None:
        """Tell ``watch`` the output, and where it asks for them the equations of it, and of all up to the gradient."""
        data = words(key) if self._keyed else None
        if watch.operations:
            tell_equations(watch, self._output, (params, batch, data, state))
        watch.told("output", "", self._evaluated(params, batch, data, state)[0])
        if watch.operations:
            tell_equations(watch, jax.value_and_grad(self._loss, has_aux=True), (params, batch, data, state))

    def target(self, batch: Any) -> Any:
        """The target for ``batch``."""
        target_fn = self._definition.target_fn
        if target_fn is not None:
            return target_fn(batch)
        return batch[1] if _is_pair(batch) else batch

    @no_step()
    def _output(self, params: Any, batch: Any, data: Any, state: Any) -> tuple[Any, Any]:
        """The output, and the state after it.

        Runs when it is compiled: what is drawn from global generators then is the same, whoever compiles.
        """
        generators.seed(self._definition.seed, self._definition.generators)
        forward_fn: Any = self._definition.forward_fn
        x = batch[0] if _is_pair(batch) and self._definition.loss_fn is not None else batch
        named = {"key": None if data is None else prng_key(data)} if self._keyed else {}
        if not self.stateful:
            return forward_fn(params, x, **named), ()
        second = list(inspect.signature(forward_fn).parameters)[1:2] == ["state"]
        told = forward_fn(params, state, x, **named) if second else forward_fn(params, x, state=state, **named)
        if not isinstance(told, tuple) or len(told) != 2:
            raise UsageError(
                f"forward_fn takes a state and returned a {type(told).__name__}; it must return (output, state)"
            )
        return told

    @no_step()
    def _loss(self, params: Any, batch: Any, data: Any, state: Any) -> tuple[Any, tuple[Any, Any]]:
        output, after = self._output(params, batch, data, state)
        loss_fn = self._definition.loss_fn
        value = output if loss_fn is None else loss_fn(output, self.target(batch))
        loss, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        _check_loss("forward_fn" if loss_fn is None else "loss_fn", loss)
        return loss, (weight, jax.lax.stop_gradient(after))


def left(state: Any, after: Any) -> list[np.ndarray]:
    """The leaves of a state after a forward pass, copied; those of before where bytes are equal.

    Raises
    ------
    UsageError
        The state has another form than before.
    """
    told = [[(str(leaf.dtype), tuple(leaf.shape)) for leaf in jax.tree.leaves(tree)] for tree in (state, after)]
    if told[0] != told[1] or jax.tree.structure(state) != jax.tree.structure(after):
        raise UsageError(
            f"forward_fn returned a state of {told[1]} in {jax.tree.structure(after)}, and was given {told[0]} in "
            f"{jax.tree.structure(state)}; a state keeps its form, shapes and dtypes"
        )
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)
    return [begun if begun.tobytes() == (now := np.array(leaf)).tobytes() else now for begun, leaf in pairs]


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _check_loss(name: str, loss: Any) -> None:
    if not isinstance(loss, jax.Array):
        _refuse_loss(name, f"a {type(loss).__name__}", "a scalar jax array: the mean loss over the share")
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        shape = f"an array of shape {loss.shape} and {loss.dtype}"
        _refuse_loss(name, shape, "a real scalar: average it, as in loss.mean()")


def _refuse_loss(name: str, got: str, wanted: str) -> NoReturn:
    raise UsageError(f"{name} returned {got}; it must return {wanted}, or (that, weight)")


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
