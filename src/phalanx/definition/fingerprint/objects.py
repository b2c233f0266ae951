"""What functions, classes and objects are made of: their code, what it reads from outside, the attributes they hold."""

from __future__ import annotations

import builtins
import collections
import copyreg
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from phalanx.definition.fingerprint import bytecode, source
from phalanx.definition.fingerprint.arrays import PLAIN, short
from phalanx.definition.fingerprint.graph import Edge, Owner, Part
from phalanx.definition.fingerprint.source import Sources
from phalanx.definition.packages import Packages
from phalanx.definition.reachable import function_of, held_by

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
MODULE_PARTS = ("_parameters", "_buffers", "_modules")  # of a torch module, each a dict by name
GENERATORS = ("getstate", "get_state", "bit_generator")  # generators of random numbers have one of these
CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__setstate__"})
PARAMETRIZED = "torch.nn.utils.parametrize"
FORWARD = "forward"  # what a module's __call__ leads to
OPEN = (dict, list, tuple, set, frozenset, collections.deque, collections.OrderedDict, collections.defaultdict,
        int, float, complex, str, bytes)  # fmt: skip


@dataclass(frozen=True)
class Hidden:
    """Stands for a value that cannot be had, and says why."""

    why: str


class Objects:
    """Looks into functions, classes and objects.

    Parameters
    ----------
    packages : Packages
        Notes those that are met.
    """

    def __init__(self, packages: Packages) -> None:
        self._packages = packages
        self._sources = Sources()
        self._known: dict[tuple[type, str], set[str]] = {}

    def function(self, function: types.FunctionType) -> Part:
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
        reads = bytecode.reads(code)
        written = set() if node is None else source.writes(node)
        edges = [
            *self._enclosed(function, reads.names, written),
            *_defaults(function),
            *self._globals(function, reads, written),
            *self._imports(reads, names),
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
            for told, below, soft in bytecode.taken(name, value, names.get(name, {()}), written, self._packages):
                yield Edge(f"closure variable `{told}`", below, soft)

    def _globals(self, function: types.FunctionType, reads: bytecode.Reads, written: set[str]) -> Iterator[Edge]:
        for name, chains in sorted(reads.names.items()):
            if name in function.__code__.co_freevars:
                continue
            builtin = getattr(builtins, name, bytecode.ABSENT)
            value = function.__globals__.get(name, builtin)
            if value is builtin:
                continue
            for told, below, soft in bytecode.taken(name, value, chains, written, self._packages):
                yield Edge(f"global `{told}`", below, soft, type(below) in PLAIN)

    def _imports(self, reads: bytecode.Reads, names: Mapping[str, Any]) -> Iterator[Edge]:
        """What import statements inside the function bring."""
        ways = {(module, level): {(("attribute", name),) for name in taken} for module, level, taken in reads.imports}
        for key in sorted({*ways, *reads.aliases}):
            try:
                module = self._packages.module(*key, names)
            except Exception as error:  # whatever its code raises
                why = f"importing it raised {type(error).__name__}"
                yield Edge(f"module `{key[0]}`", Hidden(why))
                continue
            if module is not None:
                chains = ways.get(key, set()) | reads.aliases.get(key, set())
                for told, below, _ in bytecode.taken(key[0], module, chains, set(), self._packages):
                    yield Edge(f"import `{told}`", below, ambient=type(below) in PLAIN)

    def class_part(self, kind: type, written: frozenset[str] = frozenset()) -> Part:
        """A class: the user's by its methods, attributes and bases, an installed one by name."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        if self._packages.has(kind.__module__):
            return Part(name)
        soft = self._written(kind, "") | written
        edges = [Edge(f"base `{base.__name__}`", base) for base in kind.__bases__ if base is not object]
        edges += [
            Edge(f"`{key}`", value, key in soft) for key, value in sorted(vars(kind).items()) if _counts(key, value)
        ]
        return Part("class", edges, f"class {kind.__name__}")

    def part(self, value: Any, contents: list[Edge], owner: Owner | None = None) -> Part:
        """An object: its class, what it contains, and its attributes, or what it says that it is made of."""
        kind = _class_of(value)
        owner = owner or Owner(value)
        installed = self._packages.has(kind.__module__)
        text = f"{kind.__module__}.{kind.__qualname__}" if installed else "object"
        edges = [*contents] if installed else [Edge("class", kind), *contents]
        made = Part(text, edges, f"a {kind.__qualname__}")
        if installed and any(hasattr(kind, name) for name in GENERATORS):
            return _with(made, [Edge("state", _state(value), soft=True)])
        told = None if contents else _reduced(value, kind)
        if isinstance(told, str):
            return Part(f"{text} {told}", edges, told)
        if told is not None:
            moving, changed = hasattr(kind, "__next__"), bool(owner.written)
            return _with(made, [Edge(name, item, moving or (changed and name == "state")) for name, item in told])
        own = kind.__getstate__ is not object.__getstate__  # type: ignore[attr-defined]  # since Python 3.11
        state = kind.__getstate__(value) if own else held_by(value)  # type: ignore[attr-defined]
        soft = self._written(kind, owner.method) | owner.written
        held = (
            _attributes(kind, state, soft) if isinstance(state, dict) else [Edge("state", state, bool(owner.written))]
        )
        if not contents and any(map(_is_opaque, kind.__mro__)):
            made.unseen = f"a {kind.__qualname__}, whose contents are not compared"
        return _with(made, held)

    def _written(self, kind: type, method: str) -> set[str]:
        """Attributes that the methods of a user's class write while its objects are used.

        Used means: through special methods, ``forward``, the method given, and those that they call. What a constructor
        writes, or a method that only the user calls, is no cache and no counter.
        """
        if (kind, method) not in self._known:
            self._known[kind, method] = self._reached(kind, method)
        return self._known[kind, method]

    def _reached(self, kind: type, method: str) -> set[str]:
        methods = dict(reversed([item for base in kind.__mro__ for item in self._methods(base)]))
        waiting = [
            name for name in methods
            if name in (FORWARD, method) or (name.startswith("__") and name.endswith("__") and name not in CONSTRUCTORS)
        ]  # fmt: skip
        reached: set[str] = set()
        written: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in reached or name not in methods or name in CONSTRUCTORS:
                continue
            reached.add(name)
            node = methods[name]
            arguments = [*node.args.posonlyargs, *node.args.args]
            owners = {kind.__name__, *(item.arg for item in arguments[:1])}
            pairs = [item.split(".") for item in source.writes(node) if "." in item]
            written |= {attribute for owner, attribute in pairs if owner in owners}
            waiting += source.calls_of(node)
        return written

    def _methods(self, kind: type) -> Iterator[tuple[str, source.Node]]:
        if kind is object or self._packages.has(kind.__module__):
            return
        for name, value in vars(kind).items():
            function = inspect.unwrap(function_of(value))
            if isinstance(function, types.FunctionType):
                node = self._sources.tree(function.__code__, function.__globals__)
                if node is not None:
                    yield name, node


def _defaults(function: types.FunctionType) -> Iterator[Edge]:
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    for name, value in [*zip(names, given, strict=True), *sorted((function.__kwdefaults__ or {}).items())]:
        yield Edge(f"default `{name}`", value)


def _class_of(value: Any) -> type:
    """Its class; of a torch module with parametrizations the one that it had before.

    Torch makes it a class of its own, which lies in torch whosever it is, and whose ``__getstate__`` raises. What is
    parametrized is among the module's parts.
    """
    kind = type(value)
    made = kind.__module__ == PARAMETRIZED and kind.__name__ == f"Parametrized{kind.__bases__[0].__name__}"
    return kind.__bases__[0] if made else kind


def _attributes(kind: type, held: dict[str, Any], soft: Set[str]) -> list[Edge]:
    edges: list[Edge] = []
    is_module = all(isinstance(held.get(name), dict) for name in MODULE_PARTS)
    for name in sorted(held, key=str):
        if is_module and name in MODULE_PARTS:
            edges += [Edge(f"`{key}`", item) for key, item in held[name].items()]
        elif is_module and "_hooks" in name:  # by numbers that are drawn from one counter for all
            edges += [Edge(f"`{name}`", list(held[name].values()))] if held[name] else []
        elif is_module and name.startswith("_") and held[name] in (None, set()):  # every module has such
            continue
        elif _counts(name, held[name]) and not isinstance(getattr(kind, name, None), functools.cached_property):
            edges.append(Edge(f"attribute `{name}`", held[name], name in soft))
    return edges


def _with(part: Part, edges: list[Edge]) -> Part:
    part.edges += edges
    return part


def _counts(name: str, value: Any) -> bool:
    """Whether an attribute is the user's: no record that Python keeps about the class or object."""
    if name == "_abc_impl" or inspect.isgetsetdescriptor(value) or inspect.ismemberdescriptor(value):
        return False
    special = name.startswith("__") and name.endswith("__")
    return not special or name == "__wrapped__" or isinstance(function_of(value), types.FunctionType)


def _is_opaque(kind: type) -> bool:
    """Whether a class adds memory to its objects that no attribute shows: it is in C, and no known container."""
    if kind in OPEN or kind.__base__ is None or any(name in vars(kind) for name in ("__slots__", "__dict__")):
        return False
    return kind.__basicsize__ > kind.__base__.__basicsize__ and "__weakref__" not in vars(kind)


def _state(value: Any) -> Any:
    for name in GENERATORS[:2]:
        if hasattr(value, name):
            return getattr(value, name)()
    return value.bit_generator.state


def _reduced(value: Any, kind: type) -> list[tuple[str, Any]] | str | None:
    """What an object says that it is made of, as copies of it would be; None where its class does not say."""
    told: Any
    reduce = copyreg.dispatch_table.get(kind)
    if reduce is not None:
        told = reduce(value)
    elif kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        told = value.__reduce_ex__(4)
    else:
        return None
    if isinstance(told, str):
        return told
    names = ("made by", "arguments", "state", "items", "pairs")
    parts = [list(part) if number > 2 and part is not None else part for number, part in enumerate(told[:5])]
    return [(name, part) for name, part in zip(names, parts, strict=False) if part is not None]
