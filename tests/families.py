"""What exactness is tried on: small models with fixed random data; optimizers, schedulers and kinds of data.

``FAMILIES`` are whole recipes, each of which stresses something else. ``OPTIMIZERS``, ``SCHEDULERS`` and ``DATA`` are
arguments that a family's recipe can be given instead of its own, as in ``FAMILIES["mlp"].recipe(3, **DATA["dict"])``.
"""

import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import default_collate

import phalanx
from tests.orders import triples

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model with data, loss and optimizer. ``replicas`` are the counts worth trying; names are those of Recipe."""

    make_model: Callable[[], nn.Module]
    data: Any
    loss_fn: Callable[..., Any] | None = F.cross_entropy
    forward_fn: Callable[..., Any] | None = None
    replicas: tuple[int, ...] = (3, 4)
    batch_size: int | None = 8
    steps: int = 4
    optimizer: Callable[..., Any] = SGD
    precision: str | None = None

    def recipe(self, replicas: int, **changes: Any) -> phalanx.Recipe:
        """Its recipe with so many replicas; ``changes`` replace or add arguments."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if "epochs" in changes:
            del given["steps"]
        return phalanx.Recipe(**(given | {"replicas": replicas} | changes))


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def whole(high, *shape, seed=1):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def mlp():
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(54, 10), nn.ReLU(), nn.Linear(10, 3),
    )  # fmt: skip


def conv_norm():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def conv_norm_channels_last():
    return conv_norm().to(memory_format=torch.channels_last)


def forward_channels_last(model, batch):
    x = batch[0].contiguous(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    return model(x)


class Transformer(nn.Module):
    """One encoder layer with dropout 0.1, in training mode, over six tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x))).flatten(0, 1)


def token_loss(output, target):
    return F.cross_entropy(output, target.flatten())


class ConstantBuffers(nn.Module):
    """Attention with a position table and a causal mask of finfo.min: buffers that must not move by one bit."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("table", torch.randn(6, 4))
        self.register_buffer("mask", torch.full((6, 6), torch.finfo(torch.float32).min).triu(1), persistent=False)

    def forward(self, x):
        x = self.mix(x) + self.table
        scores = x @ x.transpose(1, 2) + self.mask
        return self.head((scores.softmax(-1) @ x).mean(1))


class Tied(nn.Module):
    """The embedding is the output layer too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x))).flatten(0, 1)


class PartlyUnused(nn.Module):
    """A layer that only those shares use which hold a sample with a large first feature."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.extra = nn.Linear(5, 3)

    def uses_extra(self, x):
        return bool((x[:, 0] > 0.9).any())

    def forward(self, x):
        return self.body(x) + self.extra(x) if self.uses_extra(x) else self.body(x)


class Unused(nn.Module):
    """A layer that nobody uses: its gradient is absent, so decay and momentum leave it alone."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(5, 3)
        self.body = nn.Linear(5, 3)

    def forward(self, x):
        return self.body(x)


def frozen():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[1].running_mean.normal_()
    model[:2].requires_grad_(False)
    model[1].eval()
    return model


def embedding():
    return nn.Sequential(nn.Embedding(11, 6, padding_idx=0), nn.Flatten(), nn.Linear(36, 3))


class Recurrent(nn.Module):
    """The last output of two recurrent layers, through a linear one."""

    def __init__(self, kind):
        super().__init__()
        self.recurrent = kind(4, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1])


def double():
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def two_groups(named):
    named = list(named)
    decayed = [(name, parameter) for name, parameter in named if name.endswith("weight")]
    plain = [(name, parameter) for name, parameter in named if not name.endswith("weight")]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=0.01
    )


class SharedGrad(nn.Module):
    """Three vectors, added as matrices: torch 2.13 gives the three gradients as views of one storage."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(6)) for _ in range(3))

    def forward(self, x):
        return x[:, :2] @ (self.a.view(2, 3) + self.b.view(2, 3) + self.c.view(2, 3))


class Spectral(nn.Module):
    """Spectral normalisation: its power iteration writes buffers in every forward pass."""

    def __init__(self):
        super().__init__()
        self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


class TrappedNet(nn.Module):
    """A small net with BatchNorm; ``trap(x, hidden)`` sees each forward after the running statistics moved."""

    def __init__(self, trap=lambda x, hidden: hidden):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.trap = trap

    def forward(self, x):
        return self.last(self.trap(x, self.norm(self.first(x))))


class Elsewhere(torch.optim.SGD):
    """An optimizer that keeps a count in an attribute, where nobody else finds it; it decides the rate."""

    def __init__(self, named):
        super().__init__(named, lr=0.1)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)


