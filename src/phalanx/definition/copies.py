"""Samples as copies, for code that may change them: a ``collate_fn``, or a model that is handed samples as they are.

Others hold the same samples: a list, a dataset that keeps them, a stream until its step is done. A share that is read
once more, in the next phase of a step or after a worker's death, is to be what it was.
"""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import numpy as np

from phalanx.definition.arrays import bounds


def own(sample: Any) -> Any:
    """Its arrays, tensors, lists, tuples and dicts as copies; strides stay. Objects of other classes are themselves."""
    kind: Any = type(sample)
    if kind is np.ndarray:
        return _array(sample)
    if callable(getattr(kind, "new_empty_strided", None)) and not vars(sample):
        return _tensor(sample)
    if kind is tuple or kind is list:
        return kind(map(own, sample))
    if isinstance(sample, tuple) and callable(getattr(sample, "_make", None)):
        return kind._make(map(own, sample))
    if isinstance(sample, (dict, UserDict)):
        copied: Any = copy.copy(sample)
        for key, value in sample.items():
            copied[key] = own(value)
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
    try:
        return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
    except RuntimeError:  # a sparse one, or elements that lie in one place, as those of an expanded one
        return tensor.clone()
