"""Runs with everything that depends on a step being told whole, broken off anywhere: what is told must not differ.

A run with a run_dir, EMA, SaveBest, Log, EarlyStopping and schedule_on is broken off by Ctrl-C at any instant, or by a
metric or callback that raises once; then it goes on in the process, or is called for again. What must hold: digest,
chain, losses, metrics, averages, best weights and log of an undisturbed run; within a process each callback hears of
each step once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import phalanx
from tests.broken_off import PLACES, Job, press, refuse, undisturbed

WAYS: list[dict[str, Any]] = [{"engine": "inline"}, {"workers": 2}, {"workers": "auto"}]
BROKEN = (OSError, KeyboardInterrupt, phalanx.WorkerError)


@functools.cache
def whole() -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return undisturbed(pathlib.Path(folder), engine="inline")


@functools.cache
def seconds_of(way: int) -> float:
    """How long an undisturbed run takes, as a range to press Ctrl-C in."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        undisturbed(pathlib.Path(folder), **WAYS[way])
        return time.monotonic() - began


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str | None:
    other = [name for name in expected if found[name] != expected[name]]
    return f"{', '.join(other)} differ" if other else None


def gone_on(job: Job, **options: Any) -> str | None:
    """Finish a run however often it is broken off, in this process; what differs."""
    with job.begin(**options) as run:
        while True:
            try:
                run.finish()
                break
            except BROKEN:
                continue
    return difference(job.end(run), whole()[0]) or difference(job.told(), whole()[1])


def called_again(job: Job, fresh: Callable[[], Job], **options: Any) -> str | None:
    """Call for a run until it is done, in its directory; what differs."""
    while True:
        try:
            with job.begin(**options) as run:
                run.finish()
            return difference(job.end(run), whole()[0])
        except BROKEN:
            job = fresh()


def pressed(rng: random.Random, again: bool) -> str | None:
    """One Ctrl-C at any instant of the run, from this process or another thread of it."""
    way = rng.randrange(len(WAYS))
    wait, armed = rng.uniform(0, seconds_of(way)), [True]
    before = signal.signal(signal.SIGINT, lambda number, frame: _raise() if armed else None)
    stop = threading.Event()

    def one() -> None:
        if not stop.wait(wait):
            os.kill(os.getpid(), signal.SIGINT)

    whole()
    thread = threading.Thread(target=one)
    try:
        with tempfile.TemporaryDirectory() as folder:
            job, fresh = Job(pathlib.Path(folder)), functools.partial(Job, pathlib.Path(folder))
            thread.start()
            try:
                found = called_again(job, fresh, **WAYS[way]) if again else gone_on(job, **WAYS[way])
            except KeyboardInterrupt:  # before the run was there, or after its end
                found = None
            armed.clear()
            stop.set()
            thread.join()
            return None if found is None else f"{WAYS[way]}, Ctrl-C after {wait:.4f} s: {found}"
    finally:
        armed.clear()
        stop.set()
        signal.signal(signal.SIGINT, before)


def _raise() -> None:
    raise KeyboardInterrupt


def placed(rng: random.Random, again: bool) -> str | None:
    """A metric, callback or loss raises, or presses Ctrl-C, at its n-th call."""
    options, place, act, number = (
        rng.choice(WAYS),
        rng.choice(PLACES),
        rng.choice([refuse, press]),
        rng.randrange(1, 30),
    )
    whole()
    with tempfile.TemporaryDirectory() as folder:
        fresh = functools.partial(Job, pathlib.Path(folder), place, act, number)
        found = called_again(fresh(), fresh, **options) if again else gone_on(fresh(), **options)
    return None if found is None else f"{options}, {act.__name__} in call {number} of {place}: {found}"


# User code that keeps state

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(64, 1, generator=torch.Generator().manual_seed(1))


class Keeping(nn.Module):
    """Keeps something from call to call, in one of many ways; from its ``since``-th call on it matters."""

    def __init__(self, kind: str, since: int) -> None:
        super().__init__()
        self.kind, self.since, self.calls, self.tau = kind, since, 0, 1.0
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))
        self.running = torch.zeros(8)
        self.queue: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.body(x))
        self.calls += 1
        late = self.calls > self.since
        if self.kind == "buffer":
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
            hidden = hidden - self.mean
        elif self.kind == "tau" and late:
            self.tau *= 0.9
            hidden = hidden * self.tau
        elif self.kind == "running":
            self.running = self.running * 0.9 + hidden.detach().mean(0) * 0.1
            hidden = hidden - self.running
        elif self.kind == "queue":
            hidden = hidden + sum(self.queue, torch.zeros(8)) * (0.1 * late)
            self.queue = [*self.queue, hidden.detach().mean(0)][-4:]
        elif self.kind == "counter" and late:
            hidden = hidden * self.calls
        elif self.kind == "attention":
            self.seen = hidden.detach()
        return self.head(hidden)


HONEST = ("buffer", "attention")
KINDS = (*HONEST, "tau", "running", "queue", "counter")


def keeping(rng: random.Random) -> str | None:
    """A model that keeps state ends in one digest in all ways to run it, or is refused; an honest one is never refused.

    In workers a state may never come to matter that does so inline, as each of them makes fewer calls: then it is right
    that some ways refuse and others end, as long as all that end agree.
    """
    kind, since, steps = rng.choice(KINDS), rng.choice([0, 3, 30]), rng.choice([12, 130])
    outcomes: dict[str, str] = {}
    for options in [{"engine": "inline"}, {"workers": 2}, {"workers": 3}, {"workers": "auto"}]:
        recipe = phalanx.Recipe(
            functools.partial(Keeping, kind, since),
            (X, Y),
            nn.functional.mse_loss,
            replicas=4,
            batch_size=16,
            steps=steps,
        )
        try:
            outcomes[str(options)] = recipe.train(progress=False, **options).digest
        except phalanx.PhalanxError as error:
            outcomes[str(options)] = "refused" if "current_step" in str(error) else f"{type(error).__name__}: {error}"
    ended = set(outcomes.values()) - {"refused"}
    refused = "refused" in outcomes.values()
    if len(ended) <= 1 and not any("Error" in outcome for outcome in ended) and not (refused and kind in HONEST):
        return None
    return f"{kind} since {since}, {steps} steps: {outcomes}"


ARMS: dict[str, Callable[[random.Random], str | None]] = {
    "Ctrl-C anywhere, then go on": lambda rng: pressed(rng, again=False),
    "Ctrl-C anywhere, then the same call": lambda rng: pressed(rng, again=True),
    "user code that raises once, then go on": lambda rng: placed(rng, again=False),
    "user code that raises once, then the same call": lambda rng: placed(rng, again=True),
    "user code that keeps state": keeping,
}
with contextlib.suppress(RuntimeError):
    torch.set_num_threads(1)
