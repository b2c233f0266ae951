"""The first link in which two chains differ, and what of the step it says; found by halving, not by reading all."""

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
    """The first step whose links differ; None if all do agree that both have.

    Where both were written by the same writer, at most ``log2(steps)`` links of each are read: a link stands for all
    before it. A chain of a hand-written loop may say less; then links are compared field by field, one after the other.

    Raises
    ------
    SnapshotError
        A link that is needed is damaged.
    """
    first, end = max(one.first, other.first), min(len(one), len(other))
    if first >= end:
        return None
    comparable = one.first == other.first and set(one[first]) == set(other[first])
    if comparable and one[end - 1]["link"] == other[end - 1]["link"]:
        return None
    if not comparable:
        found = (parted(step, one[step], other[step]) for step in range(first, end))
        return next((part for part in found if part is not None), None)
    low, high = first, end - 1  # the links of ``high`` differ, and those before ``low`` do not
    while low < high:
        middle = (low + high) // 2
        if one[middle]["link"] == other[middle]["link"]:
            low = middle + 1
        else:
            high = middle
    told = one[low], other[low]
    links = told[0]["link"], told[1]["link"]
    return parted(low, *told) or Parting(low, "samples", "link", None, links)


def in_common(one: Links, other: Links) -> int:
    """The step up to which two chains that do not part say the same of anything; 0 if they say nothing in common."""
    first, end = max(one.first, other.first), min(len(one), len(other))
    if first >= end:
        return 0
    last = one[end - 1], other[end - 1]
    return end if last[0]["link"] == last[1]["link"] or set(last[0]) & set(last[1]) - set(OWN) else 0


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
