"""What can be compared: directories of runs, snapshots, chains, files of tensors, results and tensors in memory."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.checkpoint import files, tensors
from phalanx.checkpoint.chain import CHAIN, Links, records
from phalanx.checkpoint.chained import tensors_of
from phalanx.checkpoint.directory import SNAPSHOTS
from phalanx.checkpoint.origin import recall
from phalanx.checkpoint.snapshot import FACTS, MANIFEST, MOST_JSON, MOST_TENSORS
from phalanx.definition.data import is_array
from phalanx.definition.fields import Definition
from phalanx.errors import PhalanxError, SnapshotError, UsageError
from phalanx.proof.compare.values import taken
from phalanx.proof.instant import snapshot_at, steps_in
from phalanx.run.result import Result
from phalanx.seams.records import Tensor

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


@dataclass
class Side:
    """One of two that are compared; what it does not have is None or empty.

    Attributes
    ----------
    name : str
    folder : path or None
        Of a run, or a snapshot by itself.
    links : Links or None
    run : dict
        Fingerprint (``recipe``), ``environment`` and ``origin`` of the recipe.
    states : dict
        Hashes of tensors by name, by the number of steps done.
    loose : dict
        Tensors by themselves, of no known step.
    recipe : Definition or None
        Where it is at hand in this process.
    """

    name: str
    folder: pathlib.Path | None = None
    links: Links | None = None
    run: dict[str, Any] = field(default_factory=dict[str, Any])
    states: dict[int, dict[str, str]] = field(default_factory=dict[int, dict[str, str]])
    loose: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    recipe: Definition | None = None

    def tensors(self, step: int) -> dict[str, Tensor]:
        """The tensors of the state after so many steps, if there is a snapshot of it."""
        try:
            found = snapshot_at(self.folder, step)
        except SnapshotError:
            return {}
        return tensors_of(found.weights, found.training)

    def newest(self) -> dict[str, Tensor]:
        """The tensors of the newest state that there is a good snapshot of."""
        return next(filter(None, map(self.tensors, sorted(self.states, reverse=True))), {})

    def close(self) -> None:
        """Read no more."""
        if self.links is not None:
            self.links.close()


def side(target: Any, recipe: Definition | None = None) -> Side:
    """What ``target`` is, ready to be compared.

    Raises
    ------
    UsageError
        It is nothing that can be compared.
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
    if not path.exists():
        raise UsageError(f"{str(path)!r} does not exist; give the directory of a run, a snapshot, a chain or a file")
    if path.is_dir():
        return _folder(path, recipe)
    if path.suffix == ".safetensors":
        return Side(str(path), loose=_loose(path))
    if path.suffix in PICKLES:
        raise UsageError(
            f"{str(path)!r} may be a pickle, which can run code when it is read, so phalanx reads none; write the "
            "tensors as a safetensors file, or compare them in Python: phalanx.diff(state_dict, other)"
        )
    return _chain(Side(str(path), recipe=recipe), path)


def _folder(path: pathlib.Path, recipe: Definition | None) -> Side:
    found = Side(str(path), path, recipe=recipe or recall(path))
    steps = list(steps_in(path)) if (path / MANIFEST).exists() or (path / SNAPSHOTS).is_dir() else None
    chain = path / CHAIN
    if chain.exists():
        _chain(found, chain)
    elif steps is None:
        raise UsageError(f"{str(path)!r} has neither a chain nor snapshots; give the directory of a run, or a snapshot")
    for step in steps or ():  # listed before the chain was opened, which is never older than a snapshot
        facts = _facts(path if (path / MANIFEST).exists() else path / SNAPSHOTS / f"step-{step:012d}")
        parts = [part for part in _objects(facts, "hashes").values() if isinstance(part, dict)]
        if parts:
            found.states[step] = tensors_of(parts[0], parts[1] if len(parts) > 1 else {})
        for name in ("recipe", "environment"):
            found.run.setdefault(name, _objects(facts, name))
    return found


def _facts(folder: pathlib.Path) -> dict[str, Any]:
    """What a snapshot says of itself; its tensors are checked when they are read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        facts = json.loads(files.read(folder / FACTS, MOST_JSON))
        return facts if isinstance(facts, dict) else {}
    return {}


def _chain(found: Side, path: pathlib.Path) -> Side:
    found.links = Links(path)
    for told in records(path, "run"):
        found.run = told | {name: _objects(told, name) for name in ("recipe", "environment")}
    for told in records(path, "state"):
        with contextlib.suppress(PhalanxError, KeyError):
            if _bound(found.links, told):
                found.states[told["step"]] = _objects(told, "leaves")
    return found


def _objects(facts: dict[str, Any], name: str) -> dict[str, Any]:
    value = facts.get(name)
    return value if isinstance(value, dict) else {}


def _bound(links: Links, told: dict[str, Any]) -> bool:
    """Whether a record belongs to the chain as it is now; steps may have been done again since, and differently."""
    step = told["step"]
    if step == links.first:
        return step <= len(links)
    return links.first < step <= len(links) and links.before(step) == told["link"]


def _loose(path: pathlib.Path) -> dict[str, Tensor]:
    try:
        return tensors.read(memoryview(files.read(path, MOST_TENSORS)), None)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SnapshotError(f"{path} cannot be used: {error}") from error
