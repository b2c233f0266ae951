"""Values side by side: trees of arrays become named bytes, and of two such, what differs first and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from phalanx.definition.data import content, is_array, leaves
from phalanx.seams.snapshots import Tensor

FLOATS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}
TEXT = "text"


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
