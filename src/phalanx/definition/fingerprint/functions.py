"""What a function is made of: its code, and the values that it reads from outside."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.definition.fingerprint import bytecode, source
from phalanx.definition.fingerprint.arrays import PLAIN, is_array, short
from phalanx.definition.fingerprint.graph import Edge, Part
from phalanx.definition.fingerprint.objects import Owner, held_by
from phalanx.definition.fingerprint.packages import Packages
from phalanx.definition.fingerprint.source import Sources

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
ABSENT = object()


@dataclass(frozen=True)
class Hidden:
    """Stands for a value that cannot be had, and says why."""

    why: str


class Functions:
    """Looks into functions.

    Parameters
    ----------
    packages : Packages
    sources : Sources
    """

    def __init__(self, packages: Packages, sources: Sources) -> None:
        self._packages = packages
        self._sources = sources

    def part(self, function: types.FunctionType) -> Part:
        """A function: the user's by code and what it reads, an installed one by name and what it encloses."""
        code, names = function.__code__, function.__globals__
        home = names.get("__name__")
        if self._packages.has(home, code.co_filename):
            edges = [*self._enclosed(function, {}, set())]
            if "<locals>" in code.co_qualname:
                edges += _defaults(function)
            return Part(f"{home}.{code.co_qualname}", edges)
        node = self._sources.tree(code, names)
        text = None if node is None else source.spelled(node)
        instructions = short(f"{VERSION} {bytecode.spelled(code)}")
        found = bytecode.reads(code)
        written = set() if node is None else source.writes(node)
        edges = [
            *self._enclosed(function, found.names, written),
            *_defaults(function),
            *self._globals(function, found, written),
            *self._imports(found, names),
            *(
                Edge(f"attribute `{name}`", value, f"{function.__name__}.{name}" in written)
                for name, value in sorted(vars(function).items())
                if not (name.startswith("__") and name.endswith("__"))
            ),
        ]
        tree = instructions if text is None else short(text)
        return Part("function", edges, f"function {function.__name__}", (tree, instructions))

    def _enclosed(
        self, function: types.FunctionType, names: Mapping[str, set[bytecode.Chain]], written: set[str]
    ) -> Iterator[Edge]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet set
                continue
            for told, below, soft in self._followed(name, value, names.get(name, {()}), written):
                yield Edge(f"closure variable `{told}`", below, soft)

    def _globals(self, function: types.FunctionType, found: bytecode.Reads, written: set[str]) -> Iterator[Edge]:
        for name, chains in sorted(found.names.items()):
            if name in function.__code__.co_freevars:
                continue
            value = function.__globals__.get(name, ABSENT)
            if value is ABSENT or value is getattr(builtins, name, ABSENT):
                continue
            for told, below, soft in self._followed(name, value, chains, written):
                yield Edge(f"global `{told}`", below, soft, type(below) in PLAIN)

    def _imports(self, found: bytecode.Reads, names: Mapping[str, Any]) -> Iterator[Edge]:
        """What import statements inside the function bring."""
        ways = {(module, level): {(("attribute", name),) for name in taken} for module, level, taken in found.imports}
        for key in sorted({*ways, *found.aliases}):
            try:
                module = self._packages.module(*key, names)
            except Exception as error:  # whatever its code raises
                why = f"importing it raised {type(error).__name__}"
                yield Edge(f"module `{key[0]}`", Hidden(why))
                continue
            if module is not None:
                chains = ways.get(key, set()) | found.aliases.get(key, set())
                for told, below, _ in self._followed(key[0], module, chains, set()):
                    yield Edge(f"import `{told}`", below, ambient=type(below) in PLAIN)

    def _followed(
        self, name: str, value: Any, chains: set[bytecode.Chain], written: set[str]
    ) -> list[tuple[str, Any, bool]]:
        """What a function takes of a value that it names, and whether it writes that.

        Of modules, records and dicts that is attributes and items. An attribute that it writes is told apart from the
        rest of a record, whether it is there yet or not.
        """
        if isinstance(value, (types.ModuleType, types.FunctionType, type)):
            written = written - {name}  # `module.function(x)` calls it, and changes no module
        apart = _set_on(name, value, written)
        rest = {chain for chain in chains if not any(chain[:1] == (("attribute", key),) for key in apart)}
        taken = {told: below for chain in rest for told, below in self._taken(name, value, chain)}
        if name in taken and apart:
            taken[name] = Owner(value, written=apart)
        held = vars(value) if isinstance(value, type) else held_by(value) if apart else {}
        taken |= {f"{name}.{key}": held[key] for key in apart if key in held}
        within = {told for told in taken if any(told.startswith((f"{other}.", f"{other}[")) for other in taken)}
        changed = written | {name} if apart and isinstance(value, (dict, list)) else written
        return [(told, taken[told], _changes(told, changed)) for told in sorted({*taken} - within)]

    def _taken(self, name: str, value: Any, chain: bytecode.Chain) -> list[tuple[str, Any]]:
        for kind, key in chain:
            if isinstance(value, types.ModuleType):
                if self._packages.has(value.__name__):
                    return []
                below = vars(value).get(key, sys.modules.get(f"{value.__name__}.{key}", ABSENT))
                if kind != "attribute" or below is ABSENT:
                    return []
            elif kind == "attribute":
                below = _attribute(value, key)
            else:
                below = value.get(key, ABSENT) if type(value) is dict else ABSENT
            if below is ABSENT:
                break
            name, value = (f"{name}.{key}" if kind == "attribute" else f"{name}[{key!r}]"), below
        return [(name, value)]


def _attribute(value: Any, name: str) -> Any:
    """An attribute that lies in the object itself; ABSENT for all that a class may compute."""
    held = getattr(value, "__dict__", None) if not isinstance(value, (type, types.FunctionType)) else None
    if type(held) is dict and name in held and not hasattr(getattr(type(value), name, None), "__get__"):
        return held[name]
    return ABSENT


def _set_on(name: str, value: Any, written: set[str]) -> frozenset[str]:
    """Attributes of a value that a function writes; not of modules, functions and arrays."""
    if isinstance(value, (types.ModuleType, types.FunctionType)) or is_array(value):
        return frozenset()
    return frozenset(other.removeprefix(f"{name}.") for other in written if other.startswith(f"{name}."))


def _defaults(function: types.FunctionType) -> Iterator[Edge]:
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    for name, value in [*zip(names, given, strict=True), *sorted((function.__kwdefaults__ or {}).items())]:
        yield Edge(f"default `{name}`", value)


def _changes(told: str, written: set[str]) -> bool:
    """Whether a function writes what it reads under this name."""
    name = told.partition("[")[0]
    return any(name == other or name.startswith(f"{other}.") for other in written)
