"""d2l's chapter "Training on Multiple GPUs" in jax: LeNet, batches of 256 in 8 replicas, SGD with momentum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx
from phalanx.cli.demos import EPOCHS, Demo, accuracy, images

SHAPES = {"conv1": (20, 1, 3, 3), "conv2": (50, 20, 5, 5), "dense1": (800, 128), "dense2": (128, 10)}
WINDOW = (1, 1, 2, 2)


def lenet(key: Any) -> Any:
    """For images of 28 x 28."""
    params = {}
    for subkey, (name, shape) in zip(jax.random.split(key, len(SHAPES)), SHAPES.items(), strict=True):
        outputs = shape[0] if name.startswith("conv") else shape[-1]
        weight = jax.random.normal(subkey, shape) * (outputs / np.prod(shape)) ** 0.5
        params[name] = {"weight": weight, "bias": jnp.zeros(outputs)}
    return params


def forward(params: Any, x: Any) -> Any:
    """Two convolutions, each averaged over windows, and two dense layers."""
    for name in ("conv1", "conv2"):
        x = jax.lax.conv(x, params[name]["weight"], (1, 1), "VALID") + params[name]["bias"][:, None, None]
        x = jax.lax.reduce_window(jax.nn.relu(x), 0.0, jax.lax.add, WINDOW, WINDOW, "VALID") / 4
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ params["dense1"]["weight"] + params["dense1"]["bias"])
    return x @ params["dense2"]["weight"] + params["dense2"]["bias"]


def loss_fn(output: Any, target: Any) -> Any:
    """Cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()


def fashion_mnist(folder: str | None) -> Demo:
    """The rate falls with a cosine."""
    data = images(folder, np.int32)
    optimizer = optax.sgd(optax.cosine_decay_schedule(0.1, data.steps), momentum=0.9)
    recipe = phalanx.Recipe(
        lenet, data.train, loss_fn, forward, replicas=8, batch_size=data.batch_size, epochs=EPOCHS, optimizer=optimizer
    )
    return Demo(f"LeNet on {data.title}, in jax", recipe, phalanx.Evaluation(accuracy, data.test))
