"""What two runs say of how they were made: recipe, environment, versions; and whether a recipe at hand is a run's."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from phalanx.definition.described import Comparison, compare, described
from phalanx.definition.fields import Definition
from phalanx.proof.compare.sides import Side


def different_fields(one: Side, other: Side) -> dict[str, str]:
    """What of recipe, environment and data differs, by name."""
    found: dict[str, str] = {}
    mine, theirs = (side.run.get("recipe") or {} for side in (one, other))
    with contextlib.suppress(ValueError):  # one of them is no recipe
        told = compare(mine, theirs)
        for text in (*told.differs, *told.hints, *told.versions):
            found.setdefault(re.split(r"[^\w]", text, maxsplit=1)[0], _sided(text))
    left, right = (side.run.get("environment") or {} for side in (one, other))
    for name in {**left, **right} if left and right else ():
        if left.get(name) != right.get(name):
            found.setdefault(name, f"{name} is {left.get(name)} in A, and {right.get(name)} in B")
    return found


def another(recipe: Definition, recorded: Any) -> str:
    """How a recipe differs, or its code reads differently, from what a run has recorded, in words; else empty."""
    differs, reads = differing(recipe, recorded)
    return differs or reads


def differing(recipe: Definition, recorded: Any) -> tuple[str, str]:
    """How a recipe differs from what a run has recorded, and how it only reads differently; "" where it does not.

    Attributes are left out, as they change in use.
    """
    try:
        told = compare(described(recipe), recorded) if recorded else Comparison()
    except ValueError:
        return "what is told of it cannot be read", ""
    hints = [hint for hint in told.hints if hint.endswith("reads differently") or " (its variable " in hint]
    return next(iter(told.differs), ""), next(iter(hints), "")


def _sided(text: str) -> str:
    text = text.replace(" here, and ", " in A, and ").replace(" here than there", " in A than in B")
    return re.sub(r" there$", " in B", text)
