"""What two runs say of how they were made: recipe, environment, versions; and whether a recipe at hand is a run's."""

from __future__ import annotations

import re
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.definition.fingerprint import compare, fingerprint
from phalanx.definition.fingerprint.compare import compared
from phalanx.proof.compare.sides import Side


def different_fields(one: Side, other: Side) -> dict[str, str]:
    """What of recipe, environment and data differs, by name."""
    found: dict[str, str] = {}
    mine, theirs = (side.run.get("recipe") or {} for side in (one, other))
    try:
        _compare_recipes(mine, theirs, found)
    except (KeyError, ValueError, TypeError, AttributeError):  # one of them is none
        found.clear()
    left, right = (side.run.get("environment") or {} for side in (one, other))
    for name in {**left, **right} if left and right else ():
        if left.get(name) != right.get(name):
            found.setdefault(name, f"{name} is {left.get(name)} in A, and {right.get(name)} in B")
    return found


def another(recipe: Definition, recorded: Any) -> str:
    """How a recipe differs from the one that a run has recorded, in words; empty if it does not, or nobody knows."""
    try:
        return next(iter(compare(fingerprint(recipe), recorded).differs), "") if recorded else ""
    except (KeyError, ValueError, TypeError):
        return "what is told of it cannot be read"


def _compare_recipes(mine: dict[str, Any], theirs: dict[str, Any], found: dict[str, str]) -> None:
    if not mine or not theirs:
        return
    for text in compared(mine, theirs).differs:
        found.setdefault(re.split(r"[: ]", text, maxsplit=1)[0], _sided(text))
    for name in sorted({**mine["packages"], **theirs["packages"]}):
        versions = [facts["packages"].get(name) for facts in (mine, theirs)]
        if None not in versions and versions[0] != versions[1]:
            found.setdefault(name, f"{name} is {versions[0]} in A, and {versions[1]} in B")
    if mine["python"] != theirs["python"]:
        found["python"] = f"python is {mine['python']} in A, and {theirs['python']} in B"


def _sided(text: str) -> str:
    text = text.replace(" here, and ", " in A, and ").replace(" here than there", " in A than in B")
    return re.sub(r" there$", " in B", text)
