"""Tells somebody what the equations of a function compute, one after another, outside of the compiled program.

Compiled, XLA fuses them and may round otherwise: this compares two programs, not one with its compiled form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from phalanx.frameworks.jax.tree import plain
from phalanx.seams import Watch

BACKWARD = "transpose("  # what jax calls the place of equations that a reverse pass made


def tell_equations(watch: Watch, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Trace ``function``, and do its equations one by one; ``watch`` is told of each, with where it was written."""
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
            found = list(_done(watch, inner, given))
        else:
            bound: Any = equation.primitive.get_bind_params(equation.params)
            functions, parameters = bound if isinstance(bound, tuple) else ((), bound)  # as older jax has it, and newer
            told = equation.primitive.bind(*functions, *given, **parameters)
            found = list(told) if equation.primitive.multiple_results else [told]
            kind = "backward" if BACKWARD in str(equation.source_info.name_stack) else "operation"
            watch.told(kind, equation.primitive.name, (list(map(plain, found)), _frames(equation)))
        known.update(zip(equation.outvars, found, strict=True))
    yield from map(read, traced.jaxpr.outvars)


def _is_call(equation: Any) -> bool:
    """Whether it only calls a function once: loops and branches are told as a whole."""
    return equation.primitive.name in ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")


def _frames(equation: Any) -> list[tuple[str, int]]:
    """File and line of every frame that led to an equation, from the innermost one outwards."""
    traceback = equation.source_info.traceback
    return [] if traceback is None else [(frame.file_name, frame.line_num) for frame in traceback.frames]
