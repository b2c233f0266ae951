"""Does a recipe compute the same twice: in this process, in a new one, and with any number of workers.

Every stage of the first step is done again, and the first thing that is another is named, with the usual cures.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from phalanx.definition.data import Columns
from phalanx.definition.digest import hashed
from phalanx.definition.fields import Definition
from phalanx.errors import PhalanxError, UsageError
from phalanx.frameworks.registry import nondeterministic
from phalanx.proof.compare.diff import diff
from phalanx.proof.compare.recompute import computed
from phalanx.proof.compare.values import flat
from phalanx.proof.instant import Instant
from phalanx.recipe import Recipe
from phalanx.seams.snapshots import Tensor

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit statuses
HASH_SEED = "4711"  # of the new process: sets and dicts of text come in another order there than here
ALONE = "done without writing to weights"
CURES = {
    "model": "draw initial values from global generators, which are seeded before make_model; walk over no set",
    "samples": "let the dataset draw from global generators, or keep its own in an attribute; read no clock,"
    " and sort what comes from a set or a listing of files",
    "batch": "collate in the order of the samples that are given; sort sets",
    "forward": "draw from the library's generators, which are seeded for every replica; keep no state outside buffers;"
    " use no clock, process id or hash() of text",
    "loss": "the same as for forward: no clock, no process id, no hash() of text, no state of its own",
    "gradient": "hooks and autograd functions must compute the same twice; scatter and index_add over threads may not",
    "buffer": "write buffers from what forward computes only",
    "update": "an optimizer must follow from gradients and its own state",
}  # fmt: skip


class Seen(NamedTuple):
    """One thing that a step computes: in which stage, what, its hash, and the line of user code."""

    stage: str
    name: str
    content: str
    line: str = ""


@dataclass(frozen=True)
class Finding:
    """What came of one way of doing it again.

    Attributes
    ----------
    what : str
    same : bool or None
        None: it could not be told.
    told : str
        What was first another; empty if nothing was.
    """

    what: str
    same: bool | None
    told: str = ""


def stable(recipe: Recipe, file: str | None = None, steps: int = 5) -> Iterator[Finding]:
    """Do the first step again in several ways; each finding as soon as it is there.

    Parameters
    ----------
    recipe : Recipe
    file : str, optional
        ``FILE:NAME`` where it is, for a new process with another hash seed.
    steps : int
        How many are trained with W = 1, 2 and R.

    Raises
    ------
    UsageError
        The recipe has no data.
    """
    if recipe.data is None:
        raise UsageError("the recipe has data=None, so there is nothing to train on; check one that has data")
    first = traced(recipe)
    yield _compared("done again in this process", first, traced(recipe))
    if file is not None:
        yield _elsewhere(first, file)
    yield _left_alone(recipe)
    yield from _workers(replace(recipe, steps=steps, epochs=None))
    changed = outside(recipe)
    told = (
        f"forward changed {', '.join(changed)}: what it computes from that depends on what ran before"
        if changed
        else ""
    )
    yield Finding("state outside parameters and buffers", not changed, told)
    names = nondeterministic(lambda: traced(recipe, operations=False))
    yield Finding("operations that are called nondeterministic", not names, ", ".join(names))


def traced(recipe: Definition, *, operations: bool = True) -> list[Seen]:
    """Everything that the first step computes, in order, as hashes."""
    with Instant(recipe) as instant:
        seen = [Seen("model", name, leaf) for name, leaf in instant.leaves.items()]
        for replica, share in enumerate(instant.shares()):
            if not len(share.samples):
                continue
            seen += _read(recipe, share.samples)
            for told in computed(instant, replica, operations=operations):
                content = _hash({**told.given, **told.values})
                seen.append(Seen(told.phase, f"{told.name or told.phase} of replica {replica}", content, told.line))
        instant.advance()
        return seen + [Seen("update", name, leaf) for name, leaf in instant.leaves.items()]


def outside(recipe: Definition) -> list[str]:
    """Attributes of modules that a replica's forward pass changes, though they are no parameters or buffers."""
    with Instant(recipe) as instant:
        replica = next(number for number, share in enumerate(instant.shares()) if len(share.samples))
        before = _attributes(instant.model)
        instant.replica(replica)
        after = _attributes(instant.model)
    return [name for name, content in after.items() if before.get(name) != content]


