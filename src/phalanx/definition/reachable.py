"""What user code holds: every object that functions, datasets and models of a recipe lead to.

Followed are attributes, items of containers, arguments of partials, and of functions closures, defaults and the globals
that they name. Not followed: code of installed packages (attributes of their objects are), sets, which have no order,
and containers of more than ``MOST`` items, which hold data. A path names the same object in every process.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

MOST = 1000  # items of a container
ALL = 100_000  # objects
PLAIN = (str, bytes, bytearray, int, float, complex, type(None), range)
INSTALLED = tuple(
    os.path.join(path, "")
    for path in {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), os.path.dirname(__file__)}
    if path
)


def reachable(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, object) of all that ``roots`` lead to, each object once, with the first path that leads there."""
    left = deque(roots.items())
    seen: dict[int, Any] = {}  # objects are kept, so that no other gets their id meanwhile
    while left and len(seen) < ALL:
        path, thing = left.popleft()
        if not isinstance(thing, PLAIN) and id(thing) not in seen:
            seen[id(thing)] = thing
            yield path, thing
            left.extend((path + step, part) for step, part in _parts(thing))


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, ModuleType):
        return
    if isinstance(thing, FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, MethodType):
        yield from ((".__self__", thing.__self__), (".__func__", thing.__func__))
    elif isinstance(thing, BuiltinFunctionType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, dict) and len(thing) <= MOST:
        for number, (key, value) in enumerate(thing.items()):
            yield f"[{key!r}]" if isinstance(key, (str, int)) else f"[item {number}]", value
    elif isinstance(thing, (list, tuple, deque)) and len(thing) <= MOST:
        for number, value in enumerate(thing):
            yield f"[{number}]", value
    if isinstance(thing, type):
        if not _installed(thing.__module__):
            yield from _named(dict(vars(thing)))
            yield from ((f".__bases__[{number}]", base) for number, base in enumerate(thing.__bases__))
    else:
        yield from _named(_attributes(thing))
        yield ".__class__", type(thing)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" (its variable {name})", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    if not _installed(function.__module__):
        names = dict.fromkeys(_names(function.__code__))
        for name in names:
            value = function.__globals__.get(name)
            if not isinstance(value, ModuleType):
                yield f" (its global {name})", value
            elif not _installed(value.__name__):
                for inner in names:
                    yield f" (its global {name}.{inner})", vars(value).get(inner)


def _names(code: CodeType) -> Iterator[str]:
    """Globals and attributes that code names, nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _named(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items():
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        yield f".{name}", value


def _attributes(thing: Any) -> dict[str, Any]:
    """Those that an object has without running its code."""
    found: dict[str, Any] = {}
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                found[name] = object.__getattribute__(thing, name)
            except AttributeError:
                continue
    try:
        found.update(object.__getattribute__(thing, "__dict__"))
    except (AttributeError, TypeError):
        return found
    return found


@functools.lru_cache(maxsize=4096)
def _installed(module: str | None) -> bool:
    """Whether code of this module is the interpreter's, or an installed package's; what has no file is the user's."""
    if module == "__main__":
        return False
    found = sys.modules.get(module or "")
    file = getattr(found, "__file__", None)
    if found is None or file is None:
        return module in sys.builtin_module_names
    return file.startswith(INSTALLED)
