"""The models of ``models.py`` as jax users write them: trees of arrays, channels last."""

import functools

import jax
import jax.numpy as jnp
import models
import optax
from jax import lax

OPTIMIZER = optax.adamw(1e-3)


def dense(key, inputs, outputs):
    return {"w": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "b": jnp.zeros(outputs)}


def layers(key, *widths):
    keys = jax.random.split(key, len(widths) - 1)
    return [dense(*layer) for layer in zip(keys, widths[:-1], widths[1:], strict=True)]


def mlp_forward(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def lenet(key):
    first, second, last = jax.random.split(key, 3)
    return {
        "conv1": jax.random.normal(first, (3, 3, 1, 20)) / 3,
        "conv2": jax.random.normal(second, (5, 5, 20, 50)) / 500**0.5,
        "dense": layers(last, 800, 128, 10),
    }


def lenet_forward(params, x):
    x = x.transpose(0, 2, 3, 1)
    for name in ("conv1", "conv2"):
        x = jax.nn.relu(
            lax.conv_general_dilated(x, params[name], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    return mlp_forward(params["dense"], x.reshape(len(x), -1))


def loss(output, target):
    return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()


FORWARD = {
    "tiny": (functools.partial(lambda key: layers(key, 4, 32, 3)), mlp_forward),
    "lenet": (lenet, lenet_forward),
    "mlp": (lambda key: layers(key, 784, 2048, 2048, 2048, 10), mlp_forward),
}


def case(name: str) -> models.Case:
    """One of ``FORWARD``, on the data of the torch case."""
    import dataclasses

    given = models.case(name)
    make_model, _ = FORWARD[name]
    return dataclasses.replace(given, make_model=make_model, x=given.x.numpy(), y=given.y.numpy(), loss_fn=loss)
