"""Demos in torch: LeNet on scikit-learn's digits and on d2l's images, and a small network on iris."""

import functools
from typing import Any

import numpy as np
import torch
from torch import nn

import phalanx
from phalanx.cli.demos import EPOCHS, Demo, accuracy, images

BATCH, LONG, PEAK_LR = 32, 20, 5e-3  # of digits


def lenet(padding: bool = False) -> nn.Module:
    """The LeNet of d2l's chapter, for images of 28 x 28, or with paddings for 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3, padding=1 if padding else 0), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5, padding=2 if padding else 0), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(200 if padding else 800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def network() -> nn.Module:
    """4 inputs, 32 hidden units, 3 classes."""
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))


def digits(_: str | None) -> Demo:
    """Images of 8 x 8: 1,437 to train on, 360 held out, 20 epochs."""
    import sklearn.datasets

    data: Any = sklearn.datasets.load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = mixed[:360], mixed[360:]
    steps = LONG * -(-len(train) // BATCH)
    recipe = phalanx.Recipe(
        functools.partial(lenet, padding=True),
        (x[train], y[train]),
        nn.functional.cross_entropy,
        replicas=8,
        batch_size=BATCH,
        epochs=LONG,
        optimizer=functools.partial(torch.optim.AdamW, lr=PEAK_LR),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, steps),
    )
    return Demo("LeNet on scikit-learn's digits", recipe, phalanx.Evaluation(accuracy, (x[test], y[test])))


def iris(_: str | None) -> Demo:
    """The ``dp_train`` vignette of ggmlR: one sample per replica and step, clipped gradients, Adam.

    120 flowers as a list of (x, y) samples, 30 held out, 2,000 steps of 4 replicas.
    """
    import sklearn.datasets

    data: Any = sklearn.datasets.load_iris()
    x = torch.tensor(data.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    flowers = list(zip(x, torch.tensor(data.target), strict=True))
    mixed = [flowers[i] for i in torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).tolist()]
    recipe = phalanx.Recipe(
        network, mixed[30:], nn.functional.cross_entropy, replicas=4, batch_size=None, steps=2000, max_norm=5.0
    )
    return Demo("a 4-32-3 network on iris, in torch", recipe, phalanx.Evaluation(accuracy, mixed[:30]))


def fashion_mnist(folder: str | None) -> Demo:
    """d2l's chapter "Training on Multiple GPUs": batches of 256 in 8 replicas, SGD with momentum, a cosine."""
    data = images(folder, np.int64)
    recipe = phalanx.Recipe(
        lenet,
        data.train,
        nn.functional.cross_entropy,
        replicas=8,
        batch_size=data.batch_size,
        epochs=EPOCHS,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, data.steps),
    )
    return Demo(f"LeNet on {data.title}, in torch", recipe, phalanx.Evaluation(accuracy, data.test))