class Counting(nn.Module):
    """Buffers of other kinds: a counter, a float that forward assigns anew, a flag, and a scalar."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(5))
        self.register_buffer("seen_large", torch.tensor(False))
        self.register_buffer("largest", torch.tensor(-torch.inf))

    def forward(self, x):
        self.count += len(x)
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        self.seen_large |= (x > 2).any()
        self.largest.copy_(torch.maximum(self.largest, x.max()))
        return self.body(x - self.average)


class MixedDtypes(nn.Module):
    """A float32 body under a float64 head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.head = nn.Linear(8, 3).double()

    def forward(self, x):
        return self.head(torch.relu(self.body(x)).double())


class NegativeZero(nn.Module):
    """Gradients of -0, which adding +0 would lose; ``extra`` gets none from samples with a negative first feature."""

    def __init__(self):
        super().__init__()
        self.body = nn.Parameter(torch.randn(3))
        self.extra = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return (x * (self.body + self.extra if x[0] > 0 else self.body)).sum()


class OddTensors(nn.Module):
    """Parameters in transposed memory, of no dimension and of no element; a complex parameter and buffer."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.complex64))

    def forward(self, x):
        self.seen += x.mean(0) * (1 + 2j)
        return (x @ self.turned * self.scalar * self.phase).abs() + self.empty.sum()


class Reused(nn.Module):
    """A layer used three times in a row: under autocast its weight is cast once, and the cast's gradients are added."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for _ in range(3):
            x = torch.relu(self.middle(x))
        return self.last(x)


class OwnAutocast(Reused):
    """Forward opens autocast itself, several times: the weight is cast anew in each."""

    def forward(self, x):
        for layer in (self.first, self.middle, self.middle, self.last):
            with torch.autocast("cpu", torch.bfloat16):
                x = torch.tanh(layer(x))
        return x.float()


def mlp_bfloat16():
    return mlp().bfloat16()


def forward_bfloat16(model, batch):
    return model(batch[0].bfloat16()).float()


