"""Random generators: seeded from keys, and left to the caller as they were found.

Covers ``random``, ``numpy.random`` and the generators of every framework that is loaded; and generators that user code
owns, where they can be found. Importing this imports no framework. The first samples of a dataset are read twice, to
see whether the same seed gives the same sample.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.definition import checks
from phalanx.definition.plain import hashed
from phalanx.definition.reachable import differences, reachable, values
from phalanx.errors import UsageError
from phalanx.plan.keys import MASK32, splitmix64
from phalanx.plan.orders import Indices
from phalanx.surroundings.interrupts import guarded
from phalanx.surroundings.turns import ALONE

Owned = dict[str, Any]  # generators that user code owns, by the path that leads there


class Global(NamedTuple):
    """A global random generator of a framework.

    Attributes
    ----------
    seed : callable
        ``seed(key)`` with a key of 64 bits.
    kept : callable
        Returns a function that restores the state that it has now.
    itself : Any
        The generator as an object, if it is one.
    """

    seed: Callable[[int], Any]
    kept: Callable[[], Callable[[], Any]]
    itself: Any = None


FRAMEWORKS: dict[str, Callable[[], Sequence[Global]]] = {}  # by the module without which there are none
TWICE = 4  # samples that each process reads twice
NEAR: list[Any] = []  # global ones in host memory: their state can be read without waiting


def seed(key: int, owned: Mapping[str, Any] | None = None) -> None:
    """Seed every global generator with the 64-bit ``key`` (numpy takes its low 32 bits), and owned ones with others."""
    random.seed(key)
    np.random.seed(key & MASK32)
    for module, listed in FRAMEWORKS.items():
        if module in sys.modules:
            for generator in listed():
                generator.seed(key)
    if owned:
        reseed(owned, key)


def reseed(owned: Mapping[str, Any], key: int) -> None:
    """Seed generators that user code owns, each with another key that follows from ``key`` and its path."""
    for path, generator in owned.items():
        _seed(generator, key ^ _stream(path))


def find(roots: Mapping[str, Any]) -> Owned:
    """The generators that user code owns, as far as ``roots`` lead to them; not the global ones."""
    known = [np.random.mtrand._rand, np.random.mtrand._rand._bit_generator, random.seed.__self__]  # type: ignore[attr-defined]
    loaded = [listed for module, listed in FRAMEWORKS.items() if module in sys.modules]
    theirs = [each.itself for listed in loaded for each in listed() if each.itself is not None]
    kinds = np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random, *map(type, theirs)
    strangers = {id(generator) for generator in known + theirs}
    found = {path: each for path, each in reachable(roots) if isinstance(each, kinds) and id(each) not in strangers}
    # Numpy's generators have their states in what feeds them.
    return {path: each.bit_generator if isinstance(each, np.random.Generator) else each for path, each in found.items()}


def places(owned: Mapping[str, Any]) -> list[Any]:
    """The states of the host's global generators and the owned ones; they are equal if nothing was drawn in between."""
    known = [random.seed.__self__, np.random.mtrand._rand]  # type: ignore[attr-defined]
    return list(map(_place, [*known, *NEAR, *owned.values()]))


def remembered(owned: Mapping[str, Any]) -> list[Callable[[], Any]]:
    """Functions that together put every global generator, and the owned ones, back into the state that it has now."""
    return [
        functools.partial(random.setstate, random.getstate()),
        _restoring_numpy(),
        *[each.kept() for module, listed in FRAMEWORKS.items() if module in sys.modules for each in listed()],
        *map(restoring, owned.values()),
    ]


