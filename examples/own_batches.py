"""Bring your own batches, from a DataLoader or any stream: phalanx deals each to the replicas."""

import sklearn.datasets
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx

data = sklearn.datasets.load_digits()
dataset = TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))
loader = DataLoader(dataset, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))

recipe = phalanx.Recipe(
    lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    None,
    nn.functional.cross_entropy,
    replicas=4,
)
with recipe.start() as run:
    for epoch in range(3):
        for x, y in loader:
            loss = run.step((x, y))
        print(f"epoch {epoch}: loss {loss:.3f}")
    result = run.result()
print("digest", result.digest)
