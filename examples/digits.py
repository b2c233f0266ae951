"""Train a network on real images with 8 replicas, watch its test accuracy, and save the picture."""

import sklearn.datasets
import torch
from torch import nn

import phalanx

data = sklearn.datasets.load_digits()
x = torch.tensor(data.data, dtype=torch.float32) / 16
y = torch.tensor(data.target)
x_train, y_train, x_test, y_test = x[:1437], y[:1437], x[1437:], y[1437:]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


recipe = phalanx.Recipe(make_model, (x_train, y_train), nn.functional.cross_entropy, replicas=8, epochs=10, lr=3e-3)
result = recipe.train(evaluation=phalanx.Evaluation(accuracy, (x_test, y_test)))

print(f"test accuracy {result.metric_history[-1].value:.3f} after {result.steps} steps in {result.seconds:.1f} s")
print("digest", result.digest)
result.plot().figure.savefig("digits.png")
