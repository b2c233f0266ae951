"""What exactness is tried on with tinygrad: models as its users write them, small, as each shape is compiled."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad import Tensor, nn

import phalanx
from tests.orders import triples

SAMPLES = 20
SGD = functools.partial(nn.optim.SGD, lr=0.1, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model with data, loss and optimizer; names are those of Recipe."""

    make_model: Callable[..., Any]
    data: Any
    loss_fn: Callable[..., Any] | None
    forward_fn: Callable[..., Any] | None = None
    batch_size: int | None = 8
    steps: int = 4
    optimizer: Any = SGD

    def recipe(self, replicas: int, **changes: Any) -> phalanx.Recipe:
        """Its recipe with so many replicas; ``changes`` replace or add arguments."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return phalanx.Recipe(**(given | {"replicas": replicas} | changes))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def whole(high, *shape, seed=1):
    return np.random.default_rng(seed).integers(high, size=shape)


def cross_entropy(output, target):
    return output.sparse_categorical_crossentropy(target)


class Mlp:
    """With tanh: tinygrad's relu makes a zero of NaN."""

    def __init__(self):
        self.first, self.last = nn.Linear(5, 16), nn.Linear(16, 3)

    def __call__(self, x):
        return self.last(self.first(x).tanh())


class Dropping(Mlp):
    """With dropout."""

    def __call__(self, x):
        return self.last(self.first(x).relu().dropout(0.5))


class Normed(Mlp):
    """With BatchNorm, whose buffers change, and a buffer that does not."""

    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.BatchNorm(16), Tensor([0.7]).is_param_(False)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)).relu()) * self.scale


class Tied:
    """One weight that is used twice, in a dictionary and a list."""

    def __init__(self):
        weight = Tensor.uniform(5, 5, low=-1, high=1)
        self.layers = {"once": weight, "twice": [weight, nn.Linear(5, 3)]}

    def __call__(self, x):
        return self.layers["twice"][1]((x @ self.layers["once"]).tanh() @ self.layers["twice"][0])


class Conv:
    """A convolution, with sigmoid and pooling."""

    def __init__(self):
        self.conv, self.last = nn.Conv2d(1, 3, 3), nn.Linear(12, 3)

    def __call__(self, x):
        return self.last(self.conv(x).sigmoid().avg_pool2d(2).flatten(1))


def masked_loss(output, target):
    """A mean over the targets that are not -1; 0/0 where there is none."""
    counted = (target >= 0).float()
    log = output.log_softmax(-1)
    picked = (log * (Tensor.arange(3).reshape(1, 3) == target.reshape(-1, 1)).float()).sum(-1)
    return -(picked * counted).sum() / counted.sum()


def count(output, target):
    return (target >= 0).sum()


def whole_loss(model, batch):
    """The loss of a batch, where there is no loss_fn."""
    x, y = batch
    return cross_entropy(model(x), y)


FEATURES = (normal(SAMPLES, 5), whole(3, SAMPLES))
MASKED = np.where(np.arange(SAMPLES) % 3 == 0, whole(3, SAMPLES), -1)
MLP = {"make_model": Mlp, "data": FEATURES, "loss_fn": cross_entropy}
FAMILIES = {
    "mlp": Family(**MLP),
    "plain": Family(**MLP),
    "dropout": Family(**MLP | {"make_model": Dropping}),
    "norm": Family(**MLP | {"make_model": Normed}),
    "tied": Family(**MLP | {"make_model": Tied}),
    "conv": Family(**MLP | {"make_model": Conv, "data": (normal(SAMPLES, 1, 6, 6), FEATURES[1]), "steps": 2}),
    "masked": Family(**MLP | {"data": (FEATURES[0], MASKED), "loss_fn": phalanx.weighted(masked_loss, count)}),
    "whole_loss": Family(**MLP | {"forward_fn": whole_loss, "loss_fn": None}),
}


class Terms:
    """Its gradient is the sum of its rows."""

    def __init__(self, columns):
        self.weight = Tensor.zeros(columns).contiguous()


def terms(replicas):
    """As that of ``tests.families``: other bits where gradients are added in any other order."""
    rows = np.array(triples(replicas), np.float32)
    return phalanx.Recipe(
        lambda: Terms(rows.shape[1]), (rows, np.zeros(replicas, np.float32)), None,
        lambda model, batch: (model.weight * batch[0]).sum(),
        replicas=replicas, batch_size=replicas, steps=2, optimizer=functools.partial(nn.optim.SGD, lr=1.0),
    )  # fmt: skip


OPTIMIZERS = {
    "sgd": functools.partial(nn.optim.SGD, lr=0.1),
    "adam": functools.partial(nn.optim.Adam, lr=0.01),
    "adamw": functools.partial(nn.optim.AdamW, lr=0.01),
    "lamb": functools.partial(nn.optim.LAMB, lr=0.01, weight_decay=0.1),
    "two": lambda listed: nn.optim.OptimizerGroup(
        nn.optim.SGD(listed[:2], lr=0.1), nn.optim.AdamW(listed[2:], lr=0.01)
    ),
}
