"""The demo: LeNet on the 1,797 handwritten digits that come with scikit-learn."""

import functools

import torch
from torch import nn

from phalanx.definition.evaluation import Evaluation
from phalanx.recipe import Recipe

BATCH, EPOCHS, PEAK_LR = 32, 20, 5e-3


def lenet() -> nn.Module:
    """For images of 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(200, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Share of samples whose largest output is the target class."""
    return (output.argmax(-1) == target).float().mean()


def demo() -> tuple[Recipe, Evaluation]:
    """1,437 images to train on, 360 held out."""
    import sklearn.datasets

    x, y = map(torch.tensor, sklearn.datasets.load_digits(return_X_y=True))
    x = x.float().reshape(-1, 1, 8, 8) / 16
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = mixed[:360], mixed[360:]
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
    return recipe, Evaluation(accuracy, (x[test], y[test]))
