"""What a value is made of, whatever it is. Nothing of it is changed, and nothing is pickled."""

from __future__ import annotations

import collections
import enum
import functools
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from phalanx.definition.fingerprint import arrays
from phalanx.definition.fingerprint.arrays import Contents
from phalanx.definition.fingerprint.graph import Edge, Owner, Part
from phalanx.definition.fingerprint.objects import Hidden, Objects
from phalanx.definition.packages import Packages
from phalanx.definition.reachable import held_by
from phalanx.errors import ForeignError

FEW = 32  # items that are told one by one
MOST_ITEMS = 1000  # of a list of objects; more are sampled
SPELLED = (*arrays.PLAIN, range, slice, type(Ellipsis), type(NotImplemented), types.GenericAlias, types.UnionType)
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)


class Look:
    """Tells what values are made of, as ``graph.Graph`` asks.

    Attributes
    ----------
    packages : Packages
        Those that were met on the way.
    """

    def __init__(self) -> None:
        self.packages = Packages()
        self._contents = Contents()
        self._objects = Objects(self.packages)
        self._rules: tuple[tuple[Any, Callable[[Any], Part]], ...] = (
            (SPELLED, lambda value: Part(arrays.plain(value))),
            (Hidden, lambda value: Part("hidden", unseen=value.why)),
            (Owner, self._owner),
            (types.FunctionType, self._objects.function),
            (types.MethodType, _method),
            (types.BuiltinFunctionType, self._builtin),
            (functools.partial, _partial),
            (type, self._class),
            (types.ModuleType, self._module),
            (enum.Enum, self._member),
            ((staticmethod, classmethod), lambda value: _holding(value, function=value.__func__)),
            (property, lambda value: _holding(value, get=value.fget, set=value.fset, delete=value.fdel)),
            (functools.cached_property, lambda value: _holding(value, function=value.func)),
            (types.CellType, lambda value: _holding(value, content=value.cell_contents)),
            (weakref.ref, lambda value: _holding(value, target=value())),
            ((types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType), _described),
        )

    def __call__(self, value: Any) -> Part:
        """What a value is, and what it holds; whatever cannot be looked into is told as unseen."""
        kind = type(value)
        try:
            return self._part(value, kind)
        except Exception as error:  # whatever the user's code raises
            return Part(
                kind.__qualname__, unseen=f"a {kind.__qualname__}; looking into it raised {type(error).__name__}"
            )

    def _part(self, value: Any, kind: type) -> Part:
        for kinds, rule in self._rules:
            if kind in SPELLED if kinds is SPELLED else isinstance(value, kinds):
                return rule(value)
        if arrays.is_array(value):
            return self._array(value)
        if isinstance(value, CONTAINERS):
            return self._container(value, kind)
        if hasattr(kind, "__array_interface__"):  # pictures
            head, *rest = self._contents.array(np.asarray(value))
            return _hashed(f"a {kind.__qualname__} {head}", *rest)
        wrapped = getattr(value, "__wrapped__", None) if callable(value) else None
        if wrapped is not None and self.packages.has(kind.__module__):  # a function that was compiled or cached
            attributes = {name: item for name, item in sorted(held_by(value).items()) if not name.startswith("_")}
            return _holding(value, wrapped=wrapped, **attributes)
        if typing.get_origin(value) is not None:
            return Part(repr(value))
        return self._objects.part(value, [])

    def _owner(self, owner: Owner) -> Part:
        value = owner.value
        if arrays.is_array(value) or isinstance(value, CONTAINERS):
            return self._part(value, type(value))
        if isinstance(value, type):
            return self._objects.class_part(value, owner.written)
        return self._objects.part(value, [], owner)

    def _array(self, value: Any) -> Part:
        try:
            return _hashed(*self._contents.array(value))
        except ForeignError:
            return Part("array of objects", [Edge("items", value.tolist())])
        except Exception as error:
            head = f"{value.dtype}{list(value.shape)}"
            return Part(head, unseen=f"{head}, whose contents are not compared ({type(error).__name__})")

    def _container(self, value: Any, kind: type) -> Part:
        text = f"{kind.__name__} of {len(value)}" if hasattr(kind, "__len__") else kind.__name__
        if kind not in CONTAINERS:
            part = self._objects.part(value, self._items(value) or [Edge("items", ())])
            part.text = f"{part.text} of {len(value)}"
            return part
        if isinstance(value, (set, frozenset)):
            if all(type(item) in arrays.PLAIN for item in value):
                return Part(arrays.plain(value))
            return Part(text, [Edge("an item", item) for item in value], unordered=True)
        if len(value) > FEW:
            try:
                return _hashed(*self._contents.container(list(value) if kind is collections.deque else value))
            except ForeignError:
                text += " sampled" * (len(value) > MOST_ITEMS)
        return Part(text, self._items(value))

    def _items(self, value: Any) -> list[Edge]:
        """What a container holds; nothing for other values."""
        if isinstance(value, dict):
            pairs = list(value.items())
            picked = [pairs[number] for number in arrays.rows(len(pairs), MOST_ITEMS)]
            return [edge for number, (key, item) in enumerate(picked) for edge in _pair(number, key, item)]
        if isinstance(value, (set, frozenset)):
            return [Edge("items", frozenset(value))]
        if not isinstance(value, CONTAINERS):
            return []
        names = getattr(type(value), "_fields", ())
        items = list(value)
        numbers = arrays.rows(len(items), MOST_ITEMS)
        if isinstance(value, tuple) and len(names) == len(items):
            return [Edge(f"`{names[number]}`", items[number]) for number in numbers]
        return [Edge(f"item {number}", items[number]) for number in numbers]

    def _builtin(self, value: Any) -> Part:
        owner = value.__self__
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            home = value.__module__ or getattr(owner, "__name__", "")
            self.packages.has(home)
            return Part(f"{home}.{value.__qualname__}")
        return Part(f"method {value.__name__}", [Edge("object", owner)])

    def _class(self, value: type) -> Part:
        if issubclass(value, enum.Enum) and not self.packages.has(value.__module__):
            members = [Edge(f"`{name}`", member.value) for name, member in value.__members__.items()]
            functions = [
                Edge(f"`{name}`", item)
                for name, item in sorted(vars(value).items())
                if isinstance(item, types.FunctionType)
            ]  # fmt: skip
            return Part("enum", members + functions, f"class {value.__name__}")
        return self._objects.class_part(value)

    def _member(self, value: enum.Enum) -> Part:
        if self.packages.has(type(value).__module__):
            return Part(str(value))
        return Part(f"member {value.name}", [Edge("class", type(value))], str(value))

    def _module(self, value: types.ModuleType) -> Part:
        why = f"the module {value.__name__} as a whole, of which nothing is compared"
        return Part(f"module {value.__name__}", unseen="" if self.packages.has(value.__name__) else why)


