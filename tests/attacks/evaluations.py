"""Metrics and models that keep something from chunk to chunk of an evaluation, and such that do not, at random.

What must hold: honest code is neither refused nor warned of. In all ways to run it, a run that is not warned of has the
same digest, metrics, average, best weights and predictions as all others that are not.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.callbacks import EMA, EarlyStopping, SaveBest

X = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()
SEEN = torch.randn(70, 6, generator=torch.Generator().manual_seed(1))
TARGETS = (SEEN[:, 0] * SEEN[:, 1] > 0).long()
HONEST_MODELS = ("plain", "batch norm", "dropout", "constants", "looked at")
KEEPING_MODELS = ("first mean", "first in a dict", "first in a list", "calls", "running", "late")
HONEST_METRICS = ("accuracy", "loss", "noise", "object", "whole", "constants")
KEEPING_METRICS = ("running mean", "first median", "calls", "late", "object with calls", "last value")
WAYS: list[dict[str, Any]] = [
    {"engine": "inline"},
    {"workers": 2},
    {"workers": 3},
    {"workers": "auto"},
    {"devices": ["cpu", "cpu"]},
]


class Model(nn.Module):
    """Keeps something in evaluation mode, in one of many ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.mean = kind, 0, None
        self.known: dict[str, torch.Tensor] = {}
        self.listed: list[torch.Tensor] = []
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8) if kind == "batch norm" else nn.Dropout(0.2 * (kind == "dropout"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.body(x)))
        if not self.training:
            hidden = self.changed(hidden)
        return self.head(hidden)

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.kind == "constants":
            if self.mean is None or len(self.mean) < len(hidden):
                self.mean = torch.linspace(0, 1, 8).expand(len(hidden), 8)
            return hidden + self.mean[: len(hidden)]
        if self.kind == "looked at":
            self.listed = [*self.listed, hidden][-3:]
        elif self.kind == "first mean":
            self.mean = hidden.mean(0) if self.mean is None else self.mean
            return hidden - self.mean
        elif self.kind == "first in a dict":
            return hidden - self.known.setdefault("mean", hidden.mean(0))
        elif self.kind == "first in a list":
            if not self.listed:
                self.listed.append(hidden.mean(0))
            return hidden - self.listed[0]
        elif self.kind == "calls":
            return hidden * (1 + 0.1 * self.calls)
        elif self.kind == "running":
            self.mean = hidden.mean(0) if self.mean is None else 0.9 * self.mean + 0.1 * hidden.mean(0)
            return hidden - self.mean
        elif self.kind == "late" and self.calls > 3:
            return hidden * self.calls
        return hidden


class Metric:
    """Keeps something from call to call, in one of many ways."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls, self.right, self.seen = kind, 0, 0, 0
        self.first: torch.Tensor | None = None
        self.last = 0.0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        self.calls += 1
        value = (output.argmax(1) == target).float().mean()
        if self.kind == "loss":
            return F.cross_entropy(output, target), len(target)
        if self.kind == "noise":
            return value + torch.rand(())
        if self.kind == "running mean":
            self.right, self.seen = self.right + int((output.argmax(1) == target).sum()), self.seen + len(target)
            return self.right / self.seen
        if self.kind in ("first median", "constants"):
            if self.first is None:
                self.first = output.median() if self.kind == "first median" else torch.tensor(0.1)
            return (output > self.first).float().mean()
        if self.kind == "calls" or (self.kind == "late" and self.calls > 2):
            return value / self.calls
        if self.kind == "last value":
            self.last, before = float(value), self.last
            return 0.5 * (self.last + before)
        return value


class Sums:
    """A metric object; honest, or one that counts its calls and is not put back."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls = kind, [0]
        self.reset()

    def __deepcopy__(self, memo: Any) -> Sums:
        other = Sums(self.kind)
        other.calls, other.right, other.seen = self.calls, self.right, self.seen
        return other

    def reset(self) -> None:
        self.right, self.seen = 0, 0

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.calls[0] += 1
        self.right += int((output.argmax(1) == target).sum())
        self.seen += len(target) + (self.kind == "object with calls") * self.calls[0]

    def merge_state(self, other: Sums) -> None:
        self.right, self.seen = self.right + other.right, self.seen + other.seen

    def compute(self) -> float:
        return self.right / self.seen