def _left_alone(recipe: Definition) -> Finding:
    """Whether a replica leaves weights and buffers as they were before it: others start from the same."""
    with Instant(recipe) as instant:
        before = instant.leaves
        shares = instant.shares() if recipe.replicas > 1 else []  # a lone one may write
        for replica, share in enumerate(shares):
            if len(share.samples):
                instant.replica(replica)
                written = [name for name, leaf in instant.leaves.items() if leaf != before.get(name)]
                if written:
                    why = (
                        f"replica {replica} wrote {', '.join(written)} in forward, loss or a hook, maybe through .data"
                    )
                    return Finding(ALONE, False, f"{why}; write what forward updates into a buffer")
    return Finding(ALONE, True)


def verdict(findings: Sequence[Finding]) -> int:
    """The exit status; what merely may depend on more than the recipe does not count."""
    compared = [finding.same for finding in findings if not finding.what.startswith(("state outside", "operations"))]
    return DIFFERENT if False in compared else UNKNOWN if None in compared else SAME


def _read(recipe: Definition, samples: Any) -> list[Seen]:
    """The samples of a share, each read by itself."""
    source = recipe.source
    if source is None or isinstance(source, Columns):
        return []
    seen: list[Seen] = []
    for index in map(int, samples):
        with recipe.plan.seeded_sample(0, index):
            seen.append(Seen("samples", f"sample {index}", _hash(flat(source.items[index], "sample"))))
    return seen


def _hash(values: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in values.items():
        sha.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        sha.update(tensor.content)
    return sha.hexdigest()[:16]


def _compared(what: str, one: Sequence[Seen], other: Sequence[Seen]) -> Finding:
    for left, right in zip(one, other, strict=False):
        if left[:3] != right[:3]:
            where = f" ({left.line})" if left.line else ""
            return Finding(what, False, f"{left.stage}: {left.name} is another{where}; {CURES[left.stage]}")
    same = len(one) == len(other)
    return Finding(what, same, "" if same else "more was computed the second time; " + CURES["forward"])


def _elsewhere(first: Sequence[Seen], file: str) -> Finding:
    """The same in a new interpreter with another hash seed."""
    what = "done again in a new process, with another hash seed"
    command = [sys.executable, "-m", "phalanx", "check", file, "--trace"]
    environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        other = [Seen(*item) for item in json.loads(done.stdout.splitlines()[-1])]
    except (ValueError, IndexError, TypeError):
        return Finding(what, None, f"it ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return _compared(what, first, other)


def _workers(recipe: Recipe) -> Iterator[Finding]:
    """A few steps with one worker, two, and one per replica."""
    counts = sorted({1, min(2, recipe.replicas), recipe.replicas})
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        runs: list[pathlib.Path] = []
        for count in counts:
            runs.append(pathlib.Path(folder) / str(count))
            what = f"{recipe.steps} steps with {count} worker{'s' * (count > 1)}"
            engine = "inline" if count == 1 else "processes"
            try:
                recipe.train(workers=count, engine=engine, run_dir=runs[-1], chain="every", progress=False)
            except PhalanxError as error:
                yield Finding(what, None, str(error.__cause__ or error).splitlines()[0])
                continue
            found = diff(runs[0], runs[-1], recipes=(recipe, recipe))
            yield Finding(what, found is None, "" if found is None else str(found).splitlines()[0])


def _attributes(model: Any) -> dict[str, str]:
    """What modules keep beside parameters, buffers and modules, by path, as hashes."""
    modules = model.named_modules() if hasattr(model, "named_modules") else ()
    return {
        f"{path}.{name}".lstrip("."): hashed([value]).hex()
        for path, module in modules
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
    }
