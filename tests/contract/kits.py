"""The same tests for every framework: each brings models, optimizers and loops by hand as a kit."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch

from tests import by_hand, families
from tests.jax import by_hand as jax_by_hand
from tests.jax import families as jax_families

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Kit:
    """What the tests need of a framework.

    Attributes
    ----------
    families : dict of str to Family
        Models with data, loss and optimizer; "mlp" and "dropout" among them, and "plain", whose factory takes no key.
    optimizers : dict of str to optimizer
    adaptive : optimizer
        One with a state.
    answer : callable
        ``answer(recipe)``: digest and losses by a loop written by hand.
    metric : callable
        ``metric(output, target)``: a mean and its weight.
    spread : callable
        ``spread(count)``: options with which so many compute at a time: worker processes, or devices.
    defaults : callable
        ``defaults(replicas)``: what a recipe is given that does not say otherwise.
    """

    name: str
    families: dict[str, Any]
    optimizers: dict[str, Any]
    adaptive: Any
    answer: Callable[..., Any]
    metric: Callable[[Any, Any], Any]
    spread: Callable[[int], dict[str, Any]] = lambda count: {"engine": "processes", "workers": count}
    defaults: Callable[[int], dict[str, Any]] = lambda replicas: {}

    def recipe(self, replicas, family="mlp", **changes):
        return self.families[family].recipe(replicas, **(self.defaults(replicas) | changes))

    def engine_of(self, count):
        """Options with which so many compute; one is this process."""
        return {"engine": "inline"} if count == 1 else self.spread(count)


def torch_metric(output, target):
    return output.double().mean(), abs(float(target.flatten()[0])) + 1


def jax_metric(output, target):
    return np.asarray(output, np.float64).mean(), abs(float(target.flatten()[0])) + 1


TORCH = Kit(
    "torch",
    {
        **{name: families.FAMILIES[name] for name in ("mlp", "lenet", "transformer", "conv_norm", "masked_tokens")},
        "dropout": families.FAMILIES["transformer"],
        "plain": families.FAMILIES["conv_norm"],
    },
    {name: families.OPTIMIZERS[name] for name in ("sgd_nesterov", "adamw", "adafactor")},
    functools.partial(torch.optim.AdamW, lr=0.05),
    by_hand.answer,
    torch_metric,
)
JAX = Kit(
    "jax",
    {**jax_families.FAMILIES, "plain": dataclasses.replace(jax_families.FAMILIES["no_key"], steps=4)},
    {name: jax_families.OPTIMIZERS[name]() for name in ("noise", "adam_schedule", "rates", "unless_nan")},
    jax_families.OPTIMIZERS["adamw"](),
    jax_by_hand.answer,
    jax_metric,
)


def tinygrad_metric(output, target):
    return output.numpy().astype(np.float64).mean(), abs(float(target.numpy().flatten()[0])) + 1


def cpus(count):
    return {"devices": ["CPU", *(f"CPU:{number}" for number in range(1, count))]}


def one_shape(replicas):
    """Shares of one size, as each shape is compiled."""
    return {"batch_size": 2 * replicas, "drop_last": True}


def kit_of(name):
    """The kit of a framework, which is imported no sooner."""
    if name != "tinygrad":
        return {"torch": TORCH, "jax": JAX}[name]
    from tests.tinygrad import by_hand as tinygrad_by_hand
    from tests.tinygrad import families as tinygrad_families

    return Kit(
        "tinygrad",
        tinygrad_families.FAMILIES,
        tinygrad_families.OPTIMIZERS,
        tinygrad_families.OPTIMIZERS["adamw"],
        tinygrad_by_hand.answer,
        tinygrad_metric,
        cpus,
        one_shape,
    )
