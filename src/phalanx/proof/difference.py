"""The first difference: of named values, compared as bytes, with its size; and of the links of two chains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phalanx.checkpoint.chain import Links
from phalanx.definition.data import is_array, leaves
from phalanx.definition.plain import content
from phalanx.frameworks.registry import stored
from phalanx.seams.records import Tensor

FLOATS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}
TEXT = "text"
WORDS = {"forward": "forward pass", "norm": "norm of the gradient", "buffer": "buffers", "end": "number of steps"}
OF_REPLICAS = ("samples", "batch", "forward", "loss", "gradient", "buffer")
SIDES = "A", "B"
IN = "in A", "in B"
MOST = 60  # characters of a value
OWN = ("link", "step")  # fields that identify a line, and are no difference in themselves
PHASES = {"samples": "samples", "losses": "loss", "weights": "loss", "loss": "loss", "norm": "gradient", "lr": "update"}


@dataclass(frozen=True)
class Difference:
    """How two runs, or states, differ, and where that is seen first.

    Attributes
    ----------
    fields : dict of str to str
        Differences of recipe, environment, data and learning rate, in words, by the name of the field.
    step : int or None
        The first step that differs; None where no step does.
    replica : int or None
        The first replica that differs in it; None for what belongs to no replica.
    phase : str or None
        "samples", "batch", "forward", "loss", "gradient", "fold", "norm", "update" or "buffer"; "state" for the state
        at the beginning, or where nobody can tell how it came about; "end" where one side only has more steps.
    name : str or None
        Of the tensor, module, operation or number.
    elements : int or None
        How many elements of the tensor differ; None where shape or dtype does, or one side lacks it.
    ulp : int or None
        The largest difference between two of them, in units of the last place; None for what is no float.
    line : str
        The line of user code; where operations were asked for.
    note : str
        What else there is to say.
    part : str
        The recipe's phase (``phalanx.Phase``); empty if it has none.
    sides : (str, str)
        What the two are called in texts: their directories.
    """

    fields: dict[str, str] = field(default_factory=dict[str, str])
    step: int | None = None
    replica: int | None = None
    phase: str | None = None
    name: str | None = None
    elements: int | None = None
    ulp: int | None = None
    line: str = ""
    note: str = ""
    part: str = ""
    sides: tuple[str, str] = SIDES

    def __str__(self) -> str:
        lines, both = list(self.fields.values()), " and ".join(self.sides)
        if self.phase is not None:
            part = f", phase {self.part!r}" if self.part else ""
            where = "" if self.step is None else f" in step {self.step}{part}"
            whose = f" of replica {self.replica}" if self.replica is not None and self.phase in OF_REPLICAS else ""
            what = f", {self._what()}" if self.name not in (None, self.phase) else ""
            lines.append(f"{both} differ first{where}: {WORDS.get(self.phase, self.phase)}{whose}{what}{self._much()}")
        elif self.fields:
            lines.append(f"{both} were not made in the same way, but nothing that can be compared differs")
        return "\n".join([*lines, *(f"  {text}" for text in (self.line, self.note) if text)])

    def _what(self) -> str:
        known = self.line or self.name in ("output", "exception", "model")
        return f"module {self.name!r}" if self.phase == "forward" and not known else str(self.name)

    def _much(self) -> str:
        if self.elements is None:
            return ""
        apart = "" if self.ulp is None else f", at most {self.ulp} ULP apart"
        return f": {self.elements} element{'s' * (self.elements != 1)}{apart}"


def flat(value: Any, name: str) -> dict[str, Tensor]:
    """Every leaf of a tree of tuples, lists and dicts as bytes, by its path."""
    return {path: taken(leaf) for path, leaf in leaves(value, name, lists=True)}


def taken(value: Any) -> Tensor:
    """An array of any framework as bytes that stay as they are; any other value as its text."""
    if not is_array(value):
        return Tensor(TEXT, (), repr(value).encode(errors="surrogatepass"))
    if (kept := stored(value)) is not None:
        return replace(kept, content=bytes(kept.content))
    try:
        return Tensor(str(value.dtype).rpartition(".")[2], tuple(value.shape), bytes(content(value)))
    except (TypeError, RuntimeError, ValueError):  # of objects, or numpy cannot read it
        return Tensor(TEXT, tuple(value.shape), repr(value.tolist()).encode(errors="surrogatepass"))


def compare(one: Mapping[str, Tensor], other: Mapping[str, Tensor], *, common: bool = False) -> Difference | None:
    """The first name, in the order of ``one``, whose bytes differ; ``common``: among names that both have."""
    for name in {**one, **other}:
        left, right = one.get(name), other.get(name)
        if left is None or right is None:
            if not common:
                return Difference(name=name)
        elif (left.dtype, left.shape) != (right.dtype, right.shape):
            return Difference(name=name)
        elif bytes(left.content) != bytes(right.content):
            elements, ulp = _distance(left, right)
            return Difference(name=name, elements=elements, ulp=ulp)
    return None


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Those of the names that both have, in the order of ``one``, whose hashes or numbers differ."""
    return [name for name in one if name in other and one[name] != other[name]]


