"""Fine-tuning a few weights of a frozen model: low-rank adapters beside each linear layer (LoRA), by hand.

What is frozen in `make_model` has no gradient and no optimizer state, and is folded by nobody; workers share a copy.
With the peft library it is the same: `make_model=lambda: get_peft_model(base(), LoraConfig(...)).train()`.
"""

import functools

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import phalanx


class Adapted(nn.Module):
    def __init__(self, linear, rank=4):
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def base():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
job = functools.partial(phalanx.Recipe, loss_fn=F.cross_entropy, batch_size=64)
low, high = y < 5, y >= 5
pretrained = job(base, (x[low], y[low]), epochs=5).train().model  # knows five digits


def make_model():
    model = base()
    model.load_state_dict(pretrained.state_dict())
    return nn.Sequential(*(Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in model))


recipe = job(make_model, (x[high], y[high]), epochs=10, lr=5e-3)
result = recipe.train(workers=2)
adapters = sum(value.numel() for name, value in result.params.items() if ".base." not in name)
print(f"loss {result.loss_history[0]:.2f} to {result.loss:.2f}; {adapters} weights trained")
assert torch.equal(result.params["0.base.weight"], pretrained[0].weight)  # not one bit of what is frozen
assert result.digest == recipe.train(workers=1).digest
