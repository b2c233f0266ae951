"""Callbacks, and loops around a run, that change or only log: one answer for all engines, or one refusal.

A random recipe reads values that lie in attributes, closures, globals, containers, partials, slots and datasets. Random
callbacks change one of them after some step, write the same value anew, or keep records in the same objects under names
that the recipe's code does not say. What must hold: a change of what is read is refused by all engines, inline, workers
and auto, before the same step and by the same name; without one, all end in the same digest, losses and predictions,
and nobody is refused or warned.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

import phalanx
from phalanx.engines import selection
from phalanx.frameworks.registry import open_framework

ENGINES: dict[str, dict[str, Any]] = {"inline": {"engine": "inline"}, "workers": {"workers": 2}, "auto": {}}
SAMPLES, STEPS = 24, 12
STATE: dict[str, Any] = {"factors": [1.0, 2.0]}
FACTOR = 1.0
Change = Callable[[Any], None]


def columns() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


class Record:
    """What callbacks keep, beside what the recipe's code reads."""

    def __init__(self) -> None:
        self.losses, self.begun, self.best, self.count, self.recent = [], 0.0, 9.0, 0, deque(maxlen=3)

    def note(self, report: Any) -> None:
        """Keep a report; nothing of it is read by a step."""
        self.losses.append(report.loss)
        self.recent.append(report)
        self.begun, self.best, self.count = time.time(), min(self.best, report.loss), self.count + 1


class Loss(Record):
    """A loss that is its own record, with a weight in itself or its class, and counters of its own."""

    factor = 1.0

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.calls, self.cache = 0, {}
        self.inner: Any = Loss(depth - 1) if depth else None

    def __call__(self, output: Any, target: Any) -> Any:
        self.calls += 1
        self.cache.setdefault(len(output), self.calls)
        below = self.inner(output, target) if self.inner else 0.0
        return self.factor * F.cross_entropy(output, target) + below


class Slotted:
    """A loss without a dict."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, output: Any, target: Any) -> Any:
        return self.factor * F.cross_entropy(output, target)


class Module(torch.nn.Module):
    """A loss of modules, one of them torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.entropy, self.factor = torch.nn.CrossEntropyLoss(), 1.0

    def forward(self, output: Any, target: Any) -> Any:
        return self.factor * self.entropy(output, target)


