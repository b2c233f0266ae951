"""From a batch to a loss and its gradient: ``forward_fn``, ``target_fn`` and ``loss_fn``, compiled once per shape.

Nobody can look into a compiled program. For ``diff`` its equations are computed one after another. XLA fuses compiled
ones and may round otherwise, so ``diff`` compares two programs, not one with its compiled form.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.extend.core import ClosedJaxpr, Literal

from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.arrays import Functions, check_leaf
from phalanx.frameworks.jax.state import plain, prng_key, words
from phalanx.seams.records import Computed, Watch
from phalanx.surroundings.presence import outside as no_step


class Forward(Functions):
    """Calls the recipe's functions inside two compiled ones.

    Attributes
    ----------
    stateful : bool
        Whether ``forward_fn`` takes a state, and returns the next one beside its output.
    """

    kind, called = jax.Array, "a scalar jax array"
    is_float = staticmethod(functools.partial(jnp.issubdtype, arg2=jnp.floating))

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        self._keyed = checks.takes(definition.forward_fn, "key")
        self.stateful = checks.takes(definition.forward_fn, "state")
        self._value_and_grad = jax.jit(jax.value_and_grad(self._loss, has_aux=True))
        self._evaluated = jax.jit(self._output)
        self._of_rows = jax.jit(jax.value_and_grad(self._loss_of_rows, allow_int=True))

    def begun(
        self, params: Any, batch: Any, key: int, part: int | None = None, *, state: Any = ()
    ) -> Callable[[], Computed]:
        """Begin to compute loss and gradient, where ``params`` are; the returned function waits.

        ``state``: what the model keeps beside its parameters. ``part``: a micro-batch's number, folded into the key.
        """
        data = self._data(key, part)
        return functools.partial(self._ended, state, *self._value_and_grad(params, batch, data, state))

    def _data(self, key: int, part: int | None) -> np.ndarray | None:
        data = words(key) if self._keyed else None
        if data is not None and part is not None:
            data = np.asarray(jax.random.key_data(jax.random.fold_in(prng_key(data), part)))
        return data

    def passed(
        self, params: Any, batch: Any, key: int, part: int | None, state: Any
    ) -> tuple[Any, Callable[[Any], tuple[Any]], Any]:
        """The output for ``batch`` in training, what goes back from it, and the state after it."""
        data = self._data(key, part)
        output, back, after = jax.vjp(lambda own: self._evaluated(own, batch, data, state), params, has_aux=True)
        return output, back, after

    def of_rows(self, output: Any, target: Any) -> tuple[Any, Any]:
        """A loss over the whole batch, and its gradient with respect to ``output``."""
        return self._of_rows(output, target)

    @no_step()
    def _loss_of_rows(self, output: Any, target: Any) -> Any:
        self.seed()
        return self.loss_of(output, target)[0]

    def _ended(self, state: Any, loss_and_aux: tuple[Any, Any], gradient: Any) -> Computed:
        loss, (returned, after) = loss_and_aux
        weight = self.weight(returned)
        return Computed(float(loss), weight, None if weight == 0 else jax.tree.leaves(gradient), left(state, after))

    def output(self, params: Any, batch: Any, state: Any = ()) -> Any:
        """The output for ``batch`` in an evaluation: ``key`` is None."""
        return self._evaluated(params, batch, None, state)[0]

    def tell(self, watch: Watch, params: Any, batch: Any, key: int, state: Any = ()) -> None:
        """Tell ``watch`` the output; if it asks for operations, also the equations of the output and the gradient."""
        data = words(key) if self._keyed else None
        if watch.operations:
            tell_equations(watch, self._output, (params, batch, data, state))
        watch.report("output", "", self._evaluated(params, batch, data, state)[0])
        if watch.operations and not self.definition.over_batch(0):
            tell_equations(watch, jax.value_and_grad(self._loss, has_aux=True), (params, batch, data, state))

    @no_step()
    def _output(self, params: Any, batch: Any, data: Any, state: Any) -> tuple[Any, Any]:
        """The output, and the state after it.

        Runs when it is compiled. It seeds first, so every process that compiles draws the same numbers.
        """
        self.seed()
        forward_fn: Any = self.definition.forward_fn
        x = self.input(batch)
        named = {"key": None if data is None else prng_key(data)} if self._keyed else {}
        if not self.stateful:
            return forward_fn(params, x, **named), ()
        second = list(inspect.signature(forward_fn).parameters)[1:2] == ["state"]
        returned = forward_fn(params, state, x, **named) if second else forward_fn(params, x, state=state, **named)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise UsageError(
                f"forward_fn takes a state and returned a {type(returned).__name__}; it must return (output, state)"
            )
        return returned

    @no_step()
    def _loss(self, params: Any, batch: Any, data: Any, state: Any) -> tuple[Any, tuple[Any, Any]]:
        output, after = self._output(params, batch, data, state)
        loss, weight = self.loss(output, batch)
        return loss, (weight, jax.lax.stop_gradient(after))


def left(state: Any, after: Any) -> list[np.ndarray]:
    """Copies of a state's leaves after a forward pass; where bytes are equal, the leaves before it.

    Raises
    ------
    UsageError
        The state has another form than before.
    """
    specs = [[(str(leaf.dtype), tuple(leaf.shape)) for leaf in jax.tree.leaves(tree)] for tree in (state, after)]
    if specs[0] != specs[1] or jax.tree.structure(state) != jax.tree.structure(after):
        raise UsageError(
            f"forward_fn returned a state of {specs[1]} in {jax.tree.structure(after)}, and was given {specs[0]} in "
            f"{jax.tree.structure(state)}; a state keeps its form, shapes and dtypes"
        )
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)
    return [begun if begun.tobytes() == (now := np.array(leaf)).tobytes() else now for begun, leaf in pairs]


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
    """Whether a leaf needs no closer look, as in nearly all batches."""
    plain = type(leaf) is np.ndarray and leaf.dtype in (np.float32, np.int32, np.int64)
    return plain and not _is_cut_off(leaf)


def _checked(leaf: Any, origin: str, path: Any, double: bool) -> Any:
    if isinstance(leaf, (jax.Array, bool, int, float)):
        return leaf
    array = np.asarray(leaf)
    name = origin + tree_util.keystr(path)
    check_leaf(name, leaf, array, double=double)
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


BACKWARD = "transpose("  # in the name stack of equations that a reverse pass made


def tell_equations(watch: Watch, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Trace ``function``, and compute its equations one by one; tell ``watch`` each, with its source lines."""
    traced = jax.make_jaxpr(function)(*arguments)
    for _ in _done(watch, traced, jax.tree.leaves(arguments)):
        pass


