"""d2l's chapter on several devices, end to end: LeNet on Fashion-MNIST, in torch, jax or tinygrad.

Source: Dive into Deep Learning, "Training on Multiple GPUs". ``digits`` puts scikit-learn's digits in the place of what
would have to be downloaded.
"""

from __future__ import annotations

import functools
import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cli.demos import idx
from phalanx.cli.demos.bundled import Demo, accuracy, bundled
from phalanx.definition.evaluation import Evaluation
from phalanx.errors import UsageError
from phalanx.recipe import Recipe

SIDE = 28
REPLICAS = 8


@dataclass(frozen=True)
class Job:
    """Images (float32, samples x 1 x 28 x 28, from 0 to 1) with labels, to train on and to test with."""

    title: str
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    batch_size: int
    epochs: int
    lr: float

    @property
    def steps(self) -> int:
        """In all epochs."""
        return self.epochs * -(-len(self.train[0]) // self.batch_size)


def fashion_mnist(framework: str, folder: str, *, digits: bool) -> Demo:
    """The job: d2l's LeNet, batches of 256 in 8 replicas, SGD with momentum, 10 epochs.

    Parameters
    ----------
    framework : str
        "torch", "jax" or "tinygrad".
    folder : str
        Where the four IDX files are, or are to be put.
    digits : bool
        Train on scikit-learn's digits, enlarged to 28 x 28, instead.
    """
    recipes = {"torch": _torch, "jax": _jax, "tinygrad": _tinygrad}
    if framework not in recipes:
        raise UsageError(f"--framework is {framework!r}; use {', '.join(recipes)}")
    job = _digits() if digits else _fashion(pathlib.Path(folder))
    test = Evaluation(accuracy, recipe_data(framework, job.test))
    return Demo(f"LeNet on {job.title}, in {framework}", recipes[framework](job), test)


def recipe_data(framework: str, split: tuple[np.ndarray, np.ndarray]) -> tuple[Any, Any]:
    """Images and labels as the framework's recipe takes them."""
    x, y = split
    if framework != "torch":
        return x, y.astype(np.int32)
    import torch

    return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))


def _fashion(folder: pathlib.Path) -> Job:
    train, test = idx.load(folder)
    if train[0].shape[1:] != (SIDE, SIDE) or test[0].shape[1:] != (SIDE, SIDE):
        raise UsageError(f"{folder} has images of {train[0].shape[1:]}, but LeNet is for {(SIDE, SIDE)}")
    return Job("Fashion-MNIST", _scaled(*train), _scaled(*test), 256, 10, 0.1)


def _scaled(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (images[:, None] / np.float32(255)).astype(np.float32), labels


def _digits() -> Job:
    """Each of the 8 x 8 pixels becomes 3 x 3, with a margin of 2."""
    data = bundled("load_digits")
    images = np.kron(data.images, np.ones((1, 3, 3))).astype(np.float32)[:, None] / 16
    images = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))
    mixed = np.random.default_rng(0).permutation(len(images))
    test, train = mixed[:360], mixed[360:]
    split = (images[train], data.target[train]), (images[test], data.target[test])
    return Job("scikit-learn's digits", *split, 32, 10, 0.1)


def _torch(job: Job) -> Recipe:
    import torch
    from torch import nn

    def lenet() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),
            nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
            nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    return Recipe(
        lenet,
        recipe_data("torch", job.train),
        nn.functional.cross_entropy,
        replicas=REPLICAS,
        batch_size=job.batch_size,
        epochs=job.epochs,
        optimizer=functools.partial(torch.optim.SGD, lr=job.lr, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, job.steps),
    )


def _tinygrad(job: Job) -> Recipe:
    """With a schedule in the optimizer: tinygrad has none of its own."""
    try:
        from tinygrad import nn
        from tinygrad.nn.optim import LARS
        from tinygrad.tensor import Tensor
    except ImportError as error:
        raise UsageError(f"--framework tinygrad needs it ({error}); pip install 'phalanx[tinygrad]'") from error

    class Falling(LARS):
        """Its learning rate falls to a hundredth in all steps of the job."""

        def schedule_step(self) -> list[Tensor]:
            updated = super().schedule_step()
            return [*updated, self.lr.assign(self.lr * 0.01 ** (1 / job.steps))]

    def lenet() -> list[Any]:
        return [
            nn.Conv2d(1, 20, 3), Tensor.relu, Tensor.avg_pool2d,
            nn.Conv2d(20, 50, 5), Tensor.relu, Tensor.avg_pool2d, functools.partial(Tensor.flatten, start_dim=1),
            nn.Linear(800, 128), Tensor.relu, nn.Linear(128, 10),
        ]  # fmt: skip

    return Recipe(
        lenet,
        recipe_data("tinygrad", job.train),
        lambda output, target: output.sparse_categorical_crossentropy(target),
        lambda model, x: x.sequential(model),
        replicas=REPLICAS,
        batch_size=job.batch_size,
        epochs=job.epochs,
        optimizer=functools.partial(Falling, lr=job.lr / 2, weight_decay=0.0, classic=False, tcoef=0.0),  # plain SGD,
    )


def _jax(job: Job) -> Recipe:
    try:
        import jax
        import jax.numpy as jnp
        import optax
    except ImportError as error:
        raise UsageError(f"--framework jax needs jax and optax ({error}); pip install 'phalanx[jax]'") from error

    shapes = {"conv1": (20, 1, 3, 3), "conv2": (50, 20, 5, 5), "dense1": (800, 128), "dense2": (128, 10)}

    def lenet(key: Any) -> Any:
        params = {}
        for subkey, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True):
            outputs = shape[0] if name.startswith("conv") else shape[-1]
            weight = jax.random.normal(subkey, shape) * (outputs / np.prod(shape)) ** 0.5
            params[name] = {"weight": weight, "bias": jnp.zeros(outputs)}
        return params

    def forward(params: Any, x: Any) -> Any:
        for name in ("conv1", "conv2"):
            x = jax.lax.conv(x, params[name]["weight"], (1, 1), "VALID") + params[name]["bias"][:, None, None]
            window = (1, 1, 2, 2)
            x = jax.lax.reduce_window(jax.nn.relu(x), 0.0, jax.lax.add, window, window, "VALID") / 4
        x = x.reshape(len(x), -1)
        x = jax.nn.relu(x @ params["dense1"]["weight"] + params["dense1"]["bias"])
        return x @ params["dense2"]["weight"] + params["dense2"]["bias"]

    def loss(output: Any, target: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()

    return Recipe(
        lenet,
        recipe_data("jax", job.train),
        loss,
        forward,
        replicas=REPLICAS,
        batch_size=job.batch_size,
        epochs=job.epochs,
        optimizer=optax.sgd(optax.cosine_decay_schedule(job.lr, job.steps), momentum=0.9),
    )
