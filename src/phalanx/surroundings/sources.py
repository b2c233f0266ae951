"""The source of the user's modules: workers run what the caller imported, whatever the files say by then.

Python does not keep the source of what it imports, and a file may be edited between its import and the start of a
worker, or of a worker's replacement. So a run begins by reading the files of the user's modules. A file that no
longer compiles to the functions in memory is refused by name. What was read travels to the workers, where a finder
loads it. Installed packages and the standard library are left to Python.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import SOURCE_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from phalanx.errors import UsageError

STANDARD = os.path.dirname(os.__file__) + os.sep
INSTALLED = ("site-packages", "dist-packages")
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep  # imported by workers before they could be given anything


class Source(NamedTuple):
    """A module's file, what it said, and where the submodules of a package are."""

    origin: str
    text: bytes
    folders: list[str] | None


_NOTED: dict[str, tuple[ModuleSpec | None, Source | None]] = {}  # a reload gives a module another spec


def note() -> dict[str, Source]:
    """The source of each of the user's modules that is loaded, as its file was when this was first asked for it."""
    sources: dict[str, Source] = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        known = _NOTED.get(name)
        if known is None or known[0] is not spec:
            ours = _source(spec) if isinstance(spec, ModuleSpec) and spec.name == name else None
            known = _NOTED[name] = spec, ours
        if known[1] is not None:  # of the user's own
            sources[name] = known[1]
    return sources


def proven() -> dict[str, Source]:
    """The same, checked against the code in memory, for other processes to run.

    Raises
    ------
    UsageError
        A file was changed between its import and the start of the first run after that.
    """
    sources = note()
    for name, source in sources.items():
        if not _agrees(sys.modules[name], source):
            del _NOTED[name]  # it may be changed back
            raise UsageError(
                f"{source.origin} was changed after this process had imported it as {name}, so that workers would run "
                f"other code than this process; restart it, or importlib.reload(sys.modules[{name!r}]), or use "
                "engine='inline'"
            )
    return sources


class Finder:
    """On ``sys.meta_path`` of a worker: loads what the caller had imported."""

    def __init__(self, given: Mapping[str, Source]) -> None:
        self._given = given

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``. A file that still says the same is loaded from Python's cache of it."""
        source = self._given.get(name)
        if source is None:
            return None
        same = _read(source.origin) == source.text
        loader = SourceFileLoader(name, source.origin) if same else NotedLoader(name, source)
        return spec_from_file_location(name, source.origin, loader=loader, submodule_search_locations=source.folders)


class NotedLoader(SourceFileLoader):
    """Loads a module from its noted source, as its file says something else by now."""

    def __init__(self, name: str, source: Source) -> None:
        super().__init__(name, source.origin)
        self._text = source.text

    def get_code(self, fullname: str) -> CodeType:
        """The code of what was noted, which tracebacks and ``inspect`` show, too."""
        lines = decode_source(self._text).splitlines(keepends=True)
        linecache.cache[self.path] = len(self._text), None, lines, self.path
        return self.source_to_code(self._text, self.path)


def package_of(name: str) -> str:
    """The package of a module."""
    return name.partition(".")[0]


def finders() -> Iterator[Any]:
    """What finds modules in every process alike: the path, and packages that are installed as links to folders."""
    yield PathFinder
    for finder in sys.meta_path:
        if getattr(finder, "__module__", type(finder).__module__).startswith("__editable__"):
            yield finder


def is_installed(path: str) -> bool:
    """Whether a file, or a folder of modules, is Python's, ours, or an installed package's."""
    if path.startswith((STANDARD, OURS)) or any(part in INSTALLED for part in path.split(os.sep)):
        return True
    folders = [entry for entry in sys.path if isinstance(entry, str) and entry]
    return any(path.startswith(os.path.join(folder, "")) and _has_packages(folder) for folder in folders)


@functools.cache
def _has_packages(folder: str) -> bool:
    """Whether an installer puts packages there."""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False


def _source(spec: ModuleSpec) -> Source | None:
    """What the file of a module of the user's says; None for all others."""
    origin = str(spec.origin)
    if not (spec.has_location and origin.endswith(tuple(SOURCE_SUFFIXES))) or is_installed(origin):
        return None
    folders, text = spec.submodule_search_locations, _read(origin)
    return None if text is None else Source(origin, text, None if folders is None else list(folders))


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def _agrees(module: ModuleType, source: Source) -> bool:
    """Whether the functions and methods of a module are those of the source, where no import hook made others."""
    if type(getattr(module.__spec__, "loader", None)) is not SourceFileLoader:
        return True
    known = _compiled(source.origin, source.text)
    return all(code in known for code in _codes(module) if code.co_filename == source.origin)


@functools.cache
def _compiled(path: str, text: bytes) -> frozenset[CodeType]:
    """The code of all functions and classes of a file; none if it is no Python any more."""
    try:
        return frozenset(nested(SourceFileLoader("", path).source_to_code(text, path)))
    except (SyntaxError, ValueError):
        return frozenset()


def nested(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of a module's functions and of its classes' methods."""
    waiting, classes = list(vars(module).values()), set[type]()
    while waiting:
        member = waiting.pop()
        # By their types: a user's own object may answer anything, or raise, when it is asked for an attribute.
        kind: type = type(member)
        plain = member.__func__ if kind in (staticmethod, classmethod) else member.fget if kind is property else member
        if type(plain) is FunctionType:
            yield plain.__code__
        elif issubclass(kind, type) and member.__module__ == module.__name__ and member not in classes:
            classes.add(member)
            waiting.extend(vars(member).values())
