"""From a batch to a loss and its gradient: ``forward_fn``, ``target_fn`` and ``loss_fn``, compiled once per shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from phalanx import checks, generators
from phalanx.contracts import Computed
from phalanx.definition import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.jax.keys import prng_key, words
from phalanx.frameworks.jax.outside import takes_key


class Forward:
    """Calls the recipe's functions inside two compiled ones.

    Parameters
    ----------
    definition : Definition
    """

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._keyed = takes_key(definition.forward_fn)
        self._value_and_grad = jax.jit(jax.value_and_grad(self._loss, has_aux=True))
        self._evaluated = jax.jit(self._output)

    def begun(self, params: Any, batch: Any, key: int) -> Callable[[], Computed]:
        """Begin to compute loss and gradient, where ``params`` are; what is returned waits for them."""
        return functools.partial(self._ended, *self._value_and_grad(params, batch, words(key) if self._keyed else None))

    def _ended(self, found: tuple[Any, Any], gradient: Any) -> Computed:
        loss, weight = found
        name = "forward_fn" if self._definition.loss_fn is None else "loss_fn"
        told = None if weight is None else checks.weight(name, weight)
        return Computed(float(loss), told, None if told == 0 else jax.tree.leaves(gradient), [])

    def output(self, params: Any, batch: Any) -> Any:
        """The output for ``batch`` in an evaluation: ``key`` is None."""
        try:
            return self._evaluated(params, batch, None)
        except Exception as error:
            if self._keyed:
                error.add_note("in an evaluation forward_fn's key is None: leave out there what draws random numbers")
            raise

    def target(self, batch: Any) -> Any:
        """The target for ``batch``."""
        target_fn = self._definition.target_fn
        if target_fn is not None:
            return target_fn(batch)
        return batch[1] if _is_pair(batch) else batch

    def _output(self, params: Any, batch: Any, data: Any) -> Any:
        """Runs when it is compiled: what is drawn from global generators then is the same, whoever compiles."""
        generators.seed(self._definition.seed, self._definition.generators)
        forward_fn: Any = self._definition.forward_fn
        x = batch[0] if _is_pair(batch) and self._definition.loss_fn is not None else batch
        if not self._keyed:
            return forward_fn(params, x)
        return forward_fn(params, x, key=None if data is None else prng_key(data))

    def _loss(self, params: Any, batch: Any, data: Any) -> tuple[Any, Any]:
        output = self._output(params, batch, data)
        loss_fn = self._definition.loss_fn
        value = output if loss_fn is None else loss_fn(output, self.target(batch))
        loss, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        _check_loss("forward_fn" if loss_fn is None else "loss_fn", loss)
        return loss, weight


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
