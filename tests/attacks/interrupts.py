"""Ctrl-C at random moments, again and again, in everything that a run can be asked to do; then the run goes on.

What must hold after each storm: the digest of an undisturbed run, the modes of every module, and generators, thread
count, autograd modes and the SIGINT handler as they were before.
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
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import phalanx

STEPS = 24
REPLICAS = 4
LONGEST_SECONDS = 8.0  # of a storm
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(48, 1, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A model with dropout and buffers, whose forward opens context managers all the time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "autocast":
            for _ in range(3):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    hidden = self.first(x)
            x = hidden.float()
        elif self.kind == "no_grad":
            for _ in range(20):
                with torch.no_grad():
                    x = x + 0.0
            x = self.first(x)
        else:
            x = self.first(x)
        return self.last(self.dropout(torch.relu(self.norm(x))))


def slow_loss(seconds: float, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if seconds:
        time.sleep(seconds)
    return F.mse_loss(output, target)


def metric(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(0.001)
    return (output - target).abs().mean()


def recipe(kind: str, steps: int = STEPS, seconds: float = 0.0) -> phalanx.Recipe:
    return phalanx.Recipe(
        functools.partial(Net, kind),
        (X, Y),
        functools.partial(slow_loss, seconds),
        replicas=REPLICAS,
        batch_size=12,
        steps=steps,
    )


@functools.cache
def digest_after(kind: str, steps: int) -> str:
    return recipe(kind, steps).train(engine="inline", progress=False).digest


@functools.cache
def metric_after(kind: str, steps: int) -> float:
    with recipe(kind, STEPS).start(engine="inline", progress=False) as run:
        while run.steps < steps:
            run.step()
        return run.evaluate(metric, (X, Y), batch_size=5)


class Storm:
    """Presses Ctrl-C at random moments while ``armed``; otherwise a late one is dropped."""

    def __init__(self, rng: random.Random, longest_gap: float, most: int = 1 << 30) -> None:
        self.armed = False
        self.pressed = 0
        self._rng = rng
        self._gap = longest_gap
        self._most = most
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._blow, daemon=True)

    def _handle(self, number: int, frame: object) -> None:
        if self.armed:
            raise KeyboardInterrupt

    def __enter__(self) -> Storm:
        self._before = signal.signal(signal.SIGINT, self._handle)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.armed = False
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)

    def _blow(self) -> None:
        while self.pressed < self._most and not self._over.wait(self._rng.uniform(0, self._gap)):
            if self.armed:
                self.pressed += 1
                os.kill(os.getpid(), signal.SIGINT)

    def attempt(self, call: Callable[[], object]) -> BaseException | None:
        """Call under fire; what was raised by Ctrl-C, if anything was."""
        try:
            self.armed = True
            call()
            self.armed = False
        except KeyboardInterrupt as error:
            self.armed = False
            return error
        finally:
            self.armed = False
        return None


@contextlib.contextmanager
def surroundings_kept(findings: list[str]) -> Iterator[None]:
    """Adds a finding for everything of this process that is not as before."""
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    before = _surroundings()
    yield
    after = _surroundings()
    findings += [f"{name} is not as before" for name in before if before[name] != after[name]]


def _surroundings() -> dict[str, object]:
    return {
        "torch's generator": torch.get_rng_state().tolist(),
        "numpy's generator": str(np.random.get_state()),
        "random's generator": random.getstate(),
        "thread count": torch.get_num_threads(),
        "gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "SIGINT handler": signal.getsignal(signal.SIGINT),
    }


def held_run(rng: random.Random, options: dict[str, object], verbs: tuple[str, ...]) -> str | None:
    """Storms over the verbs of a held run, which goes on after each Ctrl-C to the end."""
    kind, gap = rng.choice(["plain", "autocast", "no_grad"]), rng.choice([0.002, 0.01, 0.05])
    end, findings = time.monotonic() + LONGEST_SECONDS, []
    with surroundings_kept(findings), tempfile.TemporaryDirectory() as folder:
        digest_after(kind, STEPS)
        with recipe(kind).start(progress=False, **options) as run, Storm(rng, gap) as storm:
            while run.steps < STEPS:
                if time.monotonic() > end:
                    storm._most = 0
                verb = rng.choice(verbs)
                calls = {
                    "iterate": lambda: [report for report, _ in zip(run, range(3), strict=False)],
                    "step": run.step,
                    "finish": run.finish,
                    "evaluate": lambda: run.evaluate(metric, (X, Y), batch_size=5),
                    "result": run.result,
                    "save": lambda: run.save(pathlib.Path(folder) / str(rng.random())),
                }
                try:
                    storm.attempt(calls[verb])
                except phalanx.RunError as error:  # a replica took half a second: another Ctrl-C breaks it off, here
                    if "broke off" not in str(error) or run.result().digest != digest_after(kind, run.steps):
                        raise
                    return "; ".join(findings) or None
                if not all(module.training for module in run.result().model.modules()):
                    findings.append(f"after {verb}, a module is in eval mode")
            result = run.result()
            for item in run.metric_history:
                if item.value != metric_after(kind, item.steps):
                    findings.append(f"an evaluation after {item.steps} steps gave {item.value}")
        if result.digest != digest_after(kind, STEPS):
            findings.append(f"{kind}: the digest is another after {storm.pressed} times Ctrl-C")
    return "; ".join(findings) or None


def in_train(rng: random.Random, options: dict[str, object], presses: int) -> str | None:
    """Ctrl-C, once or twice shortly after another, in ``train()``: the error carries the state of a whole step."""
    kind, findings, seen = rng.choice(["plain", "autocast"]), [], []
    wait, armed = rng.uniform(0, 0.25), [True]

    def handle(number: int, frame: object) -> None:
        if armed:
            raise KeyboardInterrupt

    def press() -> None:
        for number in range(presses):
            time.sleep(rng.choice([0.2, 0.02, 0.0]) if number else wait)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    with surroundings_kept(findings):
        thread = threading.Thread(target=press)

        def watch(report: phalanx.StepReport) -> None:
            if not seen:
                thread.start()
            seen.append(report.step)

        error = None
        try:
            recipe(kind, 2000, 0.001).train(progress=False, callbacks=[watch], **options)
        except KeyboardInterrupt as caught:
            error = caught
        armed.clear()
        thread.join()
        result = getattr(error, "result", None)
        if error is not None and result is None:
            findings.append(f"error.result is None after {len(seen)} steps: {error!r}")
        if result is not None and result.digest != digest_after(kind, result.steps):
            findings.append(f"error.result after {result.steps} steps has another digest")
    signal.signal(signal.SIGINT, before)
    return "; ".join(findings) or None


class Ended(Exception):
    """Another Ctrl-C ended the run."""


def unless_ended(call: Callable[[], object]) -> None:
    """Call; a run that refuses to go on after a second Ctrl-C is no finding."""
    try:
        call()
    except phalanx.RunError as error:
        if "another Ctrl-C broke off" not in str(error):
            raise
        raise Ended from error


def handing_over(rng: random.Random) -> str | None:
    """Ctrl-C around the moment at which "auto" hands over to workers; the run goes on to the same digest.

    A second one in the same step may end it, in words; then it has the digest of the steps that were done.
    """
    findings: list[str] = []
    steps = 300
    with surroundings_kept(findings):
        with recipe("plain", steps, 0.002).start(workers="auto", progress=False) as run:
            most = rng.randrange(1, 12)
            with Storm(rng, rng.choice([0.05, 0.3]), most=most) as storm, contextlib.suppress(Ended):
                while run.steps < steps:
                    storm.attempt(functools.partial(unless_ended, run.finish))
            result = run.result()
        if result.digest != digest_after("plain", result.steps):
            findings.append(f"the digest is another after {storm.pressed} times Ctrl-C")
    return "; ".join(findings) or None


VERBS = ("iterate", "step", "finish", "evaluate", "result", "save")
INLINE: dict[str, object] = {"engine": "inline"}
WORKERS: dict[str, object] = {"engine": "processes", "workers": 2}
ARMS: dict[str, Callable[[random.Random], str | None]] = {
    "Ctrl-C in evaluate, inline": lambda rng: held_run(rng, INLINE, ("evaluate", "evaluate", "evaluate", "step")),
    "Ctrl-C in evaluate, W = 2": lambda rng: held_run(rng, WORKERS, ("evaluate", "evaluate", "evaluate", "step")),
    "Ctrl-C while computing, inline": lambda rng: held_run(rng, INLINE, ("iterate", "step", "finish")),
    "Ctrl-C while computing, W = 2": lambda rng: held_run(rng, WORKERS, ("iterate", "step", "finish")),
    "Ctrl-C in any verb, inline": lambda rng: held_run(rng, INLINE, VERBS),
    "Ctrl-C in any verb, W = 2": lambda rng: held_run(rng, WORKERS, VERBS),
    "Ctrl-C once or twice in train, inline": lambda rng: in_train(rng, INLINE, rng.choice([1, 2])),
    "Ctrl-C once or twice in train, W = 2": lambda rng: in_train(rng, WORKERS, rng.choice([1, 2, 2, 3])),
    "Ctrl-C at the hand-over": handing_over,
}
