"""What user code holds: every object that functions, datasets and models of a recipe lead to. Runs none of that code.

It follows attributes, items of containers, arguments of partials, and the closures, defaults and named globals of
functions. It does not follow code of installed packages (but attributes of their objects), sets, which have no order,
and containers of more than ``MOST`` items, which hold data. A path names the same object in every process; the seeds
of random generators follow from paths, so their spelling decides bits.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os
import platform
import sys
import zlib
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from phalanx.definition.plain import content
from phalanx.surroundings.sources import is_installed, nested

OWN = __name__.partition(".")[0]
PYTHON = "python"
MOST = 1000  # items of a container
FEW = 32  # items of one whose values are compared after every step
ALL = 100_000  # objects
SHORT = 60  # letters of two values that are shown
Place = tuple[Any, Any]  # a list or dict, and what it held
LIST = "a list"
GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # instructions that read one
ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
PLAIN = (str, bytes, bytearray, int, float, complex, type(None), range)


def reachable(
    roots: Mapping[str, Any],
    names: Container[str] | None = None,
    without: Container[str] = (),
    known: Sequence[Any] = (),
) -> Iterator[tuple[str, Any]]:
    """(path, object) of all that ``roots`` lead to, each object once, with the first path that leads there.

    ``names``: of attributes that are followed, in place of all. ``without``: paths that are not. ``known``: objects.
    """
    queue = deque(roots.items())
    seen: dict[int, Any] = {id(value): value for value in known}  # kept, so that no other gets their id
    while queue and len(seen) < ALL:
        path, value = queue.popleft()
        if not isinstance(value, PLAIN) and id(value) not in seen:
            seen[id(value)] = value
            yield path, value
            parts = parts_of(value, names)
            queue.extend((path + step, part) for step, part in parts if path + step not in without)


def values(roots: Mapping[str, Any], known: Sequence[Any] = ()) -> dict[str, Any]:
    """What ``roots`` lead to now, by path: plain values as text, lengths of containers, checksums of arrays."""
    entries: dict[str, Any] = {}
    for path, value in reachable(roots, known=known):
        entries |= {path + step: repr(part) for step, part in parts_of(value) if isinstance(part, PLAIN)}
        if isinstance(value, (list, dict, set, deque)):
            entries[f"{path} (its length)"] = len(value)
        elif hasattr(type(value), "__array__"):
            entries[path] = checksum(value)
    return entries


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Where two of ``values`` differ, with what is there if that is short."""
    changed = {path: (before.get(path), after.get(path)) for path in {**before, **after}}
    return [
        f"{path} ({one}, then {other})" if isinstance(one, (int, str)) and len(f"{one}{other}") < SHORT else path
        for path, (one, other) in changed.items()
        if one != other
    ]


def holding(roots: Mapping[str, Any]) -> list[Place]:
    """The lists and dicts that ``roots`` lead to, also those of attributes, each with a copy of what it holds.

    Attributes of library objects stay, but for the model's: a thread may be using a queue.
    """
    places: list[Any] = []
    for path, value in reachable(roots):
        if not isinstance(value, ModuleType):
            places.append(value)
            if path.startswith("model") or installed(type(value).__module__) is None:
                places.append(own_of(value))
    return [(place, place.copy()) for place in places if type(place) in (dict, list)]


def put_back(places: Iterable[Place]) -> list[str]:
    """Put back what these held; returns what was not as it had been, by its names there."""
    names: list[str] = []
    for place, then in places:
        if isinstance(place, list):
            if [*map(id, place)] != [*map(id, then)]:
                names.append(LIST)
                place[:] = then
            continue
        for key in [key for key in {**place, **then} if place.get(key, place) is not then.get(key, place)]:
            names.append(str(key))
            if key in then:
                place[key] = then[key]
            else:
                del place[key]
    return names


def checksum(array: Any) -> Any:
    """A checksum of an array's bytes, or what else tells it from others."""
    try:
        return (zlib.crc32(content(array)),)
    except Exception:  # no array of numbers in host memory that numpy knows
        return id(array), getattr(array, "_version", None)


