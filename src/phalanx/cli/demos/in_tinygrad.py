"""d2l's chapter "Training on Multiple GPUs" in tinygrad, with a schedule in the optimizer: tinygrad has none."""

import functools
from typing import Any

import numpy as np
from tinygrad import nn
from tinygrad.nn.optim import LARS
from tinygrad.tensor import Tensor

import phalanx
from phalanx.cli.demos import EPOCHS, Demo, accuracy, images


def lenet() -> list[Any]:
    """For images of 28 x 28."""
    return [
        nn.Conv2d(1, 20, 3), Tensor.relu, Tensor.avg_pool2d,
        nn.Conv2d(20, 50, 5), Tensor.relu, Tensor.avg_pool2d, functools.partial(Tensor.flatten, start_dim=1),
        nn.Linear(800, 128), Tensor.relu, nn.Linear(128, 10),
    ]  # fmt: skip


def fashion_mnist(folder: str | None) -> Demo:
    """The rate falls to a hundredth."""
    data = images(folder, np.int32)

    class Falling(LARS):
        """Its learning rate falls with each step."""

        def schedule_step(self) -> list[Tensor]:
            updated = super().schedule_step()
            return [*updated, self.lr.assign(self.lr * 0.01 ** (1 / data.steps))]

    recipe = phalanx.Recipe(
        lenet,
        data.train,
        lambda output, target: output.sparse_categorical_crossentropy(target),
        lambda model, x: x.sequential(model),
        replicas=8,
        batch_size=data.batch_size,
        epochs=EPOCHS,
        optimizer=functools.partial(Falling, lr=0.05, weight_decay=0.0, classic=False, tcoef=0.0),  # plain SGD
    )
    return Demo(f"LeNet on {data.title}, in tinygrad", recipe, phalanx.Evaluation(accuracy, data.test))
