"""A model's weights as one safetensors file, and the state of callbacks as tensors and plain values."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from phalanx.checkpoint import files, tensors
from phalanx.definition import checks
from phalanx.definition.plain import check_like, decoded, encoded, taking_over
from phalanx.errors import SnapshotError, UsageError
from phalanx.frameworks.registry import stored, tensor_of, weights_of
from phalanx.seams.records import Tensor

MOST_TENSORS = 1 << 44
SUFFIX = ".safetensors"
CALLBACKS = "callbacks"  # begins the names of their tensors in snapshots, and is their key among a snapshot's facts


def write_weights(path: Any, model: Any, params: Mapping[str, Any], instead: Mapping[str, Any]) -> None:
    """Write the weights of ``model``; ``instead``: values for parameters of these names.

    Raises
    ------
    UsageError
        The path has another ending.
    SnapshotError
        It could not be written.
    """
    write_file(path, weights_of(model, params, instead))


def copied_weights(model: Any, params: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Any]:
    """The same in memory: tensors by name."""
    return {name: tensor_of(tensor, {}) for name, tensor in weights_of(model, params, instead).items()}


def read_weights(path: pathlib.Path) -> dict[str, Any]:
    """Tensors by name, of a file that ``write_weights`` wrote.

    Raises
    ------
    SnapshotError
        It cannot be read, or is damaged.
    """
    try:
        read = tensors.read(memoryview(files.read(path, MOST_TENSORS)), None)
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{str(path)!r} cannot be read: {error}") from error
    return {name: tensor_of(tensor, {}) for name, tensor in read.items()}


def write_file(path: Any, weights: Mapping[str, Tensor]) -> pathlib.Path:
    """Write tensors as one file, whole and durable or not at all; returns where. One that is there is replaced."""
    target = checks.path("path", path, hint=f"give the name of a file that ends in {SUFFIX}")
    if target.suffix != SUFFIX:
        raise UsageError(
            f"path is {str(path)!r}, and weights are written as {SUFFIX}; end it so, or save the model itself "
            "in another way"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.replace(target, functools.partial(tensors.write, tensors=weights))
    except OSError as error:
        raise SnapshotError(f"the weights could not be written to {str(target)!r}: {error}") from error
    return target


def kept(states: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """States of callbacks as JSON values and tensors by name.

    Raises
    ------
    UsageError
        A state holds something else than numbers, text, tensors, arrays, lists and dicts of those; names it.
    """
    taken: dict[str, Tensor] = {}

    def keep(leaf: Any, path: str) -> Any:
        tensor = stored(leaf)
        if tensor is None:
            return None
        taken[path] = tensor
        return path

    return {name: encoded(state, keep, f"{CALLBACKS}.{name}") for name, state in states.items()}, taken


def found(facts: Mapping[str, Any], training: Mapping[str, Tensor]) -> dict[str, Any]:
    """The states again; arrays come as tensors.

    Raises
    ------
    SnapshotError
        They are none.
    """
    left = {name: tensor for name, tensor in training.items() if name.startswith(f"{CALLBACKS}.")}
    with taking_over("the state of callbacks"):
        states = {
            name: decoded(state, lambda _, path: tensor_of(left.pop(path), {}), f"{CALLBACKS}.{name}")
            for name, state in facts.get(CALLBACKS, {}).items()
        }
        check_like(list(left), [], "what no state names")
        return states
