"""d2l's LeNet on scikit-learn's digits: 1,797 images of 8 x 8, 8 replicas."""

from __future__ import annotations

import functools

import torch
from torch import nn

from phalanx.cli.demos.parts import Demo, accuracy, bundled
from phalanx.definition.evaluation import Evaluation
from phalanx.recipe import Recipe

TEST_SAMPLES = 360
EPOCHS = 20
BATCH = 32
PEAK_LR = 5e-3


def lenet() -> nn.Module:
    """The LeNet of d2l's multi-GPU chapter, with paddings for 8 x 8 images instead of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * 2 * 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def digits() -> Demo:
    """The job: 1,437 images to train on, 360 held out, 20 epochs."""
    data = bundled("load_digits")
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = mixed[:TEST_SAMPLES], mixed[TEST_SAMPLES:]
    steps = EPOCHS * -(-len(train) // BATCH)
    recipe = Recipe(
        lenet,
        (x[train], y[train]),
        nn.functional.cross_entropy,
        replicas=8,
        batch_size=BATCH,
        epochs=EPOCHS,
        optimizer=functools.partial(torch.optim.AdamW, lr=PEAK_LR),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, steps),
    )
    return Demo("LeNet on scikit-learn's digits", recipe, Evaluation(accuracy, (x[test], y[test])))
