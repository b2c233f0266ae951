"""Attacks on what is seen: random models, views of their weights, engines, kills and changes, compared with inline."""

import functools
import json
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import phalanx
from phalanx.callbacks import EMA, Log, SaveBest
from tests.engines.test_seen import ROWS, Happens, X, Y, accuracy, certainty
from tests.hosts.worlds import started
from tests.seen import END, Seen, compare, logged
from tests.state.runs import ROOT

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda _: None,
    "rows": lambda weight: [*weight.detach()],
    "part": lambda weight: weight.detach()[1:],
    "set": lambda weight: {weight.detach()[0]},
    "transposed": lambda weight: weight.data.t(),
    "closure": lambda weight: functools.partial(torch.clone, weight.detach()[0]),
    "numpy": lambda weight: weight.detach().numpy(),
    "dlpack": lambda weight: np.from_dlpack(weight.detach()),
    "storage": lambda weight: weight.untyped_storage(),
    "copy": lambda weight: weight.detach().numpy().copy(),
}
TENSORS = ("none", "rows", "part", "set", "transposed", "closure", "copy")  # all others are for frozen weights


class Odd(nn.Module):
    """Layers of which some are frozen, each with something that looks at its weight."""

    def __init__(self, plan: list[tuple[str, bool, str]]) -> None:
        super().__init__()
        self.layers, self.views = nn.ModuleList(), []
        for kind, frozen, view in plan:
            layer: Any = nn.Linear(8, 8)
            if kind == "weight_norm":
                layer = nn.utils.parametrizations.weight_norm(layer)
            if kind == "tied" and self.layers:
                layer.weight = next(one for one in self.layers).weight if plan[0][0] != "weight_norm" else layer.weight
            layer.requires_grad_(not frozen)
            self.layers.append(layer)
            self.views.append(VIEWS[view](next(layer.parameters())))
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, view in zip(self.layers, self.views, strict=True):
            x = torch.tanh(layer(x) + 0.1 * _total(view))
        return self.head(self.drop(self.norm(x)))


def _total(view: Any) -> Any:
    if view is None:
        return 0.0
    if callable(view):
        view = view()
    if isinstance(view, torch.UntypedStorage):
        view = torch.empty(0).set_(view)
    if isinstance(view, (list, set)):
        return sum(each.sum() for each in view)
    return torch.as_tensor(np.array(view) if isinstance(view, np.ndarray) else view).sum()


def _plan(rng: random.Random) -> list[tuple[str, bool, str]]:
    plan = []
    for _ in range(rng.randint(1, 4)):
        kind, frozen = rng.choice(["linear", "weight_norm", "tied"]), rng.random() < 0.5
        plan.append((kind, frozen, rng.choice(list(VIEWS) if frozen and kind == "linear" else TENSORS)))
    if any(kind == "tied" for kind, *_ in plan):  # a tied weight is trained where one of them is
        plan = [(kind, frozen, view if view in TENSORS else "part") for kind, frozen, view in plan]
    return plan


def _changes(rng: random.Random, plan: list[tuple[str, bool, str]], steps: int) -> dict[str, dict[int, str]]:
    changes: dict[str, dict[int, str]] = {"freeze": {}, "thaw": {}}
    for number, (kind, frozen, view) in enumerate(plan):
        if kind == "linear" and view in TENSORS and all(one[0] != "tied" for one in plan) and rng.random() < 0.4:
            changes["thaw" if frozen else "freeze"][rng.randrange(steps - 1)] = f"layers.{number}.weight"
    return changes


