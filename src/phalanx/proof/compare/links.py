"""The first line in which two chains differ, and what of the step it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from phalanx.checkpoint.chain import Links

OWN = ("link", "step")  # what a line is called by, and no difference in itself
PHASES = {"samples": "samples", "losses": "loss", "weights": "loss", "loss": "loss", "norm": "gradient", "lr": "update"}


class Parting(NamedTuple):
    """Where two chains part.

    Attributes
    ----------
    step : int
    phase : str
        What of the step differs first, as far as the links tell.
    field : str
        Of the link.
    replica : int or None
        The first whose loss or weight differs.
    values : (Any, Any)
    part : str
        In which of the recipe's phases that replica's does, if it has some.
    """

    step: int
    phase: str
    field: str
    replica: int | None
    values: tuple[Any, Any]
    part: str = ""


def parting(one: Links, other: Links) -> Parting | None:
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
                return found or Parting(step, "samples", "link", None, (told[0]["link"], told[1]["link"]))
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


def parted(step: int, one: Mapping[str, Any], other: Mapping[str, Any]) -> Parting | None:
    """How two links of a step differ in what both say, in the order in which a step comes to it."""
    common = [name for name in [*PHASES, *one] if name in one and name in other and name not in OWN]
    differing = [name for name in dict.fromkeys(common) if one[name] != other[name]]
    if not differing:
        return None
    name = differing[0]
    replica = None
    for field in ("losses", "weights"):
        if replica is None and field in differing:
            replica = _first(one[field], other[field])
    part, names = "", list(one.get("phases", ()))
    if names and replica is not None:
        count = max(1, len(one["losses"]) // len(names))  # replicas: each has a loss in every phase
        part, replica = names[min(replica // count, len(names) - 1)], replica % count
    return Parting(step, PHASES.get(name, name), name, replica, (one[name], other[name]), part)


def _first(one: Any, other: Any) -> int:
    pairs = zip(one, other, strict=False)
    return next((number for number, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
