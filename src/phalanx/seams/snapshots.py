"""A framework's state as snapshots hold it: named tensors and plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CODES = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "uint16": ("U16", 2), "int16": ("I16", 2),
    "uint32": ("U32", 4), "int32": ("I32", 4), "uint64": ("U64", 8), "int64": ("I64", 8), "float16": ("F16", 2),
    "bfloat16": ("BF16", 2), "float32": ("F32", 4), "float64": ("F64", 8), "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1), "complex64": ("C64", 8),
}  # fmt: skip  # what a snapshot can hold: dtype to its name in safetensors, and bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as bytes: dtype as torch and numpy name it, shape, content in C order."""

    dtype: str
    shape: tuple[int, ...]
    content: Any


@dataclass(frozen=True, slots=True)
class Captured:
    """A state as snapshots hold it, as of a step boundary.

    Attributes
    ----------
    weights, training : dict of str to Tensor
        Parameters and buffers by name; the tensors of optimizers and schedules.
    facts : dict
        All else, as JSON values.
    release : callable
        To be called when the tensors have been read: their memory may be written from then on.
    """

    weights: dict[str, Tensor]
    training: dict[str, Tensor]
    facts: dict[str, Any]
    release: Callable[[], None] = lambda: None
