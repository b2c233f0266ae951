"""Notices that callbacks, or a loop around the run, change what the recipe's code reads.

In this process such a change would count, and in workers, which have copies, it would not. So values are compared from
the end of a step to the beginning of the next one. What a step's own code changes in between is left out from then on:
if it matters, it is found where a replica is computed twice.

Only what the code can read is compared: globals and variables that it names, and attributes whose names it says
somewhere. So a callback may keep what it likes in an object that a loss hangs on. Not seen: contents of arrays, long
containers and sets but for their lengths, names that are put together (getattr), environment variables, files.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from phalanx.definition import checks
from phalanx.definition.data import Columns, Samples
from phalanx.definition.described import roots_of
from phalanx.definition.fields import Definition
from phalanx.definition.plain import content
from phalanx.definition.reachable import (
    ATTRIBUTE,
    FEW,
    GLOBAL,
    PLAIN,
    checksum,
    installed,
    module_of,
    named,
    own_of,
    reachable,
)
from phalanx.errors import UsageError

CALLED = ("forward", "__call__", "__getitem__", "__getitems__")  # methods that are called without being named
NAMES = (*CALLED, "__wrapped__", "_modules", "_buffers", "_parameters")
CONTAINERS: tuple[Any, ...] = (dict, list, set, deque)
MOST = 128  # objects that a root leads to, the nearest first
FOUND = 2000  # objects that make_model leads to, among which classes are looked for
SHOWN = 80  # letters of two values
CELL = operator.attrgetter("cell_contents")
KINDS = (type, FunctionType, MethodType, BuiltinFunctionType, set, frozenset)
WHOLE_BYTES = 1 << 18  # of a column that is compared whole
ROWS = 32  # of others
EMPTY, LENGTH, GONE = object(), " (its length)", "gone"
OUTSIDE = "a callback, or code around the run,"


class Steady:
    """What a recipe's code reads, as it was when steps last ended.

    Parameters
    ----------
    definition : Definition
    callbacks : sequence
        What they call themselves is no code of the recipe.
    """

    def __init__(self, definition: Definition, callbacks: Sequence[Any] = ()) -> None:
        calls = [getattr(type(callback), "__call__", None) for callback in callbacks]  # noqa: B004
        self._theirs = {getattr(call, "__code__", None) for call in calls}
        roots = dict(roots_of(definition))
        if not isinstance(definition.source, Samples):  # columns are watched elsewhere; a stream is read in one process
            del roots["data"]
        del roots["batch_sampler"]  # called whenever an epoch's batches are needed
        made = itertools.islice(reachable({"make_model": roots.pop("make_model")}), FOUND)
        roots |= {path: value for path, value in made if isinstance(value, type)}
        self._roots = [(name, root, set(NAMES)) for name, root in roots.items()]
        self._own: set[str] = set()  # what steps change
        self._warned = False
        self._reads, self._known = self._look()

    def check(self, steps: int) -> None:
        """Refuse what became another value since steps ended; what only grew, or was None, is a warning, once.

        Raises
        ------
        UsageError
            A callback, or code around the run, changed what the recipe's code reads.
        """
        if self._same():
            return
        reads, known = self._look()
        before = zip(self._known.items(), self._reads, strict=True)
        left = {path: _got(*read) for (path, old), read in before if path not in known and old is not None}
        gone = {path: GONE for path, now in left.items() if now is EMPTY or now is None}  # else only out of sight
        added = list[str]()
        for path, new in (gone | known).items():
            old = self._known.get(path)
            if new is not GONE and _alike(old, new):
                continue
            if old is not None and not (path.endswith(LENGTH) and new > old):
                texts = f"was {old} and is {new} now" if len(f"{old}{new}") < SHOWN else "is another one now"
                raise UsageError(
                    f"{path} {texts}: {OUTSIDE} changed it before step {steps}. Workers have copies of it, so that "
                    "this would count in some engines only. Compute it where it is read, from phalanx.current_step() "
                    "or phalanx.current_epoch(); what only counts or logs, keep where the recipe's code does not read"
                )
            added.append(path)
        if added and not self._warned:
            self._warned = True
            checks.warn(
                f"{OUTSIDE} adds to {added[0]}, which the recipe's code can read; workers have copies and do not see "
                "that, so nothing that is computed may follow from it"
            )
        self._reads, self._known = reads, known

    def settle(self) -> None:
        """A step or an evaluation has ended: what it changed is its own from now on."""
        if not self._same():
            pairs = zip(self._known.items(), self._reads, strict=True)
            self._own |= {path.removesuffix(LENGTH) for (path, old), (get, key) in pairs if _got(get, key) is not old}
            self._reads, self._known = self._look()

    def _same(self) -> bool:
        """Whether every value is the very object that it was. Most steps do no more, so it is short."""
        try:
            return all(map(operator.is_, [get(key) for get, key in self._reads], self._known.values()))
        except Exception:  # an item, a variable or an attribute is gone
            return False

    def _look(self) -> tuple[list[Any], dict[str, Any]]:
        """How all values are read again, and themselves by their paths."""
        reads, known = list[Any](), dict[str, Any]()
        for name, root, names in self._roots:
            before, found = None, list[tuple[str, Any]]()
            while before != (before := len(names) + len(self._own)):  # methods that were found say more names
                found = list(itertools.islice(reachable({name: root}, names, self._own), MOST))
                for path, value in found:
                    for code in [value, *(getattr(type(value), name, None) for name in CALLED)]:
                        if not isinstance(code, FunctionType) or (code is value) == bool(module_of(code)):
                            continue  # of an object, a user's own methods are found by themselves
                        if code.__code__ in self._theirs or path.endswith(".__self__.__class__.__call__"):
                            self._own.add(path)
                        else:
                            names |= named(code.__code__, ATTRIBUTE)
                            self._own |= _stored(path, value, code.__code__)
            for path, value in found:
                for step, get, key in _reads(value, names):
                    if (now := _got(get, key)) is not EMPTY and not {path + step} & (self._own | known.keys()):
                        known[path + step] = now
                        reads.append((get, key))
        return reads, known


def _stored(path: str, value: Any, code: CodeType) -> set[str]:
    """What code writes by itself, by its path: a shard that is open, a counter."""
    if code is not getattr(value, "__code__", None):
        return {f"{path}.{name}" for name in named(code, ("STORE_ATTR",))}
    owner, method, _ = path.rpartition(".__class__.")
    own = {f"{owner}.{name}" for name in named(code, ("STORE_ATTR",)) if method}
    own |= {f"{path} (its variable {name})" for name in named(code, ("STORE_DEREF",))}
    return own | {f"{path} (its global {name})" for name in named(code, ("STORE_GLOBAL",))}


def _got(get: Callable[[Any], Any], key: Any) -> Any:
    try:
        return get(key)
    except Exception:  # a variable or attribute that has no value
        return EMPTY


def _size(value: Any, size: int) -> int:
    """How long it is: as long as no length changes, the very same number, as all values are compared."""
    return size if (now := len(value)) == size else now


def _base(value: Any) -> Any:
    """The built-in class of a container: the methods of a subclass may run the user's code."""
    return next(kind for kind in CONTAINERS if isinstance(value, kind))


