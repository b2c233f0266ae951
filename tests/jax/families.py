"""What exactness is tried on with jax: small models as trees of arrays, with fixed random data."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import phalanx
from tests.orders import triples

SAMPLES = 20


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model with data, loss and optimizer; names are those of Recipe."""

    make_model: Callable[..., Any]
    forward_fn: Callable[..., Any]
    data: Any
    loss_fn: Callable[..., Any] | None
    batch_size: int | None = 8
    steps: int = 4
    optimizer: Any = dataclasses.field(default_factory=lambda: optax.sgd(0.1, momentum=0.9))

    def recipe(self, replicas: int, **changes: Any) -> phalanx.Recipe:
        """Its recipe with so many replicas; ``changes`` replace or add arguments."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return phalanx.Recipe(**(given | {"replicas": replicas} | changes))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def whole(high, *shape, seed=1):
    return np.random.default_rng(seed).integers(high, size=shape)


def dense(key, inputs, outputs, dtype=jnp.float32):
    return {"w": jax.random.normal(key, (inputs, outputs), dtype) / inputs**0.5, "b": jnp.zeros(outputs, dtype)}


def apply(layer, x):
    return x @ layer["w"] + layer["b"]


def cross_entropy(output, target):
    return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()


def mlp(key):
    first, last = jax.random.split(key)
    return {"first": dense(first, 5, 16), "last": dense(last, 16, 3)}


def mlp_forward(params, x):
    return apply(params["last"], jax.nn.relu(apply(params["first"], x)))


def mlp_bfloat16(key):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), mlp(key))


def forward_bfloat16(params, x):
    return mlp_forward(params, x.astype(jnp.bfloat16)).astype(jnp.float32)


def mlp_from_numpy():
    """No key: numpy's generator, which is seeded before."""
    return (jnp.asarray(np.random.standard_normal((5, 3)), jnp.float32), [jnp.zeros(3), jnp.ones(())])


def forward_of_tuple(params, x):
    weight, (bias, scale) = params
    return (x @ weight + bias) * scale


def drawn(key, **shapes):
    """Arrays of these shapes out of one draw, which is compiled once."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    pieces = jnp.split(jax.random.normal(key, (sum(sizes),)) / 3, np.cumsum(sizes)[:-1])
    return {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def lenet(key):
    return drawn(key, conv1=(4, 1, 3, 3), conv2=(6, 4, 3, 3), w1=(54, 10), b1=(10,), w2=(10, 3), b2=(3,))


def lenet_forward(params, x):
    x = jax.nn.sigmoid(lax.conv(x, params["conv1"], (1, 1), "VALID"))
    x = lax.reduce_window(x, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") / 4
    x = jax.nn.sigmoid(lax.conv(x, params["conv2"], (1, 1), "VALID"))
    x = x.reshape(len(x), -1)
    return jax.nn.sigmoid(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def transformer(key):
    return drawn(key, embedding=(11, 8), qkv=(8, 24), mix=(8, 8), up=(8, 16), down=(16, 8), head=(8, 11))


def dropout(x, key, rate=0.1):
    """Nothing where there is no key, as in an evaluation."""
    return x if key is None else jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def transformer_forward(params, x, key=None):
    """One layer with two heads, causal attention and dropout, over six tokens."""
    x = params["embedding"][x]
    q, k, v = jnp.moveaxis((x @ params["qkv"]).reshape(*x.shape[:2], 3, 2, 4), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + dropout(mixed @ params["mix"], key)
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    return x @ params["head"]


def masked_loss(output, target):
    """A mean over the tokens that are not -1; 0/0 where there is none."""
    counted = target >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(output, jnp.where(counted, target, 0))
    return jnp.where(counted, losses, 0).sum() / counted.sum()


def token_count(output, target):
    return (target >= 0).sum()


def masked_targets():
    """Another number of targets in each sample, none in a quarter of them."""
    keep = np.arange(SAMPLES) % 4 * 2
    return np.where(np.arange(6) < keep[:, None], whole(11, SAMPLES, 6, seed=2), -1)


def tokens(key):
    first, last = jax.random.split(key)
    return {"embedding": jax.random.normal(first, (11, 8)), "head": dense(last, 8, 11)}


def tokens_forward(params, x):
    return apply(params["head"], jnp.tanh(params["embedding"][x]))


def dropping_forward(params, x, key):
    """The MLP behind dropout."""
    return mlp_forward(params, dropout(x, key))


def whole_loss(params, batch):
    """The loss of a batch, where there is no loss_fn."""
    x, y = batch
    return cross_entropy(mlp_forward(params, x), y)


FEATURES = (normal(SAMPLES, 5), whole(3, SAMPLES))
TOKENS = (whole(11, SAMPLES, 6), whole(11, SAMPLES, 6, seed=2))
MLP = {"make_model": mlp, "forward_fn": mlp_forward, "data": FEATURES, "loss_fn": cross_entropy}

FAMILIES = {
    "mlp": Family(**MLP),
    "no_key": Family(**MLP | {"make_model": mlp_from_numpy, "forward_fn": forward_of_tuple}),
    "lenet": Family(**MLP | {
        "make_model": lenet, "forward_fn": lenet_forward, "steps": 2,
        "data": (normal(16, 1, 12, 12), whole(3, 16)),
    }),
    "transformer": Family(
        make_model=transformer, forward_fn=transformer_forward, data=(TOKENS[0][:16], TOKENS[1][:16]),
        loss_fn=cross_entropy, steps=2,
    ),
    "dropout": Family(**MLP | {"forward_fn": dropping_forward}),
    "masked_tokens": Family(
        make_model=tokens, forward_fn=tokens_forward, data=(TOKENS[0], masked_targets()),
        loss_fn=phalanx.weighted(masked_loss, token_count),
    ),
    "bfloat16": Family(**MLP | {"make_model": mlp_bfloat16, "forward_fn": forward_bfloat16}),
    "whole_loss": Family(**MLP | {"forward_fn": whole_loss, "loss_fn": None}),
}  # fmt: skip


def terms(replicas):
    """As that of ``tests.families``: other bits where gradients are added in any other order."""
    rows = np.array(triples(replicas), np.float32)
    return phalanx.Recipe(
        lambda: {"w": jnp.zeros(rows.shape[1])}, (rows, np.zeros(replicas, np.float32)),
        lambda output, target: output.mean(), lambda params, x: (params["w"] * x).sum(1),
        replicas=replicas, batch_size=replicas, steps=2, optimizer=optax.sgd(1.0),
    )  # fmt: skip


OPTIMIZERS = {
    "default": lambda: None,
    "sgd": lambda: optax.sgd(0.1),
    "adam_schedule": lambda: optax.adam(optax.cosine_decay_schedule(0.1, 6)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01, weight_decay=0.1)),
    "multi_steps": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(0.1)),
    "lion": lambda: optax.lion(0.01),
    "adamw": lambda: optax.adamw(0.05, weight_decay=0.1),
    "lamb": lambda: optax.lamb(0.01),  # norms of each parameter
    "adafactor": lambda: optax.adafactor(0.01),
    "rates": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    "muon": lambda: optax.contrib.muon(0.01),
    "one_of_two": lambda: optax.partition(
        {"adam": optax.adam(0.01), "sgd": optax.sgd(0.1)}, {"first": "adam", "last": "sgd"}
    ),
    "unless_nan": lambda: optax.apply_if_finite(optax.adam(0.01), 3),  # couples all parameters
}
