"""Which parameters an optimizer's update couples: read off the traced function, so that no optimizer has to be known.

Where the update of each parameter depends on its own gradient alone, each may be updated by another worker. A step
count or a random key depends on no gradient, and is kept by all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters import partial_eval

Sources = frozenset[int]  # numbers of inputs

CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
NOTHING: Sources = frozenset()
ADDRESS = re.compile("0x[0-9a-f]+")  # of functions, in the text of a program


def users(update: Callable[..., Any], gradient: Sequence[Any], params: Sequence[Any], state: Sequence[Any]) -> Any:
    """For each leaf of an optimizer's state the parameter that it belongs to; -1 for what belongs to none.

    Parameters
    ----------
    update : callable
        ``update(gradient, params, state) -> params, state``, all of them lists of leaves.
    gradient, params, state : sequence of arrays or shapes

    Returns
    -------
    list of int or None
        None if some parameter's update looks at another parameter or its gradient.
    """
    count = len(params)
    traced = jax.make_jaxpr(update)(list(gradient), list(params), list(state))
    sources = flow(traced, [frozenset([number]) for number in range(len(traced.jaxpr.invars))])
    reach = [NOTHING] * len(state)  # the parameters that have a say in each leaf of the state
    while True:
        before = list(reach)
        reach = [_reached(found, count, before) for found in sources[count:]]
        if reach == before:
            break
    if any(_reached(sources[index], count, reach) - {index} for index in range(count)):
        return None
    if any(len(found) > 1 for found in reach):
        return None
    return [next(iter(found), -1) for found in reach]


def part(
    update: Callable[..., Any], params: Sequence[Any], state: Sequence[Any], outputs: Sequence[int]
) -> tuple[str, list[bool], list[bytes]]:
    """What of an update leads to some of its outputs: operations, the inputs that go in, and constants.

    It is equal for other shapes of the rest where nothing depends on those, not even a number in the program.
    """
    traced = jax.make_jaxpr(update)(list(params), list(params), list(state))
    chosen = set(outputs)
    needed = [number in chosen for number in range(len(traced.jaxpr.outvars))]
    slice_, used = partial_eval.dce_jaxpr(traced.jaxpr, needed)
    return ADDRESS.sub("", str(slice_)), used, [np.asarray(constant).tobytes() for constant in traced.consts]


def _reached(sources: Sources, count: int, reach: Sequence[Sources]) -> Sources:
    """The parameters behind these inputs."""
    found = {number % count for number in sources if number < 2 * count}
    return frozenset(found).union(*(reach[number - 2 * count] for number in sources if number >= 2 * count))


def flow(function: ClosedJaxpr | Jaxpr, inputs: Sequence[Sources]) -> list[Sources]:
    """What each output depends on, where the inputs depend on ``inputs``; never too little."""
    traced = function.jaxpr if isinstance(function, ClosedJaxpr) else function
    known = dict(zip(traced.invars, inputs, strict=True))

    def read(atom: Any) -> Sources:
        return NOTHING if isinstance(atom, Literal) else known.get(atom, NOTHING)

    for equation in traced.eqns:
        read_in = [read(atom) for atom in equation.invars]
        for variable, sources in zip(equation.outvars, _through(equation, read_in), strict=True):
            known[variable] = sources
    return [read(atom) for atom in traced.outvars]


def _through(equation: Any, inputs: list[Sources]) -> list[Sources]:
    """What each result of one operation depends on: all that goes in, unless it is a call or a choice to look into."""
    name, parameters = equation.primitive.name, equation.params
    if name == "cond":
        index, *rest = inputs
        ways = [flow(branch, rest) for branch in parameters["branches"]]
        return [index.union(*found) for found in zip(*ways, strict=True)]
    inner = parameters.get("jaxpr") or parameters.get("call_jaxpr") if name in CALLS else None
    if inner is not None:
        return flow(inner, inputs)
    return [NOTHING.union(*inputs)] * len(equation.outvars)