class kept(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Restore every global generator, and the owned ones, on the way out. One thread at a time may be inside.

    This is a class, not a generator with ``finally``. When Ctrl-C leaves a generator behind, its ``finally`` runs when
    garbage is collected, in the middle of something else. Here only the turn is given back then.
    """

    def __init__(self, owned: Mapping[str, Any] | None = None) -> None:
        self._owned = owned or {}
        self._restore: list[Callable[[], Any]] = []
        self._inside = False

    def __enter__(self) -> None:
        ALONE.__enter__()
        self._inside = True
        self._restore = remembered(self._owned)

    def __exit__(self, *_: object) -> None:
        try:
            for put_back in self._restore:
                put_back()
        finally:
            self.__del__()

    def __del__(self) -> None:
        if self._inside:
            self._inside = False
            ALONE.__exit__()


class seeded(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Seed all generators with ``key`` inside the block, owned ones too; restore them after it, also after Ctrl-C."""

    def __init__(self, key: int, owned: Mapping[str, Any] | None = None) -> None:
        self._key = key
        self._owned = owned
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> None:
        try:
            with guarded():
                self._exits.enter_context(kept(self._owned))
                seed(self._key, self._owned)
        except BaseException:
            with guarded(leaving=True):
                self._exits.close()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            with guarded():
                self._exits.close()
        except BaseException:
            with guarded(leaving=True):
                self._exits.close()  # does nothing if it was done
            raise


@functools.cache
def _stream(path: str) -> int:
    """A number that keeps the keys of one generator apart from those of others."""
    return splitmix64(zlib.crc32(path.encode()))


def _state(generator: Any) -> Any:
    """The state that decides what it draws next; None if the operating system feeds it."""
    if isinstance(generator, np.random.BitGenerator):
        return generator.state  # type: ignore[attr-defined]
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    return generator.get_state()


def _place(generator: Any) -> Any:
    """The state of a generator, in a form that can be compared."""
    state = _state(generator)
    if state is None or isinstance(state, dict):
        return repr(state)
    parts = state if isinstance(state, tuple) else (state.numpy(),)
    return [part.tobytes() if isinstance(part, np.ndarray) else part for part in parts]


def _seed(generator: Any, key: int) -> None:
    """Seed a generator as a new one of its kind; one that the operating system feeds stays as it is."""
    if isinstance(generator, np.random.BitGenerator):
        generator.state = type(generator)(key).state  # type: ignore[call-arg, attr-defined]
    elif isinstance(generator, np.random.RandomState):
        generator.seed(key & MASK32)
    elif isinstance(generator, random.Random):
        generator.seed(key)
    else:
        generator.manual_seed(key)


def _restoring_numpy() -> Callable[[], Any]:
    """A function that puts numpy's global generator back behind ``numpy.random``, in the state that it has now."""
    legacy: Any = np.random
    bits, state = legacy.get_bit_generator(), legacy.get_state(legacy=False)
    if type(bits) is legacy.MT19937:
        state["state"]["key"] = state["state"]["key"].tolist()  # words of an array are taken one by one, 25 us in all

    def restore() -> None:
        if legacy.get_bit_generator() is not bits:  # user code has put another one there
            legacy.set_bit_generator(bits)
        legacy.set_state(state)

    return restore


def restoring(generator: Any) -> Callable[[], Any]:
    """A function that puts a generator back into the state that it has now."""
    state = _state(generator)
    if state is None:
        return bool
    if isinstance(generator, np.random.BitGenerator):
        return functools.partial(setattr, generator, "state", state)
    return functools.partial(getattr(generator, "setstate", None) or generator.set_state, state)


class FirstReadings:
    """Reads the first samples twice, to see whether the same seed gives the same sample.

    Parameters
    ----------
    origin : str
        What the data is called in a message.
    owned : dict
        The generators that are seeded before each sample; those that the dataset made when it was first used are added.
    holders : callable
        All user code that may hold generators, by name, the dataset as ``origin``.

    Attributes
    ----------
    owned : dict
    left : int
        How many samples are still to be read twice.
    """

    def __init__(self, origin: str, owned: Owned, holders: Callable[[], dict[str, Any]]) -> None:
        self._origin = origin
        self.owned = owned
        self._holders = holders
        self.left = TWICE

    def read(self, read: Callable[[Indices], list[Any]], indices: Indices) -> list[Any]:
        """What ``read(indices)`` gives, with all generators seeded that can be found."""
        ones = [indices[position : position + 1] for position in range(min(self.left, len(indices)))]
        return [self._twice(read, one) if self.left else read(one)[0] for one in ones] + read(indices[len(ones) :])

    def _twice(self, read: Callable[[Indices], list[Any]], one: Indices) -> Any:
        """Read a sample twice, compare, and return the first.

        Raises
        ------
        UsageError
            The dataset keeps what it drew, or writes to its own arrays.
        """
        sample, drawn = read(one)[0], places(self.owned)
        owned = find(self._holders()) if self.left == TWICE else {}
        self.left -= 1
        if owned.keys() - self.owned.keys():
            self.owned.update(owned)
            sample, drawn = read(one)[0], places(self.owned)
        again = read(one)[0]
        text = f"sample {one[0]} of {self._origin}"
        if places(self.owned) != drawn:
            raise UsageError(
                f"{text} drew other random numbers when it was read again with the same seeds: the dataset keeps what "
                "it has drawn, so the answer depends on who reads it first; keep samples as they are before random "
                "numbers are drawn for them, and draw those in each __getitem__"
            )
        if hashed(sample) == hashed(again):
            return sample
        text += " was another when it was read again with the same seeds"
        if written := self._written(read, one):
            raise UsageError(
                f"{text}, as reading it writes to {', '.join(written)}; change a copy: x = x - mean, not x -= mean"
            )
        self.left = 0  # said once
        checks.warn(
            f"{text}, so the answer depends on who reads it: let the dataset draw from random, numpy.random or torch, "
            "or keep its generator in an attribute, where phalanx finds and seeds it"
        )
        return sample

    def _written(self, read: Callable[[Indices], list[Any]], one: Indices) -> list[str]:
        """The arrays of the dataset that reading a sample changes, by path."""
        roots = {self._origin: self._holders()[self._origin]}
        before = values(roots)
        read(one)
        after = values(roots)
        return [path for path in differences(before, after) if isinstance(after.get(path), tuple)]  # of arrays
