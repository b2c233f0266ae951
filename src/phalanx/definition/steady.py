"""Notices that callbacks, or a loop around the run, change what the recipe's code reads.

In this process such a change would count, and in workers, which have copies, it would not. So values are compared from
the end of a step to the beginning of the next one. What a step's own code changes in between is left out from then on:
if it matters, it is found where a replica is computed twice.

Only what the code can read is compared: globals and variables that it names, and attributes whose names it says
somewhere. So a callback may keep what it likes in an object that a loss hangs on. Not seen: contents of arrays, long
containers but for their lengths, names that are put together (getattr), environment variables, files.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from phalanx.definition import checks
from phalanx.definition.data import Samples
from phalanx.definition.described import roots_of
from phalanx.definition.fields import Definition
from phalanx.definition.reachable import PLAIN, checksum, function_of, held_by, installed, module_of, named, reachable
from phalanx.errors import UsageError

CALLED = ("forward", "__getitem__", "__getitems__", "__wrapped__", "_modules", "_buffers", "_parameters")  # unnamed
CONTAINERS = (dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict, Counter)
MOST = 128  # values of a root, the nearest first: comparing them takes about 5 us
ITEMS = 32  # of a container: a longer one holds data
FOUND = 2000  # objects that make_model leads to, among which classes are looked for
SHOWN = 80  # letters of two values
CELL = operator.attrgetter("cell_contents")
Part = tuple[Any, ...]  # the step to it, itself, and any number of (get, key) by which it is read again
Readers = dict[Any, list[Any]]
Values = dict[str, tuple[Any, int | None]]  # with its length, if it is a container
NAMED = (type, FunctionType, MethodType, BuiltinFunctionType)
Absent = object()
ABSENT = Absent, None
LENGTH = " (its length)"
OUTSIDE = "a callback, or code around the run,"


class Steady:
    """What a recipe's code reads, as it was when steps last ended.

    Parameters
    ----------
    definition : Definition
    """

    def __init__(self, definition: Definition) -> None:
        roots = {name: value for name, value in roots_of(definition) if name not in ("make_model", "batch_sampler")}
        if not isinstance(definition.source, Samples):  # columns are watched elsewhere; a stream is read in one process
            del roots["data"]
        made = itertools.islice(reachable({"make_model": definition.make_model}), FOUND)
        classes = {path: value for path, value in made if isinstance(value, type) and not installed(value.__module__)}
        self._roots = {**roots, **classes}
        self._names = {name: Counter[str]() for name in self._roots}
        self._own: set[str] = set()  # what steps change
        self._warned = False
        self._adopt(*self._look())

    def check(self, steps: int) -> None:
        """Refuse what became another value since steps ended; what only grew is a warning, once.

        Raises
        ------
        UsageError
            A callback, or code around the run, changed what the recipe's code reads.
        """
        if self._same():
            return
        looked = self._look()
        grown: list[str] = []
        for path, old, new in _changed(self._values, looked[0]):
            if old is None or old is Absent or (path.endswith(LENGTH) and new > old):
                grown.append(path)
            else:
                texts = f"was {old} and is {new} now" if len(f"{old}{new}") < SHOWN else "is another one now"
                raise UsageError(
                    f"{path} {texts}: {OUTSIDE} changed it before step {steps}. Workers have copies of it, so that "
                    "this would count in some engines only. Compute it where it is read, from phalanx.current_step() "
                    "or phalanx.current_epoch(); what only counts or logs, keep where the recipe's code does not read"
                )
        self._adopt(*looked)
        if grown and not self._warned:
            self._warned = True
            checks.warn(
                f"{OUTSIDE} adds to {grown[0]}, which the recipe's code can read; workers have copies and do not see "
                "that, so nothing that is computed may follow from it"
            )

    def settle(self) -> None:
        """A step or an evaluation has ended: what it changed is its own from now on."""
        if not self._same():
            changed = _changed(self._values, self._look()[0], strictly=True)
            self._own |= {path.removesuffix(LENGTH) for path, *_ in changed}
            self._adopt(*self._look())

    def _same(self) -> bool:
        """Whether every value is the very object that it was: all that most steps do, so it runs without a loop."""
        try:
            read = itertools.chain.from_iterable(map(map, self._gets, self._keys))
            return all(map(operator.is_, read, self._read)) and list(map(len, self._containers)) == self._lengths
        except Exception:  # an item or attribute is gone
            return False

    def _adopt(self, values: dict[str, Any], readers: dict[Any, list[Any]]) -> None:
        self._values, self._containers = values, readers.pop(len, [])
        self._gets, self._keys = list(readers), list(readers.values())
        self._read = [value for get, keys in readers.items() for value in map(get, keys)]
        self._lengths = list(map(len, self._containers))

    def _look(self) -> tuple[Values, Readers]:
        """All values by their paths, and how they are read again."""
        values, readers = Values(), defaultdict[Any, list[Any]](list)
        for name, root in self._roots.items():
            known = -1
            while known != len(self._names[name]):  # methods that were found say more names
                known = len(self._names[name])
                values_here, readers_here = self._walked(name, root, self._names[name])
            values |= values_here
            for get, keys in readers_here.items():
                readers[get] += keys
        return values, readers

    def _walked(self, name: str, root: Any, names: Counter[str]) -> tuple[Values, Readers]:
        values, readers, seen = Values(), defaultdict[Any, list[Any]](list), dict[int, Any]()
        queue: deque[Part] = deque([(name, root)])
        while queue and len(values) < MOST:
            path, value, *reads = queue.popleft()
            if path in self._own or (isinstance(value, ModuleType) and installed(value.__name__)):
                continue
            contains = type(value) in CONTAINERS
            values[path] = value, len(value) if contains else None
            for get, key in reads:
                readers[get].append(key)
            if not isinstance(value, PLAIN) and id(value) not in seen:
                seen[id(value)] = value
                if contains:
                    readers[len].append(value)
                queue.extend((path + step, *part) for step, *part in _parts(value, names))
        return values, readers


def _parts(value: Any, names: Counter[str]) -> Iterator[Part]:
    """What code with these ``names`` can read of a value; adds the names that code says which is found here."""
    if type(value) in CONTAINERS:
        yield from _items(value)
        return
    if isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif isinstance(value, FunctionType):
        yield from _of_function(value, names)
    elif not hasattr(type(value), "__array__"):
        yield from _attributes(value, names)


def _items(value: Any) -> Iterator[Part]:
    if len(value) > ITEMS or isinstance(value, (set, frozenset)):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item, (value.get, key)) for key, item in value.items())
    else:
        yield from ((f"[{number}]", item, (value.__getitem__, number)) for number, item in enumerate(value))


def _of_function(function: FunctionType, names: Counter[str]) -> Iterator[Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield f" (its variable {name})", cell.cell_contents, (CELL, cell)
    yield from ((".__defaults__", function.__defaults__), (".__kwdefaults__", function.__kwdefaults__))
    if module_of(function) is None:
        _, read, said = named(function.__code__)
        names.update(said)
        given = function.__globals__
        yield from ((f" (its global {name})", given[name], (given.get, name)) for name in read if name in given)
    yield from _attributes(function, names)


def _attributes(value: Any, names: Counter[str]) -> Iterator[Part]:
    """Attributes of an object, class, module or function that code names or calls, without running any."""
    own: Mapping[str, Any] = {}
    with contextlib.suppress(AttributeError, TypeError):
        own = object.__getattribute__(value, "__dict__")
    slots = {} if isinstance(value, type) else held_by(value)
    above = value.__mro__[1:] if isinstance(value, type) else type(value).__mro__
    called = CALLED if any("forward" in vars(kind) for kind in above) else (*CALLED, "__call__")
    for name in dict.fromkeys((*called, *names)):
        scope = next((scope for scope in (own, slots, *map(vars, above)) if name in scope), None)
        if scope is None:
            continue
        part = function_of(scope[name])
        if isinstance(part, FunctionType):
            if name in called or module_of(part) is None:  # of a logger, say, it does not matter what it keeps
                names.update(named(part.__code__)[2])
        elif inspect.isroutine(part) and scope is not own:  # of C
            continue
        if scope is slots:
            yield f".{name}", part, (functools.partial(object.__getattribute__, value), name)
        elif scope is own or isinstance(part, FunctionType):  # methods are not looked at again
            yield f".{name}", part, *([(own.get, name)] if scope is own else [])
        else:  # the object may come to have its own
            yield f".{name}", part, (own.get, name), (scope.get, name)


def _changed(before: Values, after: Values, *, strictly: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """The paths whose values differ, and both; ``strictly``: equal ones that are other objects do, too."""
    for path in {**before, **after}:
        (old, length), (new, now) = before.get(path, ABSENT), after.get(path, ABSENT)
        contain = length is not None and now is not None
        if contain and length != now:
            yield f"{path}{LENGTH}", length, now
        elif old is not new and (strictly or not (contain or _alike(old, new))):
            yield path, old, new


def _alike(old: Any, new: Any) -> bool:
    if new is Absent or isinstance(new, PLAIN):  # what is too far away now may have been there before
        return new is Absent or repr(old) == repr(new)
    if hasattr(type(new), "__array__"):
        return hasattr(type(old), "__array__") and checksum(old) == checksum(new)
    return old == new if isinstance(new, NAMED) else type(old) is type(new)
