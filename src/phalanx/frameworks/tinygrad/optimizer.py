"""The optimizer of a run: made, checked, and applied to the mean gradient in one captured program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tinygrad.engine.jit import TinyJit
from tinygrad.helpers import Context
from tinygrad.nn.optim import Adam, Optimizer, OptimizerGroup
from tinygrad.nn.state import get_state_dict
from tinygrad.tensor import Tensor

from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.arithmetic import Gradient
from phalanx.frameworks.arrays import State
from phalanx.frameworks.tinygrad.model import each_once, owned, plain, write

EXAMPLE = "optimizer=functools.partial(tinygrad.nn.optim.AdamW, lr=1e-3)"


class Update:
    """The recipe's optimizer over the first device's parameters.

    Parameters
    ----------
    definition : Definition
    listed : sequence of Tensor
        What the optimizer is made from: that device's tensors, as ``get_parameters`` lists those of the model.
    params : sequence of Tensor
        The parameters among them, each once.

    Attributes
    ----------
    optimizer : Optimizer
    """

    def __init__(self, definition: Definition, listed: Sequence[Tensor], params: Sequence[Tensor]) -> None:
        self.optimizer = _made(definition, listed)
        _check(self.optimizer, params)
        self._params = params
        self._gradient = [owned(np.zeros(tensor.shape, plain(tensor).dtype), str(tensor.device)) for tensor in params]
        self.state = each_once(get_state_dict(self.optimizer), listed)
        for tensor in self.state.values():  # in memory that is there before the first step, and stays
            tensor.replace(owned(plain(tensor), str(tensor.device)))
        self._apply = TinyJit(self._traced)
        self._numbers = dict(_numbers(self.optimizer))
        self.look()

    def look(self) -> None:
        """Read the learning rate of the next step."""
        lr = getattr(self.optimizer, "lr", None)
        self.lr = float(plain(lr).reshape(-1)[0]) if isinstance(lr, Tensor) else math.nan

    def step(self, gradient: Gradient) -> None:
        """Update the parameters, and read them no sooner than somebody asks."""
        for tensor, entry in zip(self._gradient, gradient, strict=True):
            write(tensor, entry)
        with Context(TRAINING=1):
            self._apply()
        if self._numbers != (now := dict(_numbers(self.optimizer))):
            name = next(name for name in now if self._numbers.get(name) != now[name])
            raise UsageError(
                f"the optimizer changes its number {name!r} in a step, and a captured program would do so only once; "
                "keep it in a Tensor, and assign to that"
            )
        self.look()

    def _traced(self) -> None:
        for tensor, entry in zip(self._params, self._gradient, strict=True):
            tensor.grad = entry
        Tensor.realize(*self.optimizer.schedule_step())
        for tensor in self._params:
            tensor.grad = None


def state_of(model: Any, optimizer: Any) -> State:
    """The state of a loop written by hand: a model, and an optimizer, several, or none."""
    named = each_once(get_state_dict(model))
    whole = optimizer if not isinstance(optimizer, Sequence) or len(optimizer) != 1 else optimizer[0]
    state = {} if whole is None else each_once(get_state_dict(whole), named.values())
    return State(
        {name: plain(tensor) for name, tensor in named.items() if tensor.is_param},
        {name: plain(tensor) for name, tensor in named.items() if not tensor.is_param},
        {name: plain(tensor) for name, tensor in state.items()},
    )


def _made(definition: Definition, listed: Sequence[Tensor]) -> Optimizer:
    try:
        with Context(TRAINING=1):
            if definition.optimizer is None:
                return Adam(list(listed), lr=definition.lr)
            made = definition.optimizer(list(listed))
    except Exception as error:
        raise UsageError(
            f"optimizer raised {type(error).__name__}: {error}; it is called with get_parameters(model), as in "
            f"{EXAMPLE}"
        ) from error
    if not isinstance(made, Optimizer):
        raise UsageError(
            f"optimizer returned a {type(made).__name__}; for a model of tinygrad it must return one of "
            f"tinygrad.nn.optim, as in {EXAMPLE}"
        )
    return made


def _check(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Refuse one that updates other tensors than those it was given, or the same twice."""
    own = [id(tensor) for tensor in optimizer.params]
    if len(set(own)) < len(own) or set(own) - {id(tensor) for tensor in params}:
        raise UsageError(
            "optimizer returned one for other parameters than those that it was called with, or for some of them "
            f"twice; pass on what it is called with, as in {EXAMPLE}"
        )


def _numbers(optimizer: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The plain numbers among an optimizer's attributes."""
    for name, value in vars(optimizer).items():
        if isinstance(value, (bool, int, float)):
            yield prefix + name, value
    if isinstance(optimizer, OptimizerGroup):
        for number, inner in enumerate(optimizer.optimizers):
            yield from _numbers(inner, f"{prefix}optimizers.{number}.")
