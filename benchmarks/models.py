"""The models that the benchmarks of this project use, with their data and optimizer."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from real_models import REAL, token_loss
from torch import nn
from torch.nn import functional as F

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)


class Gpt(nn.Module):
    """A small causal transformer: 4 layers, width 192, 4 heads, 64 tokens, vocabulary 256."""

    def __init__(self, vocabulary=256, tokens=64, width=192, heads=4, layers=4):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        h = self.token(x) + self.position
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)).flatten(0, 1)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h):
        b, t, d = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        h = h + self.project(a)
        return h + self.mlp(self.norm2(h))


def tiny():
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def mlp():
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
        nn.Linear(2048, 10),
    )  # fmt: skip


def square(width):
    """Four square layers: 4 * width * (width + 1) parameters."""
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())][:-1])


class Adapted(nn.Module):
    """A frozen square layer with a low-rank adapter beside it."""

    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted(width):
    """Twelve of them."""
    return nn.Sequential(*[Adapted(width) for _ in range(12)])


@dataclass(frozen=True)
class Case:
    """A model with all that defines its training."""

    make_model: Any
    x: torch.Tensor
    y: torch.Tensor
    loss_fn: Any
    batch_size: int
    steps: int
    precision: str | None = None

    @property
    def warm_up(self) -> int:
        """Steps that are not counted where the script holds the loop."""
        return warm_up(self.steps)

    def shortened(self) -> "Case":
        """A tenth of the steps, to see whether everything runs."""
        return dataclasses.replace(self, steps=max(4, self.steps // 10))


def case(name: str) -> Case:
    """One of ``CASES`` or ``real_models.REAL``, or ``size N`` for about N parameters, on random data.

    ``adapted N``: N that are frozen, with low-rank adapters beside them.

    Every step has samples that no other has: a model that learns one batch by heart soon computes with denormal
    numbers, which is another workload.
    """
    random = torch.Generator().manual_seed(0)
    if name.startswith(("size ", "adapted ")):
        kind, parameters = name.split()
        return sized(int(float(parameters)), random, *((square, 4) if kind == "size" else (adapted, 12)))
    if name in REAL:
        model, data, loss_fn, batch, steps, precision = REAL[name]
        return Case(model, *data(fresh(batch, steps), random), loss_fn, batch, steps, precision)
    shape, classes, batch, steps, model = {
        "tiny": ((4,), 3, 32, 1000, tiny),
        "lenet": ((1, 28, 28), 10, 256, 50, lenet),
        "mlp": ((784,), 10, 64, 40, mlp),
        "gpt": ((64,), 256, 16, 30, Gpt),
    }[name]
    count = fresh(batch, steps)
    if name == "gpt":
        x, y = torch.randint(256, (2, count, 64), generator=random)
        return Case(model, x, y, token_loss, batch, steps)
    x = torch.randn((count, *shape), generator=random)
    return Case(model, x, torch.randint(classes, (count,), generator=random), F.cross_entropy, batch, steps)


def sized(parameters: int, random: torch.Generator, model: Callable[[int], nn.Module], layers: int) -> Case:
    """Square layers with about this many parameters; batches of 32."""
    width = round(math.sqrt(parameters / layers))
    steps = min(3000, max(15, 300_000_000 // parameters))
    x = torch.randn(fresh(32, steps), width, generator=random)
    y = torch.randint(width, (len(x),), generator=random)
    return Case(functools.partial(model, width), x, y, F.cross_entropy, 32, steps)


def fresh(batch_size: int, steps: int) -> int:
    """How many samples it takes so that none comes twice, warm steps included."""
    return batch_size * (steps + warm_up(steps))


def warm_up(steps: int) -> int:
    """Steps that are not counted where the script holds the loop."""
    return max(3, steps // 5)


CASES = ("tiny", "lenet", "mlp", "gpt")