def _method(value: types.MethodType) -> Part:
    name = value.__func__.__name__
    owner = value.__self__ if isinstance(value.__self__, type) else Owner(value.__self__, name)
    return Part("method", [Edge("function", value.__func__), Edge("object", owner)], f"method {name}")


def _partial(value: functools.partial[Any]) -> Part:
    edges = [Edge("function", value.func)]
    edges += [Edge(f"argument {number}", item) for number, item in enumerate(value.args)]
    edges += [Edge(f"argument `{name}`", item) for name, item in sorted(value.keywords.items())]
    name = getattr(value.func, "__qualname__", type(value.func).__qualname__)
    return Part("partial", edges, f"partial of {name}")


def _holding(value: Any, **parts: Any) -> Part:
    return Part(type(value).__qualname__, [Edge(name, part) for name, part in parts.items() if part is not None])


def _hashed(shown: str, content: str, rows: str = "") -> Part:
    """What is shown, and a hash that is not."""
    return Part(f"{shown} {content}", shown=shown, rows=rows)


def _described(value: Any) -> Part:
    return Part(value.__qualname__)


def _pair(number: int, key: Any, item: Any) -> list[Edge]:
    if type(key) in arrays.PLAIN or (type(key) is tuple and all(type(part) in arrays.PLAIN for part in key)):
        return [Edge(f"[{arrays.plain(key)}]", item)]
    return [Edge(f"key {number}", key), Edge(f"value {number}", item)]
