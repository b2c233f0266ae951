"""For the command line: ``phalanx train examples/recipe_file.py --plot loss.png``."""

import sklearn.datasets
import torch
from torch import nn

import phalanx

data = sklearn.datasets.load_digits()
x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


recipe = phalanx.Recipe(
    lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    (x[:1437], y[:1437]),
    nn.functional.cross_entropy,
    epochs=5,
    lr=3e-3,
)
evaluation = phalanx.Evaluation(accuracy, (x[1437:], y[1437:]))
