"""Samples as copies: as user code hands them out, and for user code that may change them.

A dataset or a stream may fill one buffer for all of its samples. A ``collate_fn`` may write to samples, and so may a
model that is handed them as they are. A share that is read once more, in the next phase of a step or after a worker's
death, is to be what it was; so the first samples of a dataset are read twice, to see whether they are.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np

from phalanx.definition import checks, generators
from phalanx.definition.arrays import bounds
from phalanx.definition.data import alike, content, is_array
from phalanx.definition.reachable import reachable
from phalanx.errors import UsageError
from phalanx.plan import Indices

TWICE = 4  # samples that each process reads twice
UNCHANGING = frozenset({bool, int, float, complex, str, bytes, type(None)})  # kinds of values that cannot be written to
LOOKED_AT_BYTES = 1 << 30  # of an array of a dataset that gives another sample when it is read again


def own(sample: Any) -> Any:
    """Its arrays, and containers and dataclasses of them, as copies; strides stay. Other objects are themselves."""
    kind: Any = type(sample)
    if kind is tuple or kind is list:
        parts = []
        for part in sample:
            # Most parts are one of the first two, and this is done for each sample: a call for each would be felt.
            if type(part) in UNCHANGING:
                parts.append(part)
            elif type(part) is np.ndarray and (copied := part.copy("K")).strides == part.strides:
                parts.append(copied)
            else:
                parts.append(own(part))
        return kind(parts)
    if hasattr(kind, "new_empty_strided") and not vars(sample):
        if sample.requires_grad:  # a copy would be another leaf, or hang on this one's graph
            return sample
        copied = sample.clone()
        try:
            same = copied.stride() == sample.stride()
            return copied if same else sample.new_empty_strided(sample.shape, sample.stride()).copy_(sample)
        except RuntimeError:  # a sparse one, or elements that lie in one place, as those of an expanded one
            return copied
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


class FirstReadings:
    """Looks at the first samples that are read here: whether reading one is repeated alike under the same seed.

    Parameters
    ----------
    origin : str
        What the data is called in a message.
    owned : dict
        The generators that are seeded before each sample; those that the dataset made when it was first used are added.
    holders : callable
        All user code that may hold generators, by name, the dataset as ``origin``.
    """

    def __init__(self, origin: str, owned: generators.Owned, holders: Callable[[], dict[str, Any]]) -> None:
        self._origin = origin
        self._owned = owned
        self._holders = holders
        self._left = TWICE

    def read(self, read: Callable[[Indices], list[Any]], indices: Indices) -> list[Any]:
        """What ``read(indices)`` gives, with all generators seeded that can be found."""
        if self._left <= 0:
            return read(indices)
        ones = [indices[place : place + 1] for place in range(min(self._left, len(indices)))]
        return [self._twice(read, one) if self._left > 0 else read(one)[0] for one in ones] + read(indices[len(ones) :])

    def _twice(self, read: Callable[[Indices], list[Any]], one: Indices) -> Any:
        """What the first of two readings of a sample gives.

        Raises
        ------
        UsageError
            The dataset keeps what it drew, or writes to its own arrays.
        """
        sample, drawn = read(one)[0], generators.places(self._owned)
        found = generators.find(self._holders()) if self._left == TWICE else {}
        self._left -= 1
        if found.keys() - self._owned.keys():
            self._owned.update(found)
            sample, drawn = read(one)[0], generators.places(self._owned)
        again = read(one)[0]
        told = f"sample {one[0]} of {self._origin}"
        if generators.places(self._owned) != drawn:
            raise UsageError(
                f"{told} drew other random numbers when it was read again with the same seeds: the dataset keeps what "
                "it has drawn, so the answer depends on who reads it first; keep samples as they are before random "
                "numbers are drawn for them, and draw those in each __getitem__"
            )
        if alike(sample, again):
            return sample
        told += " was another when it was read again with the same seeds"
        if written := self._written(read, one):
            raise UsageError(
                f"{told}, as reading it writes to {', '.join(written)}; change a copy: x = x - mean, not x -= mean"
            )
        self._left = 0  # said once
        checks.warn(
            f"{told}, so the answer depends on who reads it: let the dataset draw from random, numpy.random or torch, "
            "or keep its generator in an attribute, where phalanx finds and seeds it"
        )
        return sample

    def _written(self, read: Callable[[Indices], list[Any]], one: Indices) -> list[str]:
        """The arrays of the dataset that reading a sample changes."""
        held = reachable({self._origin: self._holders()[self._origin]})
        arrays = [(path, each) for path, each in held if not isinstance(each, type) and is_array(each)]
        before = [(path, each, _checksum(each)) for path, each in arrays if each.nbytes <= LOOKED_AT_BYTES]
        read(one)
        return [path for path, each, known in before if _checksum(each) != known]


def _checksum(array: Any) -> int:
    return zlib.crc32(content(array)[-1])
