"""What can be compared: directories of runs, snapshots, chains, files of tensors, results and tensors in memory.

Also in what two runs' recipes and environments differ, and whether a recipe at hand is that of a run.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.checkpoint import tensors
from phalanx.checkpoint.chain import CHAIN, Links, records
from phalanx.checkpoint.chained import recall, retrained_in, tensors_of
from phalanx.checkpoint.files import is_there
from phalanx.checkpoint.snapshot import facts_of, read
from phalanx.definition.data import is_array
from phalanx.definition.described import Comparison, compare, described
from phalanx.definition.fields import Definition
from phalanx.errors import PhalanxError, SnapshotError, UsageError
from phalanx.proof.difference import taken
from phalanx.proof.instant import snapshots
from phalanx.run.result import Result
from phalanx.seams.records import Tensor, Training


@dataclass
class Side:
    """One of two sides that are compared. What it does not have is None or empty.

    Attributes
    ----------
    name : str
    folder : path or None
        Of a run, or a snapshot by itself.
    links : Links or None
    run : dict
        Description (``recipe``), ``environment`` and ``origin`` of the recipe.
    saved : dict
        Its snapshots, damaged or not, by the number of steps done; newest first.
    states : dict
        Hashes of tensors by name, by the number of steps done.
    loose : dict
        Tensors by themselves, of no known step.
    recipe : Definition or None
        The recipe, if it is at hand in this process.
    """

    name: str
    folder: pathlib.Path | None = None
    links: Links | None = None
    run: dict[str, Any] = field(default_factory=dict[str, Any])
    saved: dict[int, pathlib.Path] = field(default_factory=dict[int, pathlib.Path])
    states: dict[int, dict[str, str]] = field(default_factory=dict[int, dict[str, str]])
    loose: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    recipe: Definition | None = None

    @property
    def chain(self) -> Links:
        """Its links; a side without any is refused."""
        if self.links is None:
            raise UsageError(f"run_dir is {self.name!r}, which has no chain; give the directory of a run")
        return self.links

    def tensors(self, step: int) -> dict[str, Tensor]:
        """The tensors of the state after so many steps; empty where there is no snapshot of it.

        Raises
        ------
        SnapshotError
            It is damaged.
        """
        if step not in self.saved:
            return {}
        snapshot = read(self.saved[step])
        return tensors_of(snapshot.weights, snapshot.training)

    def close(self) -> None:
        """Close the chain."""
        if self.links is not None:
            self.links.close()


def side(target: Any, recipe: Definition | None = None) -> Side:
    """What ``target`` is, ready to be compared.

    Raises
    ------
    UsageError
        It cannot be compared.
    SnapshotError
        It is damaged.
    """
    if isinstance(target, Result):
        return Side("the result", loose={name: taken(value) for name, value in target.params.items()})
    if isinstance(target, Mapping) and all(map(is_array, target.values())):
        return Side("the tensors", loose={str(name): taken(value) for name, value in target.items()})
    if not isinstance(target, (str, os.PathLike)):
        raise UsageError(
            f"a {type(target).__name__} cannot be compared; give the directory of a run, a snapshot, a chain, a "
            "safetensors file, a result, or a dict of tensors"
        )
    path = pathlib.Path(target)
    if not is_there(path):
        raise UsageError(f"{str(path)!r} does not exist; give the directory of a run, a snapshot, a chain or a file")
    if path.is_dir():
        return _folder(path, recipe)
    if path.suffix == ".safetensors":
        return Side(str(path), loose=tensors.read_file(path))
    if path.suffix in tensors.PICKLES:
        raise UsageError(
            f"{str(path)!r} may be a pickle, which can run code when it is read, so phalanx reads none; write the "
            "tensors as a safetensors file, or compare them in Python: phalanx.diff(state_dict, other)"
        )
    return _chain(Side(str(path), recipe=recipe), path)


def _folder(path: pathlib.Path, recipe: Definition | None) -> Side:
    run = Side(str(path), path, recipe=recipe or recall(path))
    run.saved = snapshots(path)  # listed before the chain is opened, which is never older than a snapshot
    if is_there(path / CHAIN):
        _chain(run, path / CHAIN)
    elif not run.saved:
        raise UsageError(f"{str(path)!r} has neither a chain nor snapshots; give the directory of a run, or a snapshot")
    for step, folder in run.saved.items():
        with contextlib.suppress(SnapshotError):  # another difference may be found: else all are read
            facts = facts_of(folder)
            parts = [part for part in facts["hashes"].values() if isinstance(part, dict)]
            if parts:
                run.states[step] = tensors_of(parts[0], parts[1] if len(parts) > 1 else {})
            for name in ("recipe", "environment"):
                run.run.setdefault(name, facts[name])
    return run


def _chain(run: Side, path: pathlib.Path) -> Side:
    run.links = links = Links(path)
    for record in records(path, "run"):
        run.run = record | {name: section(record, name) for name in ("recipe", "environment")}
    for record in records(path, "state"):
        step = record["step"]
        with contextlib.suppress(PhalanxError, KeyError):  # steps may have been done again since, and differently
            begun = step == links.first <= len(links)
            if begun or (links.first < step <= len(links) and links.before(step) == record["link"]):
                run.states[step] = section(record, "leaves")
    return run


def section(facts: dict[str, Any], name: str) -> dict[str, Any]:
    """A dict in what a file says, which may be anything; empty if there is no such dict."""
    value = facts.get(name)
    return value if isinstance(value, dict) else {}


def different_fields(one: Side, other: Side) -> dict[str, str]:
    """Differences of recipe, environment and data, in words, by the name of the field."""
    fields: dict[str, str] = {}
    here, there = f"in {one.name}", f"in {other.name}"
    mine, theirs = (side.run.get("recipe") or {} for side in (one, other))
    with contextlib.suppress(ValueError):  # one of them is no recipe
        comparison = compare(mine, theirs, (here, there))
        for text in (*comparison.differs, *comparison.hints, *comparison.versions):
            fields.setdefault(re.split(r"[^\w]", text, maxsplit=1)[0], text)
    left, right = (side.run.get("environment") or {} for side in (one, other))
    for name in {**left, **right} if left and right else ():
        if left.get(name) != right.get(name):
            fields.setdefault(name, f"{name} is {left.get(name)} {here}, and {right.get(name)} {there}")
    changes = [retrained_in(side.folder) for side in (one, other)]
    both = min(len(side.links or ()) for side in (one, other))
    for step in sorted({*changes[0], *changes[1]}):
        first, second = (_retrained(of.get(step, ())) for of in changes)
        if step < both and first != second:
            fields.setdefault("trained", f"before step {step}: {first} {here}, and {second} {there}")
    return fields


def _retrained(changes: Sequence[Training]) -> str:
    """What was frozen and thawed before a step, in words."""
    texts = [f"{', '.join(each.names)} {'thawed' if each.trained else 'frozen'}" for each in changes]
    return " and ".join(texts) or "nothing frozen or thawed"


def another(recipe: Definition, recorded: Any) -> str:
    """How a recipe differs, or its code reads differently, from what a run has recorded, in words; else empty."""
    differs, reads = differing(recipe, recorded)
    return differs or reads


def differing(recipe: Definition, recorded: Any) -> tuple[str, str]:
    """How a recipe differs from what a run has recorded, and how it only reads differently; "" where it does not.

    Attributes are left out, as they change in use.
    """
    try:
        comparison = compare(described(recipe), recorded) if recorded else Comparison()
    except ValueError:
        return "what is told of it cannot be read", ""
    hints = [hint for hint in comparison.hints if hint.endswith("reads differently") or " (its variable " in hint]
    return next(iter(comparison.differs), ""), next(iter(hints), "")
