"""Samples as copies: as user code hands them out, and for user code that may change them.

A dataset or a stream may fill one buffer for all of its samples, or write to what it keeps. A ``collate_fn`` may write
to samples, and so may a model that is handed them as they are. A share that is read once more, in the next phase of a
step or after a worker's death, is to be what it was.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from typing import Any

import numpy as np

from phalanx.definition.arrays import bounds


def own(sample: Any) -> Any:
    """Its arrays, and containers and dataclasses of them, as copies; strides stay. Other objects are themselves."""
    kind: Any = type(sample)
    if kind is tuple or kind is list:
        return kind(map(own, sample))
    if hasattr(kind, "new_empty_strided") and not vars(sample):
        return _tensor(sample)
    if kind is np.ndarray or kind is np.memmap:
        return _array(sample)
    if isinstance(sample, tuple) and callable(getattr(sample, "_make", None)):
        return kind._make(map(own, sample))
    if isinstance(sample, (dict, UserDict)):
        copied: Any = copy.copy(sample)
        for key, value in sample.items():
            copied[key] = own(value)
        return copied
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        copied = copy.copy(sample)
        for field in dataclasses.fields(sample):
            object.__setattr__(copied, field.name, own(getattr(sample, field.name)))
        return copied
    return sample


def _array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    copied = array.copy(order="K")
    if copied.strides == array.strides or array.dtype.hasobject or not array.size:
        return copied
    low, high = bounds(array)
    below = array.__array_interface__["data"][0] - low
    copied = np.ndarray(array.shape, array.dtype, np.empty(high - low, np.uint8), below, array.strides)
    copied[...] = array
    return copied


def _tensor(tensor: Any) -> Any:
    if tensor.requires_grad:  # a copy would be another leaf, or hang on this one's graph
        return tensor
    copied = tensor.clone()
    try:
        same = copied.stride() == tensor.stride()
        return copied if same else tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
    except RuntimeError:  # a sparse one, or elements that lie in one place, as those of an expanded one
        return copied
