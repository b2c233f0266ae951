"""Padded sequences: the loss is a mean over tokens, so it tells how many, and shares with more tokens weigh more."""

import torch
from torch import nn
from torch.nn import functional as F

import phalanx

PAD = -100
random = torch.Generator().manual_seed(0)
tokens = torch.randint(1, 50, (256, 12), generator=random)
targets = tokens.roll(1, dims=1)  # learn to say the token before
lengths = torch.randint(1, 12, (256, 1), generator=random)
targets = torch.where(torch.arange(12) < lengths, targets, PAD)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(50, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.embed(x))[0])


token_loss = phalanx.weighted(
    lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PAD),
    lambda output, target: (target != PAD).sum(),
)

for replicas in (1, 8):
    recipe = phalanx.Recipe(Tagger, (tokens, targets), token_loss, replicas=replicas, steps=40, lr=3e-3)
    print(f"{replicas} replicas: loss {recipe.train().loss:.6f}")  # equal up to rounding, not up to who was padded