class WideSum(nn.Module):
    """Its output adds so many numbers that two threads share them, several times."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100_003))

    def forward(self, x):
        return torch.stack([(self.weight * turn).cos().mean() for turn in range(1, 9)]) * x.mean()


def wide_loss(output, target):
    return (output * target).square().mean()


class Terms(nn.Module):
    """The gradient of its weight is the sum of its rows, added one after the other; there is no rounding but that."""

    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(columns))

    def forward(self, x):
        return _Terms.apply(self.weight, x)


class _Terms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(x)
        return (weight * x).sum()

    @staticmethod
    def backward(ctx, gradient):
        return functools.reduce(torch.add, ctx.saved_tensors[0].unbind()) * gradient, None


def output_only(output, target):
    return output


def mean_of_terms(output, target):
    return output / len(target)


def terms(replicas, samples=None, **changes):
    """A recipe with a sample for each replica, which has other bits if gradients are added in any other order."""
    rows = torch.tensor(triples(samples or replicas))
    family = Family(
        make_model=functools.partial(Terms, rows.shape[1]), data=(rows, torch.zeros(len(rows))),
        loss_fn=mean_of_terms, batch_size=len(rows), steps=2, optimizer=functools.partial(torch.optim.SGD, lr=1.0),
    )  # fmt: skip
    return family.recipe(replicas, **{"shuffle": False, **changes})


class Circumstances(nn.Module):
    """A linear layer whose output tells the number of threads, and the strides of its input.

    Kernels look at both, too, but whether their bits differ for it depends on the processor.
    """

    def __init__(self, *sizes):
        super().__init__()
        self.body = nn.Linear(*sizes)

    def forward(self, x):
        return self.body(x.flatten(1)) * (torch.get_num_threads() / sum(x.stride()[1:]))


def masked_tokens(samples=20, tokens=6):
    """Token inputs and targets where each sample has another number of targets, and a quarter of them none."""
    x, y = whole(11, samples, tokens), whole(11, samples, tokens, seed=2)
    keep = torch.arange(samples) % 4 * 2
    return x, torch.where(torch.arange(tokens) < keep[:, None], y, -100)


def token_count(output, target):
    return (target != -100).sum()


SAMPLES = 20
FEATURES = (normal(SAMPLES, 5), whole(3, SAMPLES))
IMAGES = (normal(SAMPLES, 3, 6, 6), whole(3, SAMPLES))
SEQUENCES = (normal(SAMPLES, 6, 4), whole(3, SAMPLES))
TOKENS = (whole(11, SAMPLES, 6), whole(11, SAMPLES, 6, seed=2))
TOKEN_CLASSES = (whole(11, SAMPLES, 6), whole(3, SAMPLES))
ZERO_COLUMN = (F.pad(normal(SAMPLES, 2), (0, 1)), torch.full((SAMPLES,), 100.0))

FAMILIES = {
    "mlp": Family(make_model=mlp, data=FEATURES, replicas=(2, 3, 6, 7, 8)),
    "lenet": Family(make_model=lenet, data=(normal(SAMPLES, 1, 12, 12), whole(3, SAMPLES))),
    "conv_norm": Family(make_model=conv_norm, data=IMAGES, batch_size=10),
    "channels_last": Family(
        make_model=conv_norm_channels_last, data=IMAGES, forward_fn=forward_channels_last, batch_size=10
    ),
    "transformer": Family(make_model=Transformer, data=TOKENS, loss_fn=token_loss, optimizer=ADAMW),
    "constant_buffers": Family(make_model=ConstantBuffers, data=SEQUENCES, replicas=(2, 3, 6, 7, 8)),
    "tied": Family(make_model=Tied, data=TOKENS, loss_fn=token_loss),
    "partly_unused": Family(make_model=PartlyUnused, data=FEATURES),
    "unused": Family(make_model=Unused, data=FEATURES),
    "frozen": Family(make_model=frozen, data=FEATURES),
    "embedding": Family(make_model=embedding, data=TOKEN_CLASSES),
    "lstm": Family(make_model=functools.partial(Recurrent, nn.LSTM), data=SEQUENCES),
    "gru": Family(make_model=functools.partial(Recurrent, nn.GRU), data=SEQUENCES),
    "float64": Family(make_model=double, data=(normal(SAMPLES, 5, dtype=torch.float64), whole(3, SAMPLES))),
    "bfloat16": Family(make_model=mlp, data=FEATURES, precision="bfloat16", optimizer=ADAMW),
    "bfloat16_reused": Family(make_model=Reused, data=FEATURES, precision="bfloat16"),
    "own_autocast": Family(make_model=OwnAutocast, data=FEATURES),
    "bfloat16_model": Family(make_model=mlp_bfloat16, data=FEATURES, forward_fn=forward_bfloat16),
    "two_groups": Family(make_model=mlp, data=FEATURES, optimizer=two_groups),
    "shared_grad": Family(make_model=SharedGrad, data=FEATURES),
    "spectral": Family(make_model=Spectral, data=FEATURES),
    "counting": Family(make_model=Counting, data=FEATURES),
    "mixed_dtypes": Family(make_model=MixedDtypes, data=FEATURES),
    "negative_zero": Family(
        make_model=NegativeZero,
        data=ZERO_COLUMN,
        loss_fn=F.mse_loss,
        batch_size=None,
        optimizer=functools.partial(torch.optim.SGD, lr=0.001, momentum=0.9),
    ),
    "odd_tensors": Family(make_model=OddTensors, data=FEATURES),
    "wide_sum": Family(make_model=WideSum, data=(normal(SAMPLES, 1),) * 2, loss_fn=wide_loss, replicas=(3,), steps=2),
    "masked_tokens": Family(
        make_model=Tied, data=masked_tokens(), loss_fn=phalanx.weighted(token_loss, token_count), replicas=(3, 4, 8)
    ),
}

OPTIMIZERS = {
    "default": None,
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd_nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_dampened": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "sgd_maximize": functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.01, maximize=True),
    "sgd_foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd_fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adam_tensor_lr": functools.partial(torch.optim.Adam, lr=torch.tensor(0.01)),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adamw_foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01),
    "rmsprop_centered": functools.partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "adadelta": functools.partial(torch.optim.Adadelta, lr=1.0),
    "adamax": functools.partial(torch.optim.Adamax, lr=0.01),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01),
    "radam": functools.partial(torch.optim.RAdam, lr=0.01),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.1),
    "rprop": functools.partial(torch.optim.Rprop, lr=0.01),
}


def muon_and_adamw(named):
    matrices = [(name, parameter) for name, parameter in named if parameter.ndim == 2]
    others = [(name, parameter) for name, parameter in named if parameter.ndim != 2]
    muon = getattr(torch.optim, "Muon", torch.optim.SGD)  # which torch 2.6 does not have
    return [muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def warmup(step):
    return min(1.0, (step + 1) / 4)


def sequential(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS = {
    "step": functools.partial(lr_scheduler.StepLR, step_size=2, gamma=0.3),
    "multi_step": functools.partial(lr_scheduler.MultiStepLR, milestones=[1, 3, 4]),
    "cosine": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=6),
    "one_cycle": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=6, cycle_momentum=True),
    "warmup": functools.partial(lr_scheduler.LambdaLR, lr_lambda=warmup),
    "exponential": functools.partial(lr_scheduler.ExponentialLR, gamma=0.7),
    "linear": functools.partial(lr_scheduler.LinearLR, total_iters=4),
    "cyclic": functools.partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=2),
    "sequential": sequential,
    "plateau": functools.partial(lr_scheduler.ReduceLROnPlateau, factor=0.3, patience=0),
}


class Augmented:
    """A map-style dataset whose samples are jittered by torch, numpy and random, odd numbers of draws each."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x, y = FEATURES[0][index], FEATURES[1][index]
        noise = torch.randn(3).sum() + np.random.normal() + random.gauss(0, 1) + random.random()
        return x + 0.1 * torch.as_tensor(noise, dtype=torch.float32), y