def _done(watch: Watch, traced: ClosedJaxpr, arguments: Sequence[Any]) -> Iterator[Any]:
    """What a traced function returns for these arguments."""
    known: dict[Any, Any] = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    known.update(zip(traced.jaxpr.invars, arguments, strict=True))

    def read(item: Any) -> Any:
        return item.val if isinstance(item, Literal) else known[item]

    for equation in traced.jaxpr.eqns:
        given = [read(item) for item in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if isinstance(inner, ClosedJaxpr) and len(inner.jaxpr.invars) == len(given) and _is_call(equation):
            outputs = list(_done(watch, inner, given))
        else:
            bound: Any = equation.primitive.get_bind_params(equation.params)
            functions, parameters = bound if isinstance(bound, tuple) else ((), bound)  # a pair in older jax
            output = equation.primitive.bind(*functions, *given, **parameters)
            outputs = list(output) if equation.primitive.multiple_results else [output]
            kind = "backward" if BACKWARD in str(equation.source_info.name_stack) else "operation"
            watch.report(kind, equation.primitive.name, (list(map(plain, outputs)), _frames(equation)))
        known.update(zip(equation.outvars, outputs, strict=True))
    yield from map(read, traced.jaxpr.outvars)


def _is_call(equation: Any) -> bool:
    """Whether it only calls a function once: loops and branches are told as a whole."""
    return equation.primitive.name in ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")


def _frames(equation: Any) -> list[tuple[str, int]]:
    """File and line of every frame that led to an equation, from the innermost one outwards."""
    traceback = equation.source_info.traceback
    return [] if traceback is None else [(frame.file_name, frame.line_num) for frame in traceback.frames]
