"""For tests of your own project: a recipe ends in the same bits, whoever computes it. Errors say where it does not."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import tempfile
from collections.abc import Sequence
from typing import Any

from phalanx.proof.diff import diff
from phalanx.recipe import Recipe

__all__ = ["assert_equal_runs", "assert_same_run"]


def assert_same_run(recipe: Recipe, workers: Sequence[int] = (1, 2, 3), kills: int = 2) -> None:
    """Train a recipe with several numbers of workers, and once more while workers are killed: all must be the same.

    Parameters
    ----------
    recipe : Recipe
        It is trained ``len(workers)`` times or once more, so give it a few steps only.
    workers : sequence of int
        More than there are replicas count as that many.
    kills : int
        How many workers are killed, at most one after each step.

    Raises
    ------
    AssertionError
        A run differs; says where, as ``phalanx.diff`` does.
    """
    counts = list(dict.fromkeys(min(count, recipe.replicas) for count in workers))
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        runs: list[tuple[str, pathlib.Path, str]] = []
        for count in counts:
            target = pathlib.Path(folder) / f"workers-{count}"
            engine = "inline" if count == 1 else "processes"
            result = recipe.train(workers=count, engine=engine, run_dir=target, chain="every", progress=False)
            runs.append((f"workers={count}", target, result.digest))
        if kills and max(counts) > 1:
            target = pathlib.Path(folder) / "killed"
            runs.append((f"{kills} workers killed", target, _killed(recipe, max(counts), kills, target)))
        for name, target, digest in runs[1:]:
            _check(recipe, runs[0], (name, target, digest))


def assert_equal_runs(a: Any, b: Any) -> None:
    """Two runs are the same, as far as both say anything: directories, snapshots, chains, results, tensors.

    Raises
    ------
    AssertionError
        They differ; says where, as ``phalanx.diff`` does.
    """
    found = diff(a, b)
    if found is not None:
        raise AssertionError(str(found))


def _killed(recipe: Recipe, workers: int, kills: int, target: pathlib.Path) -> str:
    """Train while a worker is killed after each of the first steps; returns the digest."""
    with recipe.start(workers=workers, engine="processes", run_dir=target, chain="every", progress=False) as run:
        for number, _ in enumerate(run):
            if number < kills and run.worker_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(run.worker_pids[number % len(run.worker_pids)], signal.SIGKILL)
        return run.result().digest


def _check(recipe: Recipe, first: tuple[str, pathlib.Path, str], other: tuple[str, pathlib.Path, str]) -> None:
    found = diff(first[1], other[1], recipes=(recipe, recipe))
    if found is not None or first[2] != other[2]:
        told = found or "the digests differ, though all that was noted of the steps is the same"
        raise AssertionError(f"A ({first[0]}) and B ({other[0]}) are not the same run:\n{told}")
