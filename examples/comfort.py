"""Stop early, keep the best weights, average them, write a log, predict, and save: the same bits for any workers."""

import sklearn.datasets
import torch
from torch import nn

import phalanx
from phalanx.callbacks import EMA, EarlyStopping, Log, SaveBest

data = sklearn.datasets.load_digits()
x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


recipe = phalanx.Recipe(
    lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)),
    (x[:1437], y[:1437]),
    nn.CrossEntropyLoss(),
    epochs=50,
)
digests = set()
for workers in (1, 2, 3):
    result = recipe.train(
        workers=workers,
        evaluation=phalanx.Evaluation(accuracy, (x[1437:], y[1437:])),
        callbacks=[EarlyStopping("accuracy", patience=3), SaveBest("accuracy"), EMA(0.99), Log("csv", "log.csv")],
    )
    digests.add(result.digest)
print(f"stopped after {result.steps} steps; best accuracy {result.best.value:.3f} after {result.best.steps}")
print("digits:", result.predict(x[1437:1447]).argmax(1).tolist())
result.save("model.safetensors", averaged=True)
assert len(digests) == 1
