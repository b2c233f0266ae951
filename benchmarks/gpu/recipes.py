"""Recipes that are larger than those of the tests, so that a device picks the kernels of real work for them."""

import dataclasses
import functools
from typing import Any

import common
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from benchmarks.step import models
from tests.families import ADAMW, FAMILIES, OPTIMIZERS, SCHEDULERS, normal, whole

SIZE, WIDTH, TOKENS = (8, 8, 8) if common.SMALL else (32, 64, 128)  # of pictures, of layers, of texts
BATCH, STEPS = (12, 3) if common.SMALL else (48, 4)
SAMPLES = 2 * BATCH


def conv() -> nn.Module:
    """Convolutions with BatchNorm and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * WIDTH, 10),
    )  # fmt: skip


def conv_channels_last() -> nn.Module:
    return conv().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def forward_channels_last(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0].contiguous(memory_format=torch.channels_last))


def prelu() -> nn.Module:
    """Parameters of one element: what lies behind them in one piece of memory begins at odd addresses."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.PReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(6 * (SIZE // 2 - 1) ** 2, 33),
        nn.PReLU(), nn.Linear(33, 10),
    )  # fmt: skip


def gpt(compiled: bool = False) -> nn.Module:
    """Causal attention by torch's own function."""
    model = models.Gpt(512, TOKENS, 2 * WIDTH, 4, 2 if common.SMALL else 4)
    return torch.compile(model) if compiled else model  # type: ignore[return-value]


def dense(compiled: bool = False) -> nn.Module:
    """Linear layers."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10))
    return torch.compile(model) if compiled else model  # type: ignore[return-value]


class Recurrent(nn.Module):
    """Two recurrent layers with dropout between them, which cuDNN draws."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layers = kind(16, WIDTH, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


def recipe(make_model: Any, data: Any, loss_fn: Any = F.cross_entropy, **more: Any) -> phalanx.Recipe:
    """A recipe of this file's sizes."""
    return phalanx.Recipe(make_model, data, loss_fn, **{"batch_size": BATCH, "steps": STEPS, "replicas": 4, **more})


IMAGES = normal(SAMPLES, 3, SIZE, SIZE), whole(10, SAMPLES)
TEXTS = whole(512, SAMPLES, TOKENS), whole(512, SAMPLES, TOKENS, seed=2)
SIGNALS = normal(SAMPLES, 12, 16), whole(10, SAMPLES)
BF16, TOKEN_LOSS = {"precision": "bfloat16"}, models.token_loss
LARGE = {
    "conv, BatchNorm, dropout": recipe(conv, IMAGES, optimizer=ADAMW),
    "conv, BatchNorm, bf16": recipe(conv, IMAGES, **BF16),
    "conv, channels_last": recipe(conv_channels_last, IMAGES, forward_fn=forward_channels_last),
    "PReLU, clipped": recipe(prelu, IMAGES, max_norm=0.01),
    "GPT, SDPA": recipe(gpt, TEXTS, TOKEN_LOSS, optimizer=torch.optim.AdamW),
    "GPT, SDPA, bf16, clipped": recipe(gpt, TEXTS, TOKEN_LOSS, max_norm=0.1, optimizer=ADAMW, **BF16),
    "LSTM, dropout": recipe(functools.partial(Recurrent, nn.LSTM), SIGNALS),
    "GRU, dropout, clipped": recipe(functools.partial(Recurrent, nn.GRU), SIGNALS, max_norm=0.01),
}
if common.SMALL:
    FEW = "mlp", "conv_norm", "transformer", "bfloat16", "counting", "masked_tokens"
    FAMILIES = {name: FAMILIES[name] for name in FEW}
    OPTIMIZERS = {name: OPTIMIZERS[name] for name in ("default", "sgd_foreach", "adamw_fused", "adafactor")}
    SCHEDULERS = {name: SCHEDULERS[name] for name in ("cosine", "plateau")}
MLP = FAMILIES["mlp"]
CONV = LARGE["conv, BatchNorm, dropout"]


def folded() -> dict[str, phalanx.Recipe]:
    """R = 2, 3, 4, 8 of all families and large ones; optimizers, clipped; schedulers."""
    counts = (3,) if common.SMALL else (2, 3, 4, 8)
    found = {f"{name}, R={count}": family.recipe(count) for name, family in FAMILIES.items() for count in counts}
    found |= {
        f"{name}, R={count}": dataclasses.replace(made, replicas=count)
        for name, made in LARGE.items()
        for count in (counts if common.SMALL else (3, 8))
    }
    found |= {
        f"optimizer {name}": MLP.recipe(4, optimizer=factory, max_norm=0.1) for name, factory in OPTIMIZERS.items()
    }
    return found | {f"scheduler {name}": MLP.recipe(4, scheduler=factory) for name, factory in SCHEDULERS.items()}


def spread() -> dict[str, phalanx.Recipe]:
    """What several workers compute: each family once, and the large ones."""
    found = {name: family.recipe(max(3, family.replicas[-1])) for name, family in FAMILIES.items()}
    if common.SMALL:
        return {name: found[name] for name in ("mlp", "counting")} | {"conv, BatchNorm, dropout": CONV}
    return found | {f"{name}, R=4": made for name, made in LARGE.items()}
