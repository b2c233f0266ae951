"""Hold the run yourself: look at each step, stop early on held-out data, keep the best state."""

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

best, value = None, 0.0
with recipe.start(evaluation=phalanx.Evaluation(accuracy, (x[1437:], y[1437:]))) as run:
    for report in run:  # while you hold report k, the state is exactly the one after step k
        if report.metric is None:
            continue  # an evaluation is due after each epoch only
        print(f"epoch {report.epoch}: loss {report.loss:.3f}, gradient {report.grad_norm:.2f}, {report.metric:.3f}")
        if report.metric > value:
            best, value = run.result(), report.metric  # a copy of its own: training on does not change it
        elif report.metric < value - 0.005:
            break
assert best is not None
print(f"best after {best.steps} steps: {value:.3f}, digest {best.digest}")
torch.save(best.model.state_dict(), "best.pt")
