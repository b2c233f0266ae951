"""Arrays on their way to other processes: they lie there as they lay here, as kernels are chosen by strides."""

from __future__ import annotations

import copyreg
import ctypes
import itertools
import mmap
import operator
import os
from typing import Any

import numpy as np

ROOT_FACTOR = 4  # up to so many times the memory of a view, all of what it is a view of travels, once for all its views


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


class ArrayReducer:
    """How the arrays of one pickle are pickled.

    Parameters
    ----------
    by_file : bool
        Whether memory maps travel by their file, which is mapped when they are unpickled: it has to stay as it is.
    """

    def __init__(self, *, by_file: bool) -> None:
        self._by_file = by_file
        self._bytes: dict[int, tuple[Any, np.ndarray[Any, Any]]] = {}

    def reduced(self, array: np.ndarray[Any, Any]) -> Any:
        """What a pickler wants to know; NotImplemented where numpy's way, or that of a class of its own, will do."""
        if self._by_file and _mapped(array):
            return np.memmap, _map_of(array)
        if keeps_strides(array) or array.dtype.hasobject or not _as_numpy(type(array)):
            return NotImplemented
        return _strided, (type(array), *self._memory_under(array))

    def _memory_under(self, array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
        """An array that numpy would lay out anew as its memory, offset, shape, strides and dtype.

        Views of one array share the memory of that, unless they need little of it; those of a memory map its file.
        """
        low, high = bounds(array)
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        start, dense = bounds(root)[0], root.flags.forc and not root.dtype.hasobject
        if self._by_file and _mapped(root):
            memory = root
        elif dense and root.nbytes <= ROOT_FACTOR * (high - low):
            memory = self._bytes_of(root)
        else:
            start, size = low, high - low
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(low)).copy()
        offset = array.__array_interface__["data"][0] - start
        return memory, offset, array.shape, array.strides, array.dtype

    def _bytes_of(self, root: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A dense array, or its bytes if it is no plain one: the same object for all its views travels once."""
        if type(root) is np.ndarray and keeps_strides(root):
            return root
        if id(root) not in self._bytes:
            self._bytes[id(root)] = root, np.asarray(root).reshape(-1, order="A").view(np.uint8)
        return self._bytes[id(root)][1]


def _mapped(array: Any) -> bool:
    """Whether it is a whole memory map of a file that is there, with what that has."""
    whole = type(array) is np.memmap and isinstance(array.base, mmap.mmap) and array.mode != "c"
    return whole and array.filename is not None and os.path.exists(array.filename)


def _map_of(mapped: Any) -> tuple[Any, ...]:
    order = "F" if mapped.flags.f_contiguous and not mapped.flags.c_contiguous else "C"
    return mapped.filename, mapped.dtype, "c", mapped.offset, mapped.shape, order


def _as_numpy(kind: type[np.ndarray[Any, Any]]) -> bool:
    """Whether a class of arrays is pickled as numpy's own is, with nothing beside the values."""
    names = ("__reduce__", "__reduce_ex__", "__setstate__")
    return kind not in copyreg.dispatch_table and all(
        getattr(kind, name) is getattr(np.ndarray, name) for name in names
    )


def _strided(
    kind: type[np.ndarray[Any, Any]],
    memory: np.ndarray[Any, Any],
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
) -> np.ndarray[Any, Any]:
    flat: Any = memory.reshape(-1, order="A").view(np.uint8)
    return np.ndarray.__new__(kind, shape, dtype, flat, offset, strides)
