"""Values side by side: trees of arrays become named bytes; of two such, what differs first and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from phalanx.definition.data import content, is_array, leaves
from phalanx.seams.records import Tensor

FLOATS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}
TEXT = "text"
WHOLE = {"samples": "samples", "batch": "batch", "forward": "forward pass", "loss": "loss", "gradient": "gradient",
         "fold": "fold", "norm": "norm of the gradient", "update": "update", "buffer": "buffers", "state": "state",
         "end": "number of steps", "tensors": "tensors"}  # fmt: skip


OF_REPLICAS = ("samples", "batch", "forward", "loss", "gradient", "buffer")


class Unequal(NamedTuple):
    """The first of several named values that differs.

    Attributes
    ----------
    name : str
    elements : int or None
        How many of its elements differ; None where shape or dtype does, or one side lacks it.
    ulp : int or None
        The largest difference between two elements, in units of the last place; None for what is no float.
    """

    name: str
    elements: int | None
    ulp: int | None


@dataclass(frozen=True)
class Difference:
    """What two runs, or states, have not in common, and where that is seen first.

    Attributes
    ----------
    fields : dict of str to str
        What differs of recipe, environment and data, each in words, by the name of the field.
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
        How many elements of the tensor differ.
    ulp : int or None
        The largest difference between two of them, in units of the last place.
    line : str
        The line of user code; where operations were asked for.
    note : str
        What else there is to say.
    part : str
        Which of the recipe's phases (``phalanx.Phase``), if it has some.
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
    losses: tuple[Sequence[float], Sequence[float]] = field(default=((), ()), repr=False)

    def __str__(self) -> str:
        told: list[str] = []
        if self.phase is not None:
            part = f", phase {self.part!r}" if self.part else ""
            where = "" if self.step is None else f" in step {self.step}{part}"
            whose = f" of replica {self.replica}" if self.replica is not None and self.phase in OF_REPLICAS else ""
            what = f", {self._what()}" if self.name not in (None, self.phase) else ""
            told.append(f"A and B differ first{where}: {WHOLE.get(self.phase, self.phase)}{whose}{what}{self._much()}")
        elif self.fields:
            told.append("A and B were not made in the same way, but nothing that can be compared differs")
        told += [f"  {text}" for text in (self.line, self.note) if text]
        return "\n".join([*told, *(f"  {text}" for text in self.fields.values())])

    def plot(self) -> Any:
        """The loss of both over the steps, and how far they are apart, with a mark where they part; returns the axes.

        Raises
        ------
        UsageError
            matplotlib is not installed.
        """
        from phalanx.run.plots import plot_runs

        one, other = map(list, map(enumerate, self.losses))
        apart = [(step, abs(left - right)) for (step, left), (_, right) in zip(one, other, strict=False)]
        mark = [] if self.step is None else [self.step]
        curves = [{"loss": one, "|A - B|": apart}, {"loss": other}]
        figure = plot_runs(["A", "B"], curves, [mark, mark])
        figure.suptitle(str(self).splitlines()[0], fontsize=9, wrap=True)
        return figure.axes[0]

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
    """An array of any framework as bytes that stay as they are; of other values, their text."""
    if not is_array(value):
        return Tensor(TEXT, (), repr(value).encode(errors="surrogatepass"))
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype).endswith("bfloat16"):  # which numpy does not have
            wide = np.asarray(value.float()).view(np.uint32)
            return Tensor("bfloat16", tuple(value.shape), (wide >> 16).astype(np.uint16).tobytes())
    return Tensor(*content(value))


def unequal(one: Mapping[str, Tensor], other: Mapping[str, Tensor], *, common: bool = False) -> Unequal | None:
    """The first name, in the order of ``one``, under which the two have not the same bytes; ``common``: both have."""
    names: Iterable[str] = {**one, **other}
    for name in names:
        left, right = one.get(name), other.get(name)
        if left is None or right is None:
            if not common:
                return Unequal(name, None, None)
        elif (left.dtype, left.shape) != (right.dtype, right.shape):
            return Unequal(name, None, None)
        elif bytes(left.content) != bytes(right.content):
            return Unequal(name, *_distance(left, right))
    return None


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