def mixed_up(samples):
    """A collate function that draws: each sample is blended with its neighbour."""
    x, y = default_collate(samples)
    share = torch.rand(()) * np.random.rand() * random.random()
    return x * (1 - share) + x.roll(1, 0) * share, y


COLUMNS = {"x": FEATURES[0], "y": FEATURES[1]}


class OwnLoss(nn.Module):
    """A model that takes a dict's columns by name and returns its loss."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, y):
        return F.cross_entropy(self.body(x), y)


DATA = {
    "dataset": {"data": Augmented()},
    "dataset_and_drawing_collate": {"data": Augmented(), "collate_fn": mixed_up},
    "columns_and_drawing_collate": {"data": FEATURES, "collate_fn": mixed_up},
    "list": {"data": list(zip(*FEATURES, strict=True))},
    "list_of_numpy": {"data": [(x.numpy(), int(y)) for x, y in zip(*FEATURES, strict=True)]},
    "numpy": {"data": (FEATURES[0].numpy(), FEATURES[1].numpy())},
    "dict": {"data": COLUMNS, "make_model": OwnLoss, "loss_fn": None},
    "dict_of_numpy": {
        "data": {name: column.numpy() for name, column in COLUMNS.items()},
        "forward_fn": lambda model, batch: model(batch["x"]),
        "target_fn": lambda batch: batch["y"],
    },
    "list_of_dicts": {
        "data": [{"x": x, "y": y} for x, y in zip(*FEATURES, strict=True)],
        "forward_fn": lambda model, batch: model(batch["x"]),
        "target_fn": lambda batch: batch["y"],
    },
    "as_it_is": {"data": FEATURES, "batch_size": None},
    "dataset_as_it_is": {"data": Augmented(), "batch_size": None},
}


def two_losses():
    """The phases of a step in which the first and the last layer of the mlp have a loss each."""

    def first(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def second(model, batch):
        return model(batch[0]).square().mean()

    return [
        phalanx.Phase(first, parameters="0", loss_takes="model"),
        phalanx.Phase(second, parameters="2", loss_takes="model"),
    ]
