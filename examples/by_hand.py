"""What phalanx promises, written by hand: k shares, each alone, folded in the fixed order. Same bits."""

import torch
from torch import nn

import phalanx

random = torch.Generator().manual_seed(0)
x, y = torch.randn(200, 10, generator=random), torch.randint(3, (200,), generator=random)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))


recipe = phalanx.Recipe(make_model, (x, y), nn.functional.cross_entropy, replicas=4, batch_size=32, steps=20)
result = recipe.train()

torch.set_num_threads(1)  # threads are part of the answer; a recipe's default is 1
torch.manual_seed(recipe.seed)
model = make_model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    shares = recipe.plan.shares(step)
    gradients, weights = [], []
    for replica, share in enumerate(shares):
        model.zero_grad(set_to_none=True)
        with recipe.plan.seeded(step, replica):
            nn.functional.cross_entropy(model(x[share]), y[share]).backward()
        weight = len(share) / max(map(len, shares))
        gradients.append(
            [parameter.grad if weight == 1 else parameter.grad * weight for parameter in model.parameters()]
        )
        weights.append(weight)
    (a, b, c, d), total = gradients, (weights[0] + weights[1]) + (weights[2] + weights[3])
    for parameter, g0, g1, g2, g3 in zip(model.parameters(), a, b, c, d, strict=True):
        parameter.grad = ((g0 + g1) + (g2 + g3)) / total
    optimizer.step()

by_hand = phalanx.digest(model, optimizer, 20)
print("phalanx", result.digest)
print("by hand", by_hand)
assert by_hand == result.digest
