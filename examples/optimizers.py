"""Any torch optimizer: groups by parameter name, or several side by side (Muon for matrices, AdamW for the rest)."""

import sklearn.datasets
import torch
from torch import nn

import phalanx

data = sklearn.datasets.load_digits()
x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
STEPS = 100


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))


def by_name(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    decayed = [parameter for name, parameter in named if parameter.ndim > 1]
    plain = [parameter for name, parameter in named if parameter.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=3e-3
    )


def muon_and_adamw(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    matrices = [parameter for _, parameter in named if parameter.ndim == 2]
    others = [parameter for _, parameter in named if parameter.ndim != 2]
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(others, lr=3e-3)]


for optimizer in (by_name, muon_and_adamw):
    recipe = phalanx.Recipe(
        make_model,
        (x, y),
        nn.functional.cross_entropy,
        steps=STEPS,
        optimizer=optimizer,
        scheduler=lambda made: torch.optim.lr_scheduler.CosineAnnealingLR(made, STEPS),
        max_norm=1.0,
    )
    result = recipe.train()
    print(f"{optimizer.__name__}: loss {result.loss:.3f}, digest {result.digest[:16]}")
