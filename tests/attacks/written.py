"""Random models whose buffers are written in many ways, and whose parameters are replaced: one answer in every engine.

What must hold: equal digests and equal visible state, or the same refusal, inline, with workers, with devices and with
a worker that is killed. Honest models are never refused or warned of.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import phalanx
from tests.engines.deaths import Trapped

X = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
X[:, 0] = 0  # as the borders of MNIST
Y = torch.randn(96, 1, generator=torch.Generator().manual_seed(1))
WAYS: list[dict[str, Any]] = [{"workers": 2}, {"workers": 3}, {"workers": "auto"}, {"devices": ["cpu", "cpu"]}]


class Written(nn.Module):
    """Has every kind of buffer; ``kind`` says which of them forward writes, or which parameter it replaces."""

    def __init__(self, kind: str = "", at: int = 0) -> None:
        super().__init__()
        self.kind, self.at = kind, at
        self.body = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.ReLU())
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("queue", torch.randn(8, 24))
        self.register_buffer("bank", torch.zeros(24, 8))
        self.register_buffer("used", torch.zeros(4))
        self.register_buffer("codes", torch.randn(4, 8))
        self.register_buffer("sums", torch.zeros(4, 8))
        self.register_buffer("mean", torch.zeros(1, 6))
        self.register_buffer("centre", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x) * self.scale - self.centre
        now, step = hidden.detach(), int(self.calls)
        with torch.no_grad():
            self.calls += 1
            if self.kind == "norm":
                self.mean.lerp_(x.mean(0, keepdim=True), 0.1)
            elif self.kind == "codebook":
                near = torch.cdist(now, self.codes).argmin(1)
                ones = nn.functional.one_hot(near, 4).float()
                self.used.lerp_(ones.sum(0), 0.1)
                self.sums.lerp_(ones.T @ now, 0.1)
                self.codes.copy_((self.sums + 0.01) / (self.used[:, None] + 0.01))
            elif self.kind == "revived" and step == self.at:
                self.codes[step % 4] = now[0]
            elif self.kind == "queue":
                self.queue[:, step % 24] = now[0]
            elif self.kind == "bank":
                self.bank[step % 12] = now[0]
        if self.kind == "replaced" and step == self.at:
            self.scale = nn.Parameter(self.scale.detach().clamp(-1, 1))
        elif self.kind == "late" and step == self.at:
            self.more = nn.Linear(8, 8)
        elif self.kind == "empty" and not hasattr(self, "pool"):
            self.pool = nn.Identity()
        elif self.kind == "swapped":
            kept, self.scale = self.scale, nn.Parameter(self.scale * 2)
            self.scale = kept
        elif self.kind == "functional":
            weights = {name: value * 1.0 for name, value in self.body.named_parameters()}
            hidden = hidden + torch.func.functional_call(self.body, weights, x).detach()
        return self.head(hidden) + self.codes.mean() + self.queue.mean()


HONEST = ("", "norm", "codebook", "empty", "swapped", "functional")
REFUSED = ("queue", "bank", "replaced", "late")


def average(model: Any) -> None:
    with torch.no_grad():
        model.centre.mul_(0.9).add_(model.scale, alpha=0.01)
        model.bank = model.bank + model.body[0].running_mean.mean()


def made(rng: random.Random, how: str) -> Callable[..., Any]:
    kind = rng.choice([torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
    options = {"lr": 0.01, "momentum": rng.choice([0, 0.9])} if kind is torch.optim.SGD else {"lr": 0.01}

    class Own(kind):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            average(self.model)

    def optimizer(model: Any) -> Any:
        if how == "own":
            own = Own(model.parameters(), **options)
            own.model = model
            return own
        built = kind(model.parameters(), **options)
        seen: list[int] = []

        def hook(optimizer: Any, *_: Any) -> None:
            average(model)
            if how == "counting":
                seen.append(1)
                model.centre.add_(0.001 * len(seen))
            elif how == "slowing" and len(optimizer.param_groups) and float(model.centre[0]) > 0.01:
                optimizer.param_groups[0]["lr"] *= 0.9
            elif how == "resetting" and float(model.centre[0]) > 0.02:
                optimizer.state.clear()

        if how == "before":
            built.register_step_pre_hook(hook)
        elif how:
            built.register_step_post_hook(hook)
        return built

    return optimizer


def outcome(recipe: Any, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            result = recipe.train(progress=False, **options)
            state = {**result.params, **dict(result.model.named_buffers())}
            ended: Any = result.digest, {name: item.tolist() for name, item in state.items()}, result.loss_history
        except phalanx.PhalanxError as error:
            ended = f"{type(error).__name__}: {error}".partition(";")[0]
    return ended, [str(each.message) for each in told]


def compared(rng: random.Random, kind: str, how: str, **more: Any) -> str | None:
    """One recipe in every engine, and with a death; what differs, or is refused or told though it is honest."""
    replicas, steps, at = rng.choice([1, 2, 4, 5]), rng.choice([5, 14]), rng.randrange(5)
    optimizer = made(rng, how)
    facts = {"replicas": replicas, "batch_size": 4 * replicas, "steps": steps, "optimizer": optimizer, **more}

    def recipe(make_model: Any) -> Any:
        return phalanx.Recipe(make_model, (X, Y), nn.functional.mse_loss, **facts)

    def model() -> Any:
        return Written(kind, at)

    case = f"{kind or 'plain'}, {how or 'no hook'}, at {at}, {facts}"
    wanted, told = outcome(recipe(model), engine="inline")
    honest = kind in HONEST or replicas == 1 or "buffers" in more
    if honest and kind not in ("replaced", "late") and (isinstance(wanted, str) or told):
        return f"{case}: {str(wanted)[:300]}, told {told}"
    ways = [{"workers": min(way["workers"], replicas)} if isinstance(way.get("workers"), int) else way for way in WAYS]
    for way in ways if replicas > 1 else ways[:1]:
        found, _ = outcome(recipe(model), **way)
        if found != wanted:
            return f"{case}: {way} came to {str(found)[:300]}, inline to {str(wanted)[:300]}"
    if isinstance(wanted, str):
        return None
    place = rng.choice(["COMPUTING", "COMPUTED", "UPDATING", "half updated", "UPDATED"])
    with tempfile.TemporaryDirectory() as folder:
        number, step, workers = rng.randrange(min(2, replicas)), rng.randrange(steps), min(2, replicas)
        found, _ = outcome(recipe(Trapped(model, folder, number, step, place)), workers=workers)
    lost = isinstance(found, str) and "its state is lost" not in found and "a step hook keeps" in found
    lost = lost or (isinstance(found, str) and found.startswith("LostError"))
    if found != wanted and not (lost and how in ("own", "counting", "slowing", "resetting")):
        return f"{case}: worker {number} killed at {place} of step {step} came to {str(found)[:400]}"
    return None


def by_optimizers(rng: random.Random) -> str | None:
    """Buffers that optimizers and hooks write."""
    return compared(rng, "", rng.choice(["", "post", "before", "own", "counting", "slowing", "resetting"]))


def by_forward(rng: random.Random) -> str | None:
    """Queues, banks, codebooks and norms, by the usual rule or one that the recipe names."""
    kind = rng.choice(["norm", "codebook", "queue", "bank", "revived", ""])
    rules = rng.choice(
        [{}, {"buffers": {"*": "first"}}, {"buffers": {"queue": "mean", "b?nk": "first", "codes": "mean"}}]
    )
    return compared(rng, kind, rng.choice(["", "", "post"]), **rules)


def replaced(rng: random.Random) -> str | None:
    """Parameters that forward replaces or makes, and honest models that look alike."""
    return compared(rng, rng.choice(["replaced", "late", "empty", "swapped", "functional"]), rng.choice(["", "post"]))


ARMS: dict[str, Callable[[random.Random], str | None]] = {
    "buffers that optimizers write": by_optimizers,
    "queues and statistics in buffers": by_forward,
    "parameters that forward replaces": replaced,
}
torch.set_num_threads(1)
