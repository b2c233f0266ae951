"""A snapshot: all state at a step boundary, as a folder of safetensors and JSON that says whether it is whole."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.checkpoint import files, tensors
from phalanx.definition.plain import Each, check_like
from phalanx.seams.records import Tensor

SCHEMA = 1
WEIGHTS, TRAINING, FACTS, MANIFEST = "weights.safetensors", "training.safetensors", "state.json", "manifest.json"
FIELDS: dict[str, Any] = {
    "step": int, "samples": int, "digest": str | None, "recipe": dict, "environment": dict, "facts": dict,
    "metrics": Each([int, str, str]), "hashes": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """All state at a step boundary.

    Attributes
    ----------
    step : int
        How many steps were done.
    digest : str or None
        That of ``Result``, if asked for.
    weights : mapping of str to Tensor
        Parameters and buffers, by name.
    training : mapping of str to Tensor
        Optimizer state and the loss of every step.
    facts : dict
        Everything else that the framework needs, as JSON values.
    samples : int
        Samples seen.
    metrics : list
        Evaluations so far: (steps, value, name).
    recipe, environment : dict
        What defined the answer, and what else decides bits.
    """

    step: int
    digest: str | None
    weights: Mapping[str, Tensor] = field(repr=False)
    training: Mapping[str, Tensor] = field(repr=False)
    facts: dict[str, Any] = field(repr=False)
    samples: int = 0
    metrics: list[Any] = field(default_factory=list[Any], repr=False)
    recipe: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    environment: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def noted(self, part: str) -> dict[str, Any]:
        """A section of the recipe's description; empty if it is no dict, which nobody has checked before."""
        section = self.recipe.get(part)
        return section if isinstance(section, dict) else {}


def tensors_of(weights: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a state, or their hashes, under the names that messages use."""
    return {**weights, **{name: value for name, value in training.items() if name.startswith("optimizer")}}


def write(snapshot: Snapshot, target: pathlib.Path) -> None:
    """Write ``snapshot`` as the folder ``target``: durable and whole when this returns, else not there.

    Raises
    ------
    OSError
        The disk is full, or may not be written.
    """
    with files.whole_folder(target) as draft:
        parts = {WEIGHTS: snapshot.weights, TRAINING: snapshot.training}
        hashes = {
            name: files.write(draft / name, functools.partial(tensors.write, tensors=part))
            for name, part in parts.items()
        }
        facts = {name: getattr(snapshot, name, hashes) for name in FIELDS}  # a snapshot itself has no hashes
        text = json.dumps(facts, allow_nan=False).encode()
        files.write(draft / FACTS, lambda file: file.write(text))
        seal = json.dumps({"schema": SCHEMA, FACTS: hashlib.sha256(text).hexdigest()}).encode()
        files.write(draft / MANIFEST, lambda file: file.write(seal))


def is_one(folder: pathlib.Path) -> bool:
    """Whether a folder is a snapshot, damaged or not."""
    manifest = folder / MANIFEST
    return files.is_folder(folder) and manifest.is_file() and not manifest.is_symlink()


def read(folder: pathlib.Path) -> Snapshot:
    """The snapshot in ``folder``, with every byte checked.

    Raises
    ------
    SnapshotError
        It is not whole, damaged, or of another version; says what of it.
    """
    facts = facts_of(folder)
    hashes, parts = facts.pop("hashes"), dict[str, dict[str, Tensor]]()
    for name in (WEIGHTS, TRAINING):
        with files.used(folder / name):
            parts[name] = tensors.read(memoryview(files.read(folder / name)), hashes[name])
    return Snapshot(weights=parts[WEIGHTS], training=parts[TRAINING], **facts)


def facts_of(folder: pathlib.Path) -> dict[str, Any]:
    """What a snapshot says of itself, checked; of its tensors the hashes only. Raises as ``read`` does."""
    with files.used(folder):
        if not files.is_folder(folder):
            raise ValueError("it is no folder" if folder.exists() else "there is no such folder")
    with files.used(folder / MANIFEST):
        seal = _object(files.read(folder / MANIFEST), {"schema": object, FACTS: str})
        if seal["schema"] != SCHEMA:
            raise ValueError(f"it is of version {seal['schema']!r}, and this phalanx reads version {SCHEMA}")
    with files.used(folder / FACTS):
        text = files.read(folder / FACTS)
        if hashlib.sha256(text).hexdigest() != seal[FACTS]:
            raise ValueError("it is damaged: its checksum differs")
        return _object(text, FIELDS)


def _object(text: bytes, fields: dict[str, Any]) -> dict[str, Any]:
    facts = json.loads(text, parse_constant=_refused)
    check_like(facts, fields, "it")
    return facts


def _refused(name: str) -> Any:
    raise ValueError(f"it has the number {name}, which no snapshot has")
