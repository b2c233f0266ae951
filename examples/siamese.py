"""Pairs of samples: a siamese network learns whether two digits are the same, from pairs drawn anew each epoch.

A dataset returns the pair and its label; what is random in it is keyed by (seed, epoch, sample), so the pairs are the
same for any number of workers.
"""

import random

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import phalanx


class Pairs(torch.utils.data.Dataset):
    def __init__(self):
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        self.labels = digits.target
        self.of = [[i for i, label in enumerate(self.labels) if label == digit] for digit in range(10)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        same = random.random() < 0.5
        other = random.choice(self.of[self.labels[index]]) if same else random.randrange(len(self))
        alike = self.labels[index] == self.labels[other]
        return {"pair": torch.stack([self.images[index], self.images[other]]), "alike": float(alike)}


def make_model():
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 32))


def distance(model, batch):
    both = model(batch["pair"].flatten(0, 1)).unflatten(0, (-1, 2))
    return F.pairwise_distance(both[:, 0], both[:, 1])


def contrastive(distances, alike):
    alike = torch.as_tensor(alike, dtype=torch.float32)
    return (alike * distances**2 + (1 - alike) * (1 - distances).clamp(min=0) ** 2).mean()


recipe = phalanx.Recipe(
    make_model, Pairs(), contrastive, distance, lambda batch: batch["alike"], batch_size=64, epochs=8, lr=1e-3
)
result = recipe.train(workers=2)
first, last = (sum(part) / 29 for part in (result.loss_history[:29], result.loss_history[-29:]))
print(f"loss {first:.3f} in the first epoch, {last:.3f} in the last, digest {result.digest[:12]}")
assert result.digest == recipe.train(workers=1).digest