def metric_of(kind: str) -> Any:
    if kind == "whole":
        return phalanx.whole(lambda output, target: float((output.argmax(1) == target).float().mean()))
    return Sums(kind) if kind.startswith("object") else Metric(kind)


def told(result: phalanx.Result) -> tuple[Any, ...]:
    """All that can be seen of a run, as values to compare."""
    weights = [{} if result.best is None else result.best.weights, result.averaged or {}]
    return (
        result.digest,
        result.stopped_early,
        [(item.steps, repr(item.value), item.name) for item in result.metric_history],
        [{name: value.numpy().tobytes() for name, value in each.items()} for each in weights],
    )


def keeping(rng: random.Random) -> str | None:
    """One job in all ways to run it; what is wrong with the outcomes."""
    honest = rng.random() < 0.4
    model, kind = rng.choice(HONEST_MODELS), rng.choice(HONEST_METRICS)
    if not honest and rng.random() < 0.5:
        model = rng.choice(KEEPING_MODELS)
    elif not honest:
        kind = rng.choice(KEEPING_METRICS)
    goes_by = rng.choice(["schedule", "stopping", "best", "nothing"])
    size, averages, predicts = rng.choice([8, 16, 20, 35, 70, 256]), rng.random() < 0.3, rng.random() < 0.5
    outcomes: dict[str, Any] = {}
    for options in WAYS:
        plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.3)
        changes = {"scheduler": plateau, "schedule_every": "epoch", "schedule_on": "m"} if goes_by == "schedule" else {}
        recipe = phalanx.Recipe(
            functools.partial(Model, model),
            (X, Y),
            F.cross_entropy,
            replicas=4,
            batch_size=32,
            epochs=4,
            lr=0.05,
            **changes,
        )
        callbacks: list[Any] = [EMA(0.5)] * averages
        callbacks += [EarlyStopping("m", patience=2, mode="min")] * (goes_by == "stopping")
        callbacks += [SaveBest("m", mode="min")] * (goes_by == "best")
        evaluation = phalanx.Evaluation({"m": metric_of(kind)}, (SEEN, TARGETS), batch_size=size)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                with recipe.start(evaluation=evaluation, callbacks=callbacks, progress=False, **options) as run:
                    run.finish()
                    output = run.predict(SEEN, batch_size=size).numpy().tobytes() if predicts else b""
                outcome: Any = (*told(run.result()), output)
            except phalanx.StateError as error:
                outcome = "refused" if goes_by != "nothing" else f"refused, though nothing goes by it: {error}"
        words = [str(item.message) for item in warned]
        if any("came to something else" not in text for text in words):
            return f"{options}: another warning: {words}"
        outcomes[str(options)] = "warned" if words and outcome != "refused" else outcome
    if honest and any(isinstance(outcome, str) for outcome in outcomes.values()):
        which = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
        return f"{model}, {kind}, {goes_by}, chunks of {size}: honest code was {which}"
    ended = {repr(outcome) for outcome in outcomes.values() if not isinstance(outcome, str)}
    if len(ended) > 1 or any("though" in outcome for outcome in outcomes.values() if isinstance(outcome, str)):
        shown = {name: outcome if isinstance(outcome, str) else outcome[0][:8] for name, outcome in outcomes.items()}
        return f"{model}, {kind}, {goes_by}, chunks of {size}: {shown}"
    return None


ARMS: dict[str, Callable[[random.Random], str | None]] = {"code that keeps state in evaluations": keeping}
