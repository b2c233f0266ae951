"""Searching for hyperparameters: several runs, of which bad ones are ended early.

With Optuna it is the same loop:
`lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)`, and in the callback `trial.report(value, step)` and
`trial.should_prune()`.
"""

import random

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import phalanx

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


class Prune:
    """Ends a run that is worse than the best one was at the same step."""

    def __init__(self, seen):
        self.seen, self.values = seen, []

    def begin(self, run):
        self.run = run

    def evaluated(self, values):
        self.values.append(values["accuracy"])
        epoch = len(self.values)
        if self.seen and self.values[-1] < self.seen[:epoch][-1] - 0.05:
            self.run.stop()


best, seen, draws = (0.0, None, ""), [], random.Random(0)
for _ in range(5):
    lr = 10 ** draws.uniform(-4, -1)
    recipe = phalanx.Recipe(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        (x[:1400], y[:1400]), F.cross_entropy, batch_size=64, epochs=5, lr=lr,
    )  # fmt: skip
    prune = Prune(seen)
    result = recipe.train(evaluation=phalanx.Evaluation(accuracy, (x[1400:], y[1400:])), callbacks=[prune])
    value = result.metric_history[-1].value
    print(f"lr {lr:.4f}: accuracy {value:.3f} after {result.steps} steps")
    if value > best[0]:
        best, seen = (value, lr, result.digest), prune.values
print(f"best: lr {best[1]:.4f}, digest {best[2][:12]}")
