"""The first line in which two chains differ, and what of the step it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.checkpoint.chain import Links
from phalanx.proof.compare.values import Difference

IN = "in A", "in B"
MOST = 60  # characters of a value
OWN = ("link", "step")  # what a line is called by, and no difference in itself
PHASES = {"samples": "samples", "losses": "loss", "weights": "loss", "loss": "loss", "norm": "gradient", "lr": "update"}


def parting(one: Links, other: Links) -> Difference | None:
    """The first step of which the two say something else; None if there is none that both have.

    All lines that both have are read.

    Raises
    ------
    SnapshotError
        A line that differs is damaged: its link is not that of what it says and of the link before.
    """
    first, end = max(one.first, other.first), min(len(one), len(other))
    for step in range(first, end):
        if one.line(step).rstrip() != other.line(step).rstrip():
            told = one[step], other[step]
            found = parted(step, *told)
            if found is not None or one.first == other.first:
                note = _said("link", (told[0]["link"], told[1]["link"]), IN)
                return found or Difference(step=step, phase="samples", name="link", note=note)
    return None


def in_common(one: Links | None, other: Links | None) -> int:
    """The step up to which two chains that do not part say the same of anything; 0 if they say nothing in common.

    Raises
    ------
    SnapshotError
        A line that only one of them has is damaged.
    """
    end = min(len(one), len(other)) if one and other else 0
    if one and other and end > max(one.first, other.first):
        left, right = one[end - 1], other[end - 1]
        end = end if left["link"] == right["link"] or set(left) & set(right) - set(OWN) else 0
    else:
        end = 0
    for links in filter(None, (one, other)):
        links.check(end)
    return end


def parted(
    step: int, one: Mapping[str, Any], other: Mapping[str, Any], sides: tuple[str, str] = IN
) -> Difference | None:
    """How two links of a step differ in what both say, in the order in which a step comes to it."""
    common = [name for name in [*PHASES, *one] if name in one and name in other and name not in OWN]
    differing = [name for name in dict.fromkeys(common) if one[name] != other[name]]
    if not differing:
        return None
    name = what = differing[0]
    values, replica, part = (one[name], other[name]), None, ""
    for field in ("losses", "weights"):
        if replica is None and field in differing:
            replica = _first(one[field], other[field])
    if replica is not None and name in ("losses", "weights") and all(replica < len(value) for value in values):
        values = values[0][replica], values[1][replica]
        what = "loss" if name == "losses" else "weight"
    names = list(one.get("phases", ()))
    if names and replica is not None:
        count = max(1, len(one["losses"]) // len(names))  # replicas: each has a loss in every phase
        part, replica = names[min(replica // count, len(names) - 1)], replica % count
    what = what if what == name else f"{what} of replica {replica}"
    note = _said(what, values, sides)
    return Difference(step=step, replica=replica, phase=PHASES.get(name, name), name=name, part=part, note=note)


def _said(what: str, values: tuple[Any, Any], sides: tuple[str, str]) -> str:
    texts = (text if len(text) <= MOST else f"{text[: MOST - 3]}..." for text in map(str, values))
    return f"{what} is " + ", and ".join(f"{text} {side}" for text, side in zip(texts, sides, strict=True))


def _first(one: Any, other: Any) -> int:
    pairs = zip(one, other, strict=False)
    return next((number for number, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