def held_by(value: Any) -> dict[str, Any]:
    """Attributes that lie in an object itself, in its slots and its dict: what its class computes does not count."""
    held: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            name = name if name in vars(kind) else f"_{kind.__name__.lstrip('_')}{name}"  # a private one
            slot = vars(kind).get(name)
            if inspect.ismemberdescriptor(slot):
                with contextlib.suppress(AttributeError):  # not assigned yet
                    held.setdefault(name, slot.__get__(value))
    return {**held, **own_of(value)}


def own_of(value: Any) -> Any:
    """The dict of an object itself; empty where it has none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}


def function_of(value: Any) -> Any:
    """The function behind a member of a class: of a static or class method, or of a property."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    return value.fget if isinstance(value, property) else value


def parts_of(value: Any, names: Container[str] | None = None) -> Iterator[tuple[str, Any]]:
    """The objects that a value holds directly, each with the step that leads there; ``names`` as in ``reachable``."""
    most = MOST if names is None else FEW
    if isinstance(value, ModuleType):
        return
    if isinstance(value, PurePath):  # it keeps what was asked of it
        yield " as text", PurePath.__str__(value)
        return
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif isinstance(value, BuiltinFunctionType):
        yield ".__self__", value.__self__
    elif isinstance(value, dict) and dict.__len__(value) <= most:
        own = type(value).__module__ in ("builtins", "collections")  # another class may load what it is asked for
        for number, (key, item) in enumerate(value.items() if own else dict.items(value)):
            yield f"[{key!r}]" if isinstance(key, (str, int)) else f"[item {number}]", item
    elif isinstance(value, (list, tuple, deque)) and len(value) <= most:
        for number, item in enumerate(value):
            yield f"[{number}]", item
    if not isinstance(value, type):
        yield from _members(held_by(value), names)
        yield ".__class__", type(value)
    elif installed(value.__module__) is None:
        yield from _members(vars(value), names)
        yield from ((f".__bases__[{number}]", base) for number, base in enumerate(value.__bases__))


def _members(held: Mapping[str, Any], names: Container[str] | None) -> list[tuple[str, Any]]:
    return [(f".{name}", function_of(item)) for name, item in list(held.items()) if names is None or name in names]


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield f" (its variable {name})", cell.cell_contents
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    if module_of(function) is None:
        names = dict.fromkeys(name for code in nested(function.__code__) for name in code.co_names)
        read = named(function.__code__, GLOBAL)
        for name in filter(read.__contains__, names):
            value = function.__globals__.get(name)
            if not isinstance(value, ModuleType):
                yield f" (its global {name})", value
            elif installed(value.__name__) is None:
                for inner in names:
                    yield f" (its global {name}.{inner})", vars(value).get(inner)


@functools.lru_cache(maxsize=4096)
def named(code: CodeType, how: tuple[str, ...]) -> set[str]:
    """The names that the instructions ``how`` have in a function and in those inside it."""
    return {item.argval for each in nested(code) for item in dis.get_instructions(each) if item.opname in how}


def module_of(function: FunctionType) -> str | None:
    """The installed package whose code a function is. A wrapper of a library's has the __module__ of what it wraps."""
    return installed(function.__globals__.get("__name__"))


def installed(module: Any) -> str | None:
    """The installed package that a module belongs to, "python" for the standard library; None: the user's."""
    if not isinstance(module, str) or module == "__main__":
        return None
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return PYTHON
    files = (getattr(sys.modules.get(name), "__file__", None) for name in (module, root))
    file = next((name for name in files if name is not None), None)
    return root if root == OWN or (file is not None and _is_installed(file)) else None


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    return is_installed(os.path.realpath(file))


def version(name: str) -> str:
    """The version of a package, as far as it is told."""
    if name == PYTHON:
        return platform.python_version()
    return str(getattr(sys.modules.get(name), "__version__", "of unknown version"))
