"""ggmlR's way of working: a list of samples, one per replica per step, handed over as they are, clipped gradients."""

import sklearn.datasets
import torch
from torch import nn

import phalanx

data = sklearn.datasets.load_iris()
x = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0), dtype=torch.float32)
samples = [{"x": row, "class": torch.tensor(label)} for row, label in zip(x, data.target, strict=True)]

result = phalanx.train(
    lambda: nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)),
    samples,
    nn.functional.cross_entropy,
    forward_fn=lambda model, sample: model(sample["x"]),
    target_fn=lambda sample: sample["class"],
    replicas=4,
    batch_size=None,  # one sample per replica per step, with no added axis
    steps=1000,
    max_norm=5.0,
)
print(f"loss {result.loss_history[0]:.3f} -> {result.loss:.3f}")
print("parameters:", {name: tuple(value.shape) for name, value in result.params.items()})
print("digest", result.digest)