class Rows(Record, torch.utils.data.Dataset):
    """Rows that a factor scales; keeps what it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.kept = 1.0, defaultdict(int)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = columns()
        self.kept[index] += 1
        return self.factor * x[index], y[index]


def of_global(output: Any, target: Any) -> Any:
    return FACTOR * F.cross_entropy(output, target)


def set_global(value: float) -> None:
    globals()["FACTOR"] = value


def of_state(output: Any, target: Any) -> Any:
    return STATE["factors"][0] * F.cross_entropy(output, target)


def scaled(output: Any, target: Any, options: Any) -> Any:
    return options.factor * F.cross_entropy(output, target)


def deep(rng: random.Random) -> tuple[dict[str, Any], Change, Any]:
    loss = Loss(rng.randrange(3))
    inner = loss
    while inner.inner and rng.random() < 0.6:
        inner = inner.inner
    return {"loss_fn": loss}, functools.partial(setattr, inner, "factor"), loss


def slotted(rng: random.Random) -> tuple[dict[str, Any], Change, Any]:
    loss = Slotted()
    return {"loss_fn": loss}, functools.partial(setattr, loss, "factor"), Record()


def module(rng: random.Random) -> tuple[dict[str, Any], Change, Any]:
    loss = Module()
    if rng.random() < 0.5:
        return (
            {"loss_fn": loss},
            lambda value: setattr(loss.entropy, "label_smoothing", 0.0 if value == 1 else 0.2),
            Record(),
        )
    return {"loss_fn": loss}, functools.partial(setattr, loss, "factor"), Record()


def rows(rng: random.Random) -> tuple[dict[str, Any], Change, Any]:
    data = Rows()
    kept: Any = torch.utils.data.Subset(data, range(SAMPLES)) if rng.random() < 0.4 else data
    return {"data": kept}, functools.partial(setattr, data, "factor"), data


def bound(rng: random.Random) -> tuple[dict[str, Any], Change, Any]:
    loss = Loss(0)
    return {"loss_fn": loss.__call__}, functools.partial(setattr, loss, "factor"), loss


def global_(rng: random.Random) -> tuple[dict[str, Any], Change, Any]:
    set_global(1.0)
    return {"loss_fn": of_global}, set_global, Record()


def contained(rng: random.Random) -> tuple[dict[str, Any], Change, Any]:
    STATE["factors"] = [1.0, 2.0]
    if rng.random() < 0.5:
        return {"loss_fn": of_state}, lambda value: STATE.__setitem__("factors", [value, 2.0]), Record()
    return {"loss_fn": of_state}, lambda value: STATE["factors"].__setitem__(0, value), Record()


def closed(rng: random.Random) -> tuple[dict[str, Any], Change, Any]:
    factor = 1.0

    def loss(output: Any, target: Any) -> Any:
        return factor * F.cross_entropy(output, target)

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return {"loss_fn": loss}, change, Record()


def partial(rng: random.Random) -> tuple[dict[str, Any], Change, Any]:
    options: Any = types.SimpleNamespace(factor=1.0, note="")
    return (
        {"loss_fn": functools.partial(scaled, options=options)},
        functools.partial(setattr, options, "factor"),
        Record(),
    )


def scheduled(rng: random.Random) -> tuple[dict[str, Any], Change, Any]:
    scale = [1.0]
    make = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: scale[0])
    return {"scheduler": make}, functools.partial(scale.__setitem__, 0), Record()


KINDS = [deep, slotted, module, rows, bound, global_, contained, closed, partial, scheduled]


@contextlib.contextmanager
def moving(recipe: phalanx.Recipe, engine: str) -> Iterator[None]:
    """Let an automatic engine move to workers as soon as they can start."""
    sharing = type(open_framework(recipe).sharing)
    with contextlib.ExitStack() as patches:
        if engine == "auto":
            patches.enter_context(mock.patch.object(selection, "START_SECONDS", 0.0))
            patches.enter_context(mock.patch.object(selection, "usable_cores", return_value=2))
            patches.enter_context(mock.patch.object(sharing, "moving_seconds", -1.0))
        yield


def outcome(seed: int, engine: str) -> tuple[Any, ...]:
    """What one run comes to: all that can be seen of its end, or why it was refused."""
    rng = random.Random(seed)
    fields, change, record = rng.choice(KINDS)(rng)
    changes, again = rng.random() < 0.6, rng.random() < 0.3
    at, by_hand, evaluated = rng.randrange(STEPS), rng.random() < 0.3, rng.random() < 0.3
    evaluation = phalanx.Evaluation(lambda output, target: output.sum(), columns()) if evaluated else None

    def after(report: Any) -> None:
        record.note(report)
        if again:
            change(float("1.0"))
        if changes and report.step == at:
            change(0.5)

    made = {"make_model": functools.partial(torch.nn.Linear, 4, 2), "data": columns(), "loss_fn": F.cross_entropy}
    sizes = {"replicas": 2, "batch_size": rng.choice([4, 6, 8]), "steps": STEPS, "seed": seed}
    options = {**ENGINES[engine], "evaluation": evaluation, "progress": False}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with phalanx.Recipe(**{**made, **sizes, **fields}).start(
                callbacks=[] if by_hand else [after], **options
            ) as run:
                for report in run:
                    if by_hand:
                        after(report)
                result = run.result()
                predicted = run.predict(columns()[0]).tolist() if not (changes and at == STEPS - 1) else None
            end: tuple[Any, ...] = "done", result.digest, result.loss_history, result.metric_history, predicted
        except phalanx.UsageError as error:
            end = "refused", str(error).partition(":")[0], str(error).partition(". Workers")[0][-8:]
    texts = sorted({str(warning.message)[:200] for warning in told if "code around" in str(warning.message)})
    expected = "refused" if changes and at < STEPS - 1 else "done"
    return (
        *end,
        texts,
        f"{fields} changes={changes} at={at}, expected {expected}, {end[0]}" if expected != end[0] else "",
    )


def changed(rng: random.Random) -> str | None:
    """One recipe with one callback, in three engines."""
    seed = rng.randrange(1 << 32)
    found = {engine: outcome(seed, engine) for engine in ENGINES}
    first = found["inline"]
    wrong = [f"{engine}: {end[-1]}" for engine, end in found.items() if end[-1]]
    warned = [f"{engine} warned: {end[-2]}" for engine, end in found.items() if end[-2]]
    others = [f"{engine}: {str(end)[:300]}" for engine, end in found.items() if repr(end) != repr(first)]
    return (
        "; ".join([*wrong, *warned, *others]) + f" (inline: {str(first)[:300]})" if wrong or warned or others else None
    )


ARMS = {"Callbacks that change what is read, or only log": changed}
