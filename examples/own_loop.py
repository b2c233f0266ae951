"""Hold the run yourself: look at each step, evaluate when you like, stop early, keep the best state."""

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
    nn.CrossEntropyLoss(),
    epochs=50,
    lr=3e-3,
)

best = None
with recipe.start() as run:
    for report in run:  # while you hold report k, the state is exactly the one after step k
        if (report.step + 1) % recipe.plan.steps_per_epoch == 0:
            value = run.evaluate(accuracy, (x[1437:], y[1437:]))
            print(
                f"epoch {report.epoch}: loss {report.loss:.3f}, gradient {report.grad_norm:.2f}, accuracy {value:.3f}"
            )
            if best is None or value > best.metric_history[-1].value:
                best = run.result()  # a copy of its own: training on does not change it
            elif value < best.metric_history[-1].value - 0.005:
                break
print(f"best after {best.steps} steps: {best.metric_history[-1].value:.3f}, digest {best.digest}")
