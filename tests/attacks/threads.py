"""Runs in threads of one process, inline, measured or with workers, beside steps by hand and evaluations."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

import phalanx
from phalanx import collectives, manual
from tests.attacks.interrupts import REPLICAS, Net, X, Y, metric, slow_loss, surroundings_kept

OPTIONS: tuple[dict[str, object], ...] = (
    {"engine": "inline"},
    {"engine": "inline"},
    {"workers": "auto"},
    {"engine": "processes", "workers": 2},
)


def recipe(seed: int, steps: int) -> phalanx.Recipe:
    loss_fn = functools.partial(slow_loss, 0.0)
    return phalanx.Recipe(
        functools.partial(Net, "autocast"), (X, Y), loss_fn, replicas=REPLICAS, batch_size=12, seed=seed, steps=steps
    )


@functools.cache
def digest_of(seed: int, steps: int) -> str:
    return recipe(seed, steps).train(engine="inline", progress=False).digest


def together(rng: random.Random) -> str | None:
    """Two to five runs at once, while another thread steps by hand and sums."""
    jobs = [(rng.randrange(8), rng.choice([5, 40, 150]), rng.choice(OPTIONS)) for _ in range(rng.randrange(2, 6))]
    due = [digest_of(seed, steps) for seed, steps, _ in jobs]
    findings: list[str] = []
    over = threading.Event()
    model = Net("plain")
    model.dropout.p = 0.0  # steps by hand draw from the caller's generators, which then are not as before
    replicas = manual.replicate(model, ["cpu", "cpu"])
    with surroundings_kept(findings):
        other = threading.Thread(target=_by_hand, args=[over, replicas])
        other.start()
        with ThreadPoolExecutor(len(jobs)) as pool:
            digests = list(pool.map(lambda job: _train(*job, rng.random() < 0.5), jobs))
        over.set()
        other.join()
    findings += [
        f"{job} in threads ended in another digest" for job, a, b in zip(jobs, due, digests, strict=True) if a != b
    ]
    return "; ".join(findings) or None


def _train(seed: int, steps: int, options: dict[str, object], held: bool) -> str:
    if not held:
        return recipe(seed, steps).train(progress=False, **options).digest
    with recipe(seed, steps).start(progress=False, **options) as run:
        for report in run:
            if report.step % 20 == 3:
                run.evaluate(metric, (X, Y), batch_size=16)
        return run.result().digest


def _by_hand(over: threading.Event, replicas: list[torch.nn.Module]) -> None:
    optimizers = [torch.optim.SGD(replica.parameters(), lr=1e-3) for replica in replicas]
    while not over.is_set():
        manual.data_parallel_step(replicas, optimizers, (X, Y), F.mse_loss)
        collectives.all_reduce([torch.ones(100) for _ in range(3)])


ARMS: dict[str, Callable[[random.Random], str | None]] = {"runs in threads": together}
