"""Numpy arrays: which can be columns, and how they lie in memory, which may decide bits: kernels look at strides."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import numpy as np

from phalanx.errors import UsageError


def check_numpy(name: str, column: Any) -> None:
    """Refuse masks, and dtypes that no framework has: text, objects, dates, floats of more than 64 bits, foreign bytes.

    Raises
    ------
    UsageError
        Names the array and the way out.
    """
    if not isinstance(column, np.ndarray):
        return
    if type(column) is not np.ndarray and isinstance(column, np.ma.MaskedArray):
        raise UsageError(
            f"{name} is a masked array, and no tensor has a mask; pass {name}.filled(value), and the mask as a column "
            "of its own if the model is to see it"
        )
    dtype = column.dtype
    wide = dtype.kind in "fc" and np.finfo(dtype).bits > 64
    if dtype.kind not in "biufc" or wide or not dtype.isnative:
        raise UsageError(
            f"{name} is a numpy array of {dtype.type.__name__} ({dtype.str}), which no tensor can hold; convert it "
            "to numbers, for instance with .astype(numpy.float32), or pass a list of samples and turn each into "
            "tensors in forward_fn"
        )


def bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Addresses of the first byte of an array and of the one after its last."""
    steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    address = array.__array_interface__["data"][0]
    return address + sum(min(step, 0) for step in steps), address + sum(max(step, 0) for step in steps) + array.itemsize


def keeps_strides(array: np.ndarray[Any, Any]) -> bool:
    """Whether numpy's own pickle does: it makes those of a dense array anew, also of axes of length 1."""
    if not array.size or not array.flags.forc:
        return not array.size
    if array.flags.c_contiguous:
        return array.strides == _dense(array.shape[::-1], array.itemsize)[::-1]
    return array.strides == _dense(array.shape, array.itemsize)


def _dense(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides, in bytes, of an array whose first axis lies closest."""
    return tuple(itertools.accumulate(shape, operator.mul, initial=itemsize))[: len(shape)]