def _distance(left: Tensor, right: Tensor) -> tuple[int | None, int | None]:
    if left.dtype == TEXT:
        return None, None
    kind = FLOATS.get(left.dtype)
    if kind is None:
        a, b = (np.frombuffer(bytes(side.content), np.uint8) for side in (left, right))
        size = max(1, len(a) // max(1, int(np.prod(left.shape))))
        return int((a.reshape(-1, size) != b.reshape(-1, size)).any(1).sum()), None
    a, b = (_ordered(np.frombuffer(bytes(side.content), kind)) for side in (left, right))
    return int((a != b).sum()), int((np.maximum(a, b) - np.minimum(a, b)).max())


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Bits of floats as unsigned numbers in the order of the floats; neighbours differ by 1, and so do the zeros."""
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def parting(one: Links, other: Links, sides: tuple[str, str] = IN) -> Difference | None:
    """The first step that two chains record differently; None if there is none among those that both have.

    All lines that both have are read.

    Raises
    ------
    SnapshotError
        A line that differs is damaged: its link is not that of what it says and of the link before.
    """
    first, end = max(one.first, other.first), min(len(one), len(other))
    for step in range(first, end):
        if one.line(step).rstrip() != other.line(step).rstrip():
            records = one[step], other[step]
            difference = parted(step, *records, sides)
            if difference is not None or one.first == other.first:
                note = _said("link", (records[0]["link"], records[1]["link"]), sides)
                return difference or Difference(step=step, phase="samples", name="link", note=note)
    return None


def in_common(one: Links | None, other: Links | None) -> int:
    """The step up to which two chains that do not part agree; 0 if they record nothing in common.

    Raises
    ------
    SnapshotError
        A line that only one of them has is damaged.
    """
    end = 0
    if one and other and (last := min(len(one), len(other))) > max(one.first, other.first):
        left, right = one[last - 1], other[last - 1]
        end = last if left["link"] == right["link"] or set(left) & set(right) - set(OWN) else 0
    for links in filter(None, (one, other)):
        links.check(end)
    return end


def parted(
    step: int, one: Mapping[str, Any], other: Mapping[str, Any], sides: tuple[str, str] = IN
) -> Difference | None:
    """The first difference in what two links of a step both record, in the order of computation."""
    ordered = {name: one[name] for name in [*PHASES, *one] if name in one and name not in OWN}
    if not (odd := unlike(ordered, other)):
        return None
    name = what = odd[0]
    values, replica, part = (one[name], other[name]), None, ""
    if lists := [known for known in ("losses", "weights") if known in odd]:
        replica = _first(one[lists[0]], other[lists[0]])
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
