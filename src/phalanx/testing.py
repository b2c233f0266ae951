"""For tests of your own project: a recipe ends in the same bits, whoever computes it. Errors say where it does not."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import tempfile
from collections.abc import Sequence

from phalanx.errors import StateError
from phalanx.proof.diff import diff
from phalanx.recipe import Recipe

__all__ = ["assert_same_run"]


def assert_same_run(recipe: Recipe, workers: Sequence[int] = (1, 2, 3), kills: int = 2) -> None:
    """Train a recipe with several numbers of workers, and once more while workers are killed: all must be the same.

    Parameters
    ----------
    recipe : Recipe
        It is trained ``len(workers)`` times, and once more with kills, so give it a few steps only.
    workers : sequence of int
        A number above the recipe's ``replicas`` counts as ``replicas``.
    kills : int
        How many workers are killed, at most one after each step.

    Raises
    ------
    AssertionError
        A run differs; says where, as ``phalanx.diff`` does.
    """
    counts = [min(count, recipe.replicas) for count in workers]
    ways = {f"workers={count}": (count, 0) for count in counts}
    if kills and max(counts) > 1:
        ways[f"{kills} workers killed"] = max(counts), kills
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        runs: list[tuple[str, pathlib.Path, str]] = []
        for name, (count, killed) in ways.items():
            target = pathlib.Path(folder) / name
            try:
                runs.append((name, target, _trained(recipe, count, killed, target)))
            except StateError as error:
                raise AssertionError(f"{name}: {error}") from error
            difference = diff(runs[0][1], target, recipes=(recipe, recipe))
            if difference is not None or runs[0][2] != runs[-1][2]:
                reason = difference or "the digests differ, though all that was noted of the steps is the same"
                text = str(reason).replace(f"{folder}{os.sep}", "")
                raise AssertionError(f"{runs[0][0]} and {name} are not the same run:\n{text}")


def _trained(recipe: Recipe, workers: int, kills: int, target: pathlib.Path) -> str:
    """Train, while a worker is killed after each of so many steps; returns the digest."""
    engine = "inline" if workers == 1 else "processes"
    with recipe.start(workers=workers, engine=engine, run_dir=target, chain="every", progress=False) as run:
        for number, _ in enumerate(run):
            if number < kills and run.worker_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(run.worker_pids[number % len(run.worker_pids)], signal.SIGKILL)
        return run.result().digest
