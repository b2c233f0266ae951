"""Weights under the names that a framework loads, and weights to begin from, of whatever names them."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from phalanx.checkpoint.snapshot import Snapshot
from phalanx.checkpoint.tensors import SUFFIX, leaf, read_file
from phalanx.definition import checks
from phalanx.definition.plain import taking_over
from phalanx.errors import UsageError
from phalanx.frameworks.registry import stored
from phalanx.seams.records import STATE_DICT, Captured, Tensor

LISTED = 5  # names that are listed


def state_dict_of(snapshot: Snapshot) -> dict[str, Tensor] | None:
    """The weights of a snapshot as ``load_state_dict`` takes them; None if the snapshot does not say how.

    Raises
    ------
    SnapshotError
        What it says names no weights.
    """
    noted = snapshot.facts.get(STATE_DICT)
    if noted is None:
        return None
    with taking_over("the names of weights"):
        others: dict[str, str | None] = dict(noted)
        more = {name: snapshot.weights[weight] for name, weight in others.items() if weight is not None}
        return {name: item for name, item in snapshot.weights.items() if name not in others} | more


def loose_weights(source: Any) -> dict[str, Tensor] | None:
    """Tensors by name, of a dict or a safetensors file; None where a snapshot is meant.

    Raises
    ------
    UsageError
        The dict holds something else.
    SnapshotError
        The file cannot be read, or is damaged.
    """
    if isinstance(source, pathlib.Path):
        return read_file(source) if source.suffix == SUFFIX and not source.is_dir() else None
    weights: dict[str, Tensor] = {}
    for name, value in source.items():
        tensor = stored(value)
        if tensor is None or not isinstance(name, str):
            raise UsageError(
                f"warm_start has {checks.shown(value)} under {name!r}; it must be a dict of names to tensors: leave "
                "out what is none"
            )
        weights[name] = tensor
    return weights


def fitted(weights: Mapping[str, Tensor], state: Captured) -> dict[str, Tensor]:
    """Weights by name as a model's ``state`` has them. Of tied names one is enough; what no file keeps stays as it is.

    Raises
    ------
    UsageError
        Names, shapes or dtypes are others, or tied weights differ; lists them.
    """
    others: dict[str, str | None] = dict(state.facts.get(STATE_DICT) or ())
    names = {**{name: name for name in state.weights}, **{name: weight for name, weight in others.items() if weight}}
    taken: dict[str, Tensor] = {}
    odd: list[str] = []
    for name in filter(names.__contains__, weights):
        tensor, weight = weights[name], names[name]
        here = state.weights[weight]
        if checks.outline(tensor) != checks.outline(here):
            odd.append(f"{name} is {checks.outline(tensor)} there, and {checks.outline(here)} in the model")
        elif weight in taken and leaf(taken[weight]) != leaf(tensor):
            odd.append(f"{name} and {weight} are one weight of the model, and two that differ there")
        taken[weight] = tensor
    unknown = [name for name in weights if name not in names]
    missing = [name for name in state.weights if name not in taken and others.get(name, name) is not None]
    lists = [f"{what}: {_listed(few)}" for what, few in (("missing", missing), ("not in the model", unknown)) if few]
    if odd or lists:
        raise UsageError(
            f"warm_start does not fit the model: {'; '.join(odd[:LISTED] + lists)}. Give a dict with each name of "
            "the model, as in {**make_model().state_dict(), **part}"
        )
    return {**state.weights, **taken}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
