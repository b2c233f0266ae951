"""A loss over the whole batch (SimCLR's NT-Xent) sees a replica's share only: its value in step 0 for R = 1, 2 and 4.

python benchmarks/batch_losses.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import phalanx

SAMPLES, BATCH, TEMPERATURE = 512, 128, 0.5


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16),
    )  # fmt: skip


def nt_xent(model, batch):
    """Two noisy views of each image. Each view has to find the other one among all views that the loss sees."""
    (images,) = batch
    views = torch.cat([images + torch.randn_like(images), images + torch.randn_like(images)])
    points = F.normalize(model(views), dim=1)
    alike = points @ points.T / TEMPERATURE
    alike.fill_diagonal_(-float("inf"))
    return F.cross_entropy(alike, torch.arange(2 * len(images)).roll(len(images)))


if __name__ == "__main__":
    data = (torch.rand(SAMPLES, 3, 16, 16, generator=torch.Generator().manual_seed(0)),)
    for replicas in (1, 2, 4):
        recipe = phalanx.Recipe(
            make_model, data, nt_xent, loss_takes="model", replicas=replicas, batch_size=BATCH, steps=1
        )
        print(f"R = {replicas}: {recipe.train(engine='inline', progress=False).loss:.2f}")
