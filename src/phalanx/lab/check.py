"""Does a recipe compute the same again: a few steps are trained in several ways, and ``diff`` compares the runs.

Without devices: twice in this process, in a new one with another hash seed, with two workers and with one per replica.
With devices: twice on the first of them, on two, and on all; once more without asking for deterministic kernels, to
tell what those cost.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.definition import checks
from phalanx.errors import PhalanxError, StateError, UsageError, safe_str
from phalanx.frameworks import registry
from phalanx.proof.diff import diff
from phalanx.proof.verify import DIFFERENT, SAME, UNKNOWN
from phalanx.recipe import Recipe
from phalanx.surroundings import system

HASH_SEED = "4711"  # of the new process: sets and dicts of text come in another order there than here
DETERMINISTIC = "deterministic"  # what torch's error about an operation without such a kernel contains
FIRST, AGAIN, NEW = "done in this process", "done again in this process", "done again in a new process"
ANY = "done with any kernels"
CURES = {
    AGAIN: "something draws from a generator that is not seeded, or reads a clock or memory that nobody wrote",
    NEW: "something follows from the order of a set, from hash() of a text, from a process id or a listing of files",
}
OTHERWISE = (
    f"something follows from what ran before in the same process: keep no state outside buffers; or {CURES[NEW]}"
)


@dataclass(frozen=True)
class Row:
    """One way to train, and what came of it.

    Attributes
    ----------
    what : str
    same : bool or None
        None: it could not be told.
    told : str
        Where the run differs first from that of the first row, or the error with which it ended; empty if neither.
    digest : str or None
    seconds : float or None
        Of a step: the median of the second half.
    """

    what: str
    same: bool | None
    told: str = ""
    digest: str | None = None
    seconds: float | None = None


def check(
    recipe: Recipe, file: str | None = None, devices: Sequence[str] = (), steps: int = 5, arguments: Sequence[str] = (),
    evaluation: Any = None,
) -> Iterator[Row]:  # fmt: skip
    """Train a recipe for ``steps`` steps in each way; yields each row as soon as it is done.

    Parameters
    ----------
    recipe : Recipe
    file : str, optional
        ``FILE:NAME`` where it is, for the new process.
    devices : sequence of str
        As ``Recipe.train`` takes them; a kind alone means all that are visible, at most R.
    steps : int
    arguments : sequence of str
        As in ``lr=0.01``, if ``NAME`` is a function.
    evaluation : Evaluation, optional
        On which a schedule may depend.

    Raises
    ------
    UsageError
        The recipe has no data, or a device cannot be used.
    """
    checks.integer("--steps", steps, least=1)
    if recipe.data is None:
        raise UsageError("the recipe has data=None, so there is nothing to train on; check one that has data")
    recipe = dataclasses.replace(recipe, steps=steps, epochs=None)
    job = (str(file), *arguments)
    named = registry.whose(devices).spelled(devices, recipe.replicas) if devices else ()
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        first = pathlib.Path(folder, FIRST)
        for what, options in _ways(recipe, file, named, evaluation):
            run_dir = pathlib.Path(folder, what)
            try:
                row = trained(recipe, what, run_dir, **options) if options else _elsewhere(what, run_dir, job, steps)
            except PhalanxError as error:
                if isinstance(error, UsageError) and DETERMINISTIC not in str(error):
                    raise
                reason = safe_str(error.__cause__ or error).strip().splitlines()[0]
                row = Row(what, None, f"{type(error).__name__}: {reason}")
            if what == ANY:  # nothing was promised of it
                row = dataclasses.replace(row, digest="not compared")
            elif row.same is not None and run_dir != first:
                row = _compared(recipe, row, first, run_dir)
            yield row


def trained(recipe: Recipe, what: str, run_dir: pathlib.Path, **options: Any) -> Row:
    """The row of a way in which a recipe was trained, before it is compared.

    A run in which a replica gave two different values is done again, so that ``diff`` can say where.
    """
    try:
        with recipe.start(run_dir=run_dir, chain="every", progress=False, **options) as run:
            seconds = [report.seconds for report in run]
            result = run.result()
    except StateError as error:
        shutil.rmtree(run_dir)
        with warnings.catch_warnings(action="ignore"):
            row = trained(recipe, what, run_dir, **options, nondeterministic="allow")
        return dataclasses.replace(row, same=False, told=str(error))
    return Row(what, True, "", result.digest, statistics.median(seconds[len(seconds) // 2 :]))


def verdict(rows: Sequence[Row]) -> int:
    """The exit status: ``SAME``, ``DIFFERENT`` or ``UNKNOWN``."""
    outcomes = {row.same for row in rows}
    return DIFFERENT if False in outcomes else UNKNOWN if None in outcomes else SAME


def circumstances(devices: Sequence[str], replicas: int) -> dict[str, str]:
    """What the bits may depend on besides the recipe."""
    facts = {"machine": f"{platform.system()} {platform.machine()}", "python": platform.python_version()}
    facts |= {name: str(value) for name, value in registry.recorded_environment().items()}
    if not devices:
        return facts
    framework = registry.whose(devices)
    names = framework.spelled(devices, replicas)
    facts |= framework.facts(names)
    if len(names) < 2 or not framework.forks:
        return facts
    from phalanx.lab.timing import measured  # loads what speaks to networks

    return facts | measured(names)


def _ways(
    recipe: Recipe, file: str | None, devices: Sequence[str], evaluation: Any
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The name of each way, and its options of ``train``; no options stand for a new process."""
    evaluated = {"evaluation": evaluation}
    alone = {"engine": "inline", **evaluated} | ({"devices": devices[:1]} if devices else {})
    yield FIRST, alone
    yield AGAIN, alone
    if devices:
        for count in sorted({min(2, len(devices)), len(devices)} - {1}):
            yield f"done on {count} devices", {"devices": devices[:count], **evaluated}
        if not devices[0].startswith("cpu"):
            yield ANY, {**alone, "nondeterministic": "allow"}
        return
    if file is not None:
        yield NEW, {}
    for count in sorted({min(2, recipe.replicas), recipe.replicas} - {1}) if system.has_workers() else ():
        yield f"done by {count} workers", {"engine": "processes", "workers": count, **evaluated}


def _elsewhere(what: str, run_dir: pathlib.Path, job: Sequence[str], steps: int) -> Row:
    """Trained in a new interpreter with another hash seed."""
    command = [sys.executable, "-m", "phalanx", "check", *job, "--steps", str(steps), "--into", str(run_dir)]
    environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return Row(what, None, f"it ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return Row(what, True, "", done.stdout.split()[-1])


def _compared(recipe: Recipe, row: Row, first: pathlib.Path, run_dir: pathlib.Path) -> Row:
    """The row with the outcome of ``diff``."""
    try:
        difference = diff(first, run_dir, recipes=(recipe, recipe), operations=True)
    except PhalanxError as error:  # the first one ended with an error
        return dataclasses.replace(row, same=None, told=str(error))
    text = f"{difference}".replace(f"{first.parent}{os.sep}", "") + f"\n  {CURES.get(row.what, OTHERWISE)}"
    return row if difference is None else dataclasses.replace(row, same=False, told=text)
