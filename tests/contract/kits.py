"""The same tests for torch and for jax: each framework brings models, optimizers and loops by hand as a kit."""

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
    """

    name: str
    families: dict[str, Any]
    optimizers: dict[str, Any]
    adaptive: Any
    answer: Callable[..., Any]
    metric: Callable[[Any, Any], Any]

    def recipe(self, replicas, family="mlp", **changes):
        return self.families[family].recipe(replicas, **changes)


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
KITS = {"torch": TORCH, "jax": JAX}
