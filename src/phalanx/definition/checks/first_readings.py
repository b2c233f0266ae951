"""The first samples that a process reads of a dataset are read twice, to see whether that is repeated alike."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from phalanx.definition import checks, generators
from phalanx.definition.data import alike, content, is_array
from phalanx.definition.reachable import reachable
from phalanx.errors import UsageError
from phalanx.plan import Indices

TWICE = 4  # samples that each process reads twice
LOOKED_AT_BYTES = 1 << 30  # of an array of a dataset that gives another sample when it is read again


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
        if not self._left:
            return read(indices)
        ones = [indices[place : place + 1] for place in range(min(self._left, len(indices)))]
        return [self._twice(read, one) for one in ones] + read(indices[len(ones) :])

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
                f"{told} drew other random numbers when it was read again with the same seeds, so the dataset keeps "
                "what it has drawn, and the answer depends on who reads it first: keep samples as they are before "
                "random numbers are drawn for them, and draw those in each __getitem__; or draw all that is kept when "
                "the dataset is made"
            )
        if not alike(sample, again):
            written = self._written(read, one)
            if written:
                raise UsageError(
                    f"{told} was another when it was read again, as reading it writes to {', '.join(written)}: change "
                    "a copy, as in x = x - mean where it was x -= mean"
                )
            checks.warn(
                f"{told} was another when it was read again with the same seeds, so the answer depends on who reads "
                "it: let the dataset draw from random, numpy.random or torch, or keep its generator in an attribute, "
                "where phalanx finds and seeds it"
            )
        return sample

    def _written(self, read: Callable[[Indices], list[Any]], one: Indices) -> list[str]:
        """The arrays of the dataset that reading a sample changes."""
        held = reachable({self._origin: self._holders()[self._origin]})
        arrays = {path: each for path, each in held if not isinstance(each, type) and is_array(each)}
        arrays = {path: each for path, each in arrays.items() if each.nbytes <= LOOKED_AT_BYTES}
        before = {path: _checksum(each) for path, each in arrays.items()}
        read(one)
        return [path for path, each in arrays.items() if _checksum(each) != before[path]]


def _checksum(array: Any) -> int:
    return zlib.crc32(content(array)[-1])
