"""A value as a graph of parts: hashes that see all of it, and paths that name what differs.

Equal graphs have equal hashes, wherever their parts lie in memory and whether equal parts are one object or several.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_PARTS = 30_000  # of a field; what lies beyond is told as not compared
TREE, CODE, SHARED = 0, 1, 2
TOO_MANY = f"beyond the first {MOST_PARTS} parts, which are all that is compared"
DEEPEST = 24  # names in a path; what lies deeper goes by the same
MOST_NAMED = 48  # parts of a field that are kept by their paths; deeper ones are in the hashes of those above


class Edge(NamedTuple):
    """What a value holds under a name.

    ``soft``: it changes in use, as caches and counters do. ``ambient``: a plain value of a module, as the rank is.
    """

    name: str
    value: Any
    soft: bool = False
    ambient: bool = False


@dataclass(frozen=True)
class Owner:
    """An object whose method is called, or whose attributes are set: what is written so changes while it is used."""

    value: Any
    method: str = ""
    written: frozenset[str] = frozenset()


@dataclass
class Part:
    """One value, without what it holds.

    Attributes
    ----------
    text : str
        What it is: equal for equal ones.
    edges : list of Edge
        What it holds.
    shown : str
        What it is called in messages; "" is ``text``.
    code : tuple of str or None
        Of a function: hashes of its syntax tree (of the code object where there is none), and of its code object.
    rows : str
        What tells the rows of an array apart; no part of what it is.
    unordered : bool
        What it holds comes in any order.
    unseen : str
        Why more of it cannot be seen; "" where all is seen.
    """

    text: str
    edges: list[Edge] = field(default_factory=list[Edge])
    shown: str = ""
    code: tuple[str, str] | None = None
    rows: str = ""
    unordered: bool = False
    unseen: str = ""


class Graph:
    """Everything that is reached from a value.

    Parameters
    ----------
    root : object
    look : callable
        ``look(value)`` tells what a value is made of.
    """

    def __init__(self, root: Any, look: Callable[[Any], Part]) -> None:
        self._parts: list[Part] = []
        self._below: list[list[int]] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no address is used twice
        self._known: dict[int, tuple[list[str], set[int]]] = {}
        waiting = deque([self._number(root)])
        while waiting:
            number = waiting.popleft()
            value = self._alive[number]
            if number < MOST_PARTS:
                part = look(value)
            else:
                part = Part("...", unseen=TOO_MANY)
            self._parts.append(part)
            for edge in part.edges:
                before = len(self._alive)
                self._below[number].append(self._number(edge.value))
                waiting.extend(range(before, len(self._alive)))

    @property
    def sourceless(self) -> bool:
        """Whether there is code that could not be compared with its source."""
        return any(part.code is not None and part.code[0] == part.code[1] for part in self._parts)

    def hash(self, mode: int, number: int = 0) -> str:
        """A hash of a part (the root) with all that it holds, but for what is soft.

        ``mode`` is TREE or CODE, which says what code goes by, or SHARED: by CODE, and without what is ambient. What
        leads into a circle is written down as the graph of its kinds, in the order in which they are reached.
        """
        kinds, final = self._kinds(mode)
        if number in final:
            return kinds[number]
        order = {kinds[number]: 0}
        waiting = deque([number])
        lines: list[str] = []
        while waiting:
            number = waiting.popleft()
            held: list[tuple[str, int | str]] = []
            for name, below in self._held(number, kinds, mode):
                if below in final:
                    held.append((name, kinds[below]))
                    continue
                if kinds[below] not in order:
                    order[kinds[below]] = len(order)
                    waiting.append(below)
                held.append((name, order[kinds[below]]))
            lines.append(f"{self._own(number, mode)} {held}")
        return _digest(*lines)

    def named(self, mode: int) -> dict[str, list[str]]:
        """The parts nearest to the root by their paths: the name of each, and its hashes with what it holds and alone.

        One that holds nothing has no hashes; its name says all. An array's rows are told last.
        """
        kinds, _ = self._kinds(mode)
        parts: dict[str, list[str]] = {}
        for number, path, edge in self._walk(mode, once=False):
            if len(parts) == MOST_NAMED:
                break
            if not edge.soft and not (edge.ambient and mode == SHARED):
                part = self._parts[number]
                whole = kinds[number] if number else self.hash(mode)  # in a circle, kinds do for a name
                hashes = [whole, self._own(number, mode), *filter(None, [part.rows])]
                parts[path] = [part.shown or part.text, *(hashes if part.edges or part.code or part.shown else ())]
        return parts

    def ambient(self) -> dict[str, str]:
        """Plain values of the process, by their paths."""
        return {path: self._parts[number].text for number, path, edge in self._walk(CODE, once=True) if edge.ambient}

    def soft(self, mode: int) -> dict[str, str]:
        """Hashes of what changes in use, by their paths."""
        return {path: self.hash(mode, number) for number, path, edge in self._walk(mode, once=True) if edge.soft}

    def unseen(self) -> dict[str, str]:
        """Paths of what cannot be seen into, and why."""
        reasons: dict[str, str] = {}
        for number, path, _ in self._walk(0, once=True):
            why = self._parts[number].unseen
            if why and len(reasons) < MOST_NAMED and not (why == TOO_MANY and why in reasons.values()):
                reasons[path] = why
        return reasons

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._alive))
        if number == len(self._alive):
            self._alive.append(value)
            self._below.append([])
        return number

    def _walk(self, mode: int, *, once: bool) -> Iterator[tuple[int, str, Edge]]:
        """Parts by their paths, the shortest first, with the last edge to each; what soft ones hold is left out.

        ``once``: what equal parts hold comes once, else only what one leads back to is not followed again.
        """
        kinds, _ = self._kinds(mode)
        waiting: deque[tuple[int, tuple[str, ...], Edge, frozenset[str]]] = deque(
            [(0, (), Edge("", None), frozenset())]
        )
        entered: set[str] = set()
        while waiting:
            number, path, last, above = waiting.popleft()
            yield number, ", ".join(path), last
            if last.soft or kinds[number] in (entered if once else above) or not (once or len(path) < DEEPEST):
                continue
            entered.add(kinds[number])
            above = above if once else above | {kinds[number]}
            for edge, below in self._edges(number, kinds):
                longer = (*path, edge.name) if len(path) < DEEPEST else path
                waiting.append((below, longer, edge, above))

    def _kinds(self, mode: int) -> tuple[list[str], set[int]]:
        """A text per part, equal for equal parts of this graph, and for which it is a hash of all that they hold.

        Others lead into a circle. They are refined in rounds, as long as that tells more of them apart.
        """
        if mode in self._known:
            return self._known[mode]
        kinds = [self._own(number, mode) for number in range(len(self._parts))]
        final: set[int] = set()
        for number in self._upwards():
            kinds[number] = self._joined(number, kinds, mode)
            final.add(number)
        rest = [number for number in range(len(self._parts)) if number not in final]
        before, now = 0, len({kinds[number] for number in rest})
        while now > before:
            refined = [self._joined(number, kinds, mode) for number in rest]
            for number, kind in zip(rest, refined, strict=True):
                kinds[number] = kind
            before, now = now, len(set(refined))
        self._known[mode] = kinds, final
        return kinds, final

    def _upwards(self) -> Iterator[int]:
        """Parts that lead into no circle, each after all that it holds."""
        above: list[list[int]] = [[] for _ in self._parts]
        left = [0] * len(self._parts)
        for number, (part, below) in enumerate(zip(self._parts, self._below, strict=True)):
            for edge, target in zip(part.edges, below, strict=True):
                if not edge.soft:
                    above[target].append(number)
                    left[number] += 1
        waiting = deque(number for number, count in enumerate(left) if not count)
        while waiting:
            number = waiting.popleft()
            yield number
            for source in above[number]:
                left[source] -= 1
                if not left[source]:
                    waiting.append(source)

    def _own(self, number: int, mode: int) -> str:
        part = self._parts[number]
        return _digest(part.text, part.code[min(mode, CODE)] if part.code else "")

    def _joined(self, number: int, kinds: list[str], mode: int) -> str:
        return _digest(kinds[number], *(f"{name} {kinds[below]}" for name, below in self._held(number, kinds, mode)))

    def _held(self, number: int, kinds: list[str], mode: int) -> list[tuple[str, int]]:
        """What a part holds and a hash counts."""
        edges = self._edges(number, kinds)
        return [(edge.name, below) for edge, below in edges if not edge.soft and not (edge.ambient and mode == SHARED)]

    def _edges(self, number: int, kinds: list[str]) -> list[tuple[Edge, int]]:
        """What a part holds; what comes in any order, in the order of its kinds."""
        part = self._parts[number]
        held = list(zip(part.edges, self._below[number], strict=True))
        return sorted(held, key=lambda pair: kinds[pair[1]]) if part.unordered else held


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:16]