def _reads(value: Any, names: Iterable[str]) -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    """The step to each part of a value that code with these names can read, and get(key), which reads it again."""
    if isinstance(value, CONTAINERS):
        yield LENGTH, functools.partial(_size, value), len(value)
        if len(value) <= FEW:
            usual = _base(value)
            for number, key in enumerate([*usual.__iter__(value)]):
                if isinstance(value, dict):  # get adds nothing to a defaultdict
                    yield f"[{key!r}]", functools.partial(dict.get, value), key
                elif not isinstance(value, set):
                    yield f"[{number}]", functools.partial(usual.__getitem__, value), number
        return
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f" (its variable {name})", CELL, cell) for name, cell in cells)
        for name in [] if module_of(value) else named(value.__code__, GLOBAL):
            part = value.__globals__.get(name)
            if not isinstance(part, ModuleType):
                yield f" (its global {name})", value.__globals__.__getitem__, name
            elif not installed(part.__name__):
                yield from ((f" (its global {name}.{inner})", vars(part).__getitem__, inner) for inner in names)
    own, above = own_of(value), [vars(kind) for kind in type(value).__mro__]
    if isinstance(value, type):
        own, above = {} if installed(value.__module__) else own, []
    for name in names:
        usual = next((scope[name] for scope in above if name in scope), None)
        if name in own:
            yield f".{name}", own.__getitem__, name
        elif inspect.ismemberdescriptor(usual):
            yield f".{name}", usual.__get__, value
        elif usual is not None and name not in CALLED and not isinstance(usual, property):
            yield f".{name}", functools.partial(own.get, name), usual


def _alike(old: Any, new: Any) -> bool:
    """Whether a value is the same as before; what a container or an object holds is compared by itself."""
    if old is new or type(old) is not type(new):
        return old is new
    if isinstance(new, PLAIN):
        return repr(old) == repr(new)
    if isinstance(new, tuple):
        return len(old) == len(new) and all(map(_alike, old, new))
    if isinstance(new, CONTAINERS) and not isinstance(new, set):
        return len(old) == len(new) <= FEW
    return (
        checksum(old) == checksum(new) if hasattr(type(new), "__array__") else not isinstance(new, KINDS) or old == new
    )


class Unchanged:
    """Notices that the caller changes columns in place.

    Tensors count their changes. Arrays of numpy do not, so they are compared, whole or at some rows, when asked for.

    Parameters
    ----------
    source : Columns, Samples or None
    """

    def __init__(self, source: Columns | Samples | None) -> None:
        self._arrays = source.arrays if isinstance(source, Columns) else ()
        versions = [(number, array, _version(array)) for number, array in enumerate(self._arrays)]
        self._counting = [known for known in versions if known[-1] is not None]  # looked at before every step
        self._sums = [_checksum(array) for array in self._arrays]

    def check(self, *, contents: bool) -> None:
        """Refuse to go on with other data; ``contents``: look at what numpy's arrays hold, too.

        Raises
        ------
        UsageError
            A column was changed since this was made.
        """
        for number, array, version in self._counting:
            if array._version != version:
                raise self._changed(number)
        for number, array in enumerate(self._arrays if contents else ()):
            if _checksum(array) != self._sums[number]:
                raise self._changed(number)

    def _changed(self, number: int) -> UsageError:
        return UsageError(
            f"data was changed in place while the run was open (column {number} of {len(self._arrays)}), which "
            "workers do not see; change it between runs, pass a dataset that computes samples, or bring "
            "batches yourself: data=None, then run.step(batch)"
        )


def _version(array: Any) -> int | None:
    """How often a tensor was changed; None for what does not count."""
    try:
        return getattr(array, "_version", None)
    except RuntimeError:  # made in inference mode
        return None


def _checksum(array: Any) -> int | None:
    if _version(array) is not None:
        return None
    if array.nbytes <= WHOLE_BYTES:
        return zlib.crc32(content(array))
    rows = np.unique(np.linspace(0, array.shape[0] - 1, ROWS).astype(np.int64))
    # Slices go by position; a number alone may be a label, as in a column of pandas.
    return zlib.crc32(b"".join(content(array[row : row + 1]) for row in rows.tolist()))