def run_of(seed: int, *, plain: bool = False, run_dir: str | None = None, **options: Any) -> Seen:
    """A run that follows from a seed; ``plain``: inline, and nobody dies."""
    rng = random.Random(seed)
    plan, steps, replicas = _plan(rng), rng.randint(5, 14), rng.choice([2, 3, 4])
    changes = _changes(rng, plan, steps)
    kills = [(step, rng.randrange(4)) for step in range(steps - 1) if rng.random() < 0.2]
    average, best = EMA(rng.choice([0.0, 0.5, 0.9])), SaveBest("certainty", keep=rng.choice([1, 2]), mode="max")
    seen = Seen(average, best, predict=X[:5])
    recipe = phalanx.Recipe(
        functools.partial(Odd, plan), (X, Y), nn.functional.cross_entropy, replicas=replicas, steps=steps,
        batch_size=rng.choice([12, ROWS - 10]), max_norm=rng.choice([0.5, float("inf")]),
    )  # fmt: skip
    evaluation = phalanx.Evaluation([accuracy, certainty], (X, Y), batch_size=rng.choice([9, 64]), every_steps=2)
    happens = Happens([] if plain else kills, **changes)
    logs = [Log("csv")] if run_dir else []
    if plain:
        options = {"engine": "inline"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = recipe.train(
            evaluation=evaluation, callbacks=[*logs, average, best, seen, happens], progress=False, run_dir=run_dir,
            **options,
        )  # fmt: skip
    seen.rows[END] |= {"chain": str(result.chain), "log": repr(run_dir and logged(run_dir))}
    return seen


def local(rng: random.Random) -> str | None:
    """Workers that are killed, readers, devices, audits: all that is seen is as inline."""
    seed = rng.randrange(1 << 30)
    options = rng.choice([
        {"workers": 1, "engine": "processes"}, {"workers": 2}, {"workers": 2, "audit": 0.3},
        {"workers": 2, "readers": 1}, {"devices": ["cpu", "cpu"]},
    ])  # fmt: skip
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        wanted = run_of(seed, plain=True, run_dir=one)
        found = compare(run_of(seed, run_dir=other, **options), wanted)
    return f"{options}: {found[:5]} of {len(found)}" if found else None


MOVING = """
import json, sys
from tests.attacks.views import run_of
from phalanx.engines import selection
from phalanx.engines.processes.starter import WARM
from phalanx.frameworks.torch.sharing import Sharing
prepare = WARM.prepare
def waited(*given):
    prepare(*given)
    WARM.zygote()._ask({"end": 0})
selection.START_SECONDS, Sharing.moving_seconds, WARM.prepare = 0.0, -1.0, waited  # planted
selection.usable_cores = lambda: 2  # planted
if sys.argv[3] == "back":
    selection.Auto._alone = property(lambda self: -1.0, lambda self, value: None)  # planted
print(json.dumps(run_of(int(sys.argv[1]), run_dir=sys.argv[2]).rows))
"""


def moving(rng: random.Random) -> str | None:
    """A run that moves to workers, which are killed, and maybe back: all that is seen is as inline."""
    seed, way = rng.randrange(1 << 30), rng.choice(["there", "back"])
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        wanted = run_of(seed, plain=True, run_dir=one)
        command = [sys.executable, "-c", MOVING, str(seed), other, way]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        return f"{way}: status {done.returncode}: {done.stderr[-500:]}"
    found = compare(json.loads(done.stdout.splitlines()[-1]), wanted)
    return f"{way}: {found[:5]} of {len(found)}" if found else None


WORLD = """
import json, os, signal, sys
from tests.attacks.views import run_of
from tests.engines import test_seen
rank, victim, step = int(os.environ["RANK"]), {victim}, {step}
told = test_seen.Happens.step
def falls(self, report):
    told(self, report)
    if rank == victim and report.step == step:
        os.kill(os.getpid(), signal.SIGKILL)
test_seen.Happens.step = falls
seen = run_of({seed}, workers={workers}, lost_after=2.0, deadline_seconds=60.0)
print(json.dumps(seen.rows))
"""


def world(rng: random.Random) -> str | None:
    """Two processes on loopback, of which workers die, or one falls itself: what is left sees all as inline."""
    seed = rng.randrange(1 << 30)
    victim, step = rng.choice([(-1, 0), (-1, 0), (1, rng.randrange(1, 4)), (1, rng.randrange(1, 4))])
    wanted = run_of(seed, plain=True)
    code = WORLD.format(seed=seed, victim=victim, step=step, workers=2)
    processes = started(code, 2, {}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        told = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, (out, err)) in enumerate(zip(processes, told, strict=True)):
        if rank == victim and process.returncode == -signal.SIGKILL:
            continue
        if process.returncode:
            return f"rank {rank} (victim {victim}) ended with {process.returncode}: {err[-500:]}"
        found = compare(json.loads(out.splitlines()[-1]), wanted)
        if found:
            return f"rank {rank} (victim {victim} at {step}): {found[:5]} of {len(found)}"
    return None


ARMS: dict[str, Callable[[random.Random], str | None]] = {
    "seen by observers": local,
    "seen in a run that moves": moving,
    "seen over hosts": world,
}
