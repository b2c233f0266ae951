"""Two fingerprints side by side: what differs, and what only may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.definition.fingerprint.arrays import other_row

VALUES = ("replicas", "batch_size", "lr", "max_norm", "shuffle", "drop_last", "seed", "precision", "threads",
          "on_nonfinite")  # fmt: skip
LATER = ("schedule_every", "schedule_on")  # written down only where they are given: earlier snapshots lack them
NEVER_GIVEN = {"micro_batches": 1}  # the same; what it is if nobody gives it
FUNCTIONS = ("make_model", "loss_fn", "forward_fn", "target_fn", "optimizer", "scheduler", "collate_fn")
MOST = 5  # differences of a field that are told


@dataclass
class Comparison:
    """What two recipes have not in common.

    Attributes
    ----------
    differs : list of str
        What makes them two recipes.
    doubts : list of str
        What may change bits, or hide a change.
    """

    differs: list[str] = field(default_factory=list[str])
    doubts: list[str] = field(default_factory=list[str])


def values_of(definition: Definition) -> dict[str, str]:
    """Plain fields of a recipe, as text."""
    epochs = LATER if definition.schedule_every == "epoch" else ()
    given = [name for name, default in NEVER_GIVEN.items() if getattr(definition, name) != default]
    return {name: repr(getattr(definition, name)) for name in (*VALUES, *epochs, *given)}


def compared(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Comparison:
    """Compare two fingerprints of this format.

    Raises
    ------
    KeyError, TypeError, AttributeError
        One is none.
    """
    comparison = Comparison()
    for name in {**mine["values"], **theirs["values"]}:
        one, other = mine["values"].get(name), theirs["values"].get(name)
        if one != other:
            comparison.differs.append(_between(name, one, other))
    for name in {**mine["fields"], **theirs["fields"]}:
        _compare_field(name, mine["fields"].get(name), theirs["fields"].get(name), mine, theirs, comparison)
    for name in sorted({**mine["packages"], **theirs["packages"]}):
        one, other = mine["packages"].get(name), theirs["packages"].get(name)
        if one is not None and other is not None and one != other:
            comparison.doubts.append(f"{name} is {one} here, and {other} there")
    return comparison


def _compare_field(
    name: str, one: Any, other: Any, mine: Mapping[str, Any], theirs: Mapping[str, Any], comparison: Comparison
) -> None:
    if one is None or other is None:
        comparison.differs.append(f"{name} is known only {'there' if one is None else 'here'}")
        return
    same = one["tree"] == other["tree"] or one["code"] == other["code"]
    if not same and _incomparable(one, other, mine, theirs):
        comparison.doubts.append(
            f"{name} cannot be compared: its code has no source, and is of Python {mine['python']} here, and of "
            f"{theirs['python']} there"
        )
    elif not same:
        comparison.differs += _told(name, one["parts"], other["parts"])
    else:
        changed = [
            path for path in {**one["soft"], **other["soft"]} if one["soft"].get(path) != other["soft"].get(path)
        ]
        comparison.doubts += [f"{name}: {path} changed, which is written while it is used" for path in changed]
    comparison.doubts += [f"{placed(name, path)} is {why}" for path, why in one["unseen"].items()]


def _incomparable(one: Any, other: Any, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether code that has no source is all that could differ, between two versions of Python."""
    if mine["python"] == theirs["python"] or not (one["sourceless"] or other["sourceless"]):
        return False
    names = [{path: told[0] for path, told in field["parts"].items()} for field in (one, other)]
    return names[0] == names[1]


def _told(name: str, one: Mapping[str, list[str]], other: Mapping[str, list[str]]) -> list[str]:
    """The parts that are something else themselves; below the last that are noted, those whose contents are."""
    paths = [path for path in {**one, **other} if _own(one.get(path)) != _own(other.get(path))]
    nearest = [path for path in paths if not any(_is_below(path, above) for above in paths)]
    if not nearest:
        paths = [path for path in one if one[path][:3] != other.get(path, [])[:3]]
        nearest = [path for path in paths if not any(_is_below(deeper, path) for deeper in paths)]
    told = [
        _between(placed(name, path), _shown(one, path), _shown(other, path))
        + other_row(one.get(path, []), other.get(path, []))
        for path in nearest or [""]
    ]
    return told[:MOST] + [f"{name} differs in {len(told) - MOST} more places"] * (len(told) > MOST)


def _own(told: list[str] | None) -> list[str] | None:
    """What is noted of a part without what it holds."""
    return None if told is None else [told[0], *told[2:3]]


def _between(where: str, one: Any, other: Any) -> str:
    """One difference in words."""
    if one == other:
        return f"{where} is another {one} here than there"
    return f"{where} is {one} here, and {other} there"


def _shown(parts: Mapping[str, list[str]], path: str) -> str:
    return parts[path][0] if path in parts else "absent"


def _is_below(path: str, above: str) -> bool:
    return path != above and (not above or path.startswith(f"{above}, "))


def placed(name: str, path: str) -> str:
    """A part of a field, by the field's name and the path to it."""
    return f"{name}: {path}" if path else name
