"""The source of the user's modules as this process imported it: workers run that, whatever the files say by then.

Python does not keep the source of what it imports, and a file may be edited between its import and the start of a
worker, or of one that takes another's place. So a finder that finds nothing notes the source of each module when it is
imported. In a worker the same finder has what the caller's process noted, and loads that. Installed packages and the
standard library are left to Python.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
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


class Sources:
    """A finder on ``sys.meta_path``: notes what is imported, and loads what it was given."""

    def __init__(self) -> None:
        self._listener: Callable[[str, Source], None] = lambda name, source: None
        self._owner = 0
        self._noted: dict[str, Source] = {}
        self._given: dict[str, Source] = {}
        self._seen: set[str] = set()  # that were looked at, and are not the user's or were noted
        self._unproven: set[str] = set()  # noted after they were imported: the file may have changed before that

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if name in self._given:
            return _spec(name, self._given[name])
        if path is not None and all(map(is_installed, path)):
            return None
        source = next(filter(None, (_source(finder.find_spec(name, path)) for finder in finders())), None)
        if source is not None:
            self._noted[name] = source
            self._unproven.discard(name)
            if os.getpid() == self._owner:  # not in processes that user code forks
                self._listener(name, source)
        return None

    def install(self) -> None:
        """From here on, note what is imported; what was imported before is noted as its file is now."""
        sys.meta_path.insert(0, self)
        self._look()

    def give(self, sources: Mapping[str, Source], listener: Callable[[str, Source], None]) -> None:
        """Load these modules from what another process noted; ``listener`` is told which others are imported here."""
        self._given.update(sources)
        self._listener, self._owner = listener, os.getpid()

    def noted(self) -> dict[str, Source]:
        """The source of each of the user's modules that is loaded now.

        Raises
        ------
        UsageError
            A file was changed after it was imported, and before phalanx was.
        """
        self._look()
        for name in sorted(self._unproven & set(sys.modules)):
            if not _agrees(sys.modules[name], self._noted[name]):
                raise UsageError(
                    f"{self._noted[name].origin} was changed after this process had imported it, so that workers would "
                    f"run other code than this process; restart it, or importlib.reload(sys.modules[{name!r}]), or use "
                    "engine='inline'"
                )
            self._unproven.discard(name)
        return {name: source for name, source in self._noted.items() if name in sys.modules}

    def names(self) -> set[str]:
        """The user's modules that are loaded now."""
        self._look()
        return self._noted.keys() & sys.modules.keys()

    def loaded(self, name: str) -> Source | None:
        """The source of one of the user's modules, if it is loaded here."""
        return self._noted.get(name) if name in sys.modules else None

    def _look(self) -> None:
        """Note what is loaded and was not seen."""
        for name in sys.modules.keys() - self._seen - self._noted.keys():
            spec = getattr(sys.modules.get(name), "__spec__", None)
            source = _source(spec) if getattr(spec, "name", None) == name else None
            if source is not None:
                self._noted[name] = source
                self._unproven.add(name)
            self._seen.add(name)


class Kept(SourceFileLoader):
    """Loads a module from its noted source, as its file says something else by now."""

    def __init__(self, name: str, source: Source) -> None:
        super().__init__(name, source.origin)
        self._text = source.text

    def get_code(self, fullname: str) -> CodeType:
        """The code of what was noted, which tracebacks and ``inspect`` show, too."""
        lines = decode_source(self._text).splitlines(keepends=True)
        linecache.cache[self.path] = len(self._text), None, lines, self.path
        return self.source_to_code(self._text, self.path)


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


def _source(spec: ModuleSpec | None) -> Source | None:
    """What the file of a module of the user's says; None for all others."""
    if spec is None or type(spec.loader) is not SourceFileLoader or is_installed(spec.loader.path):
        return None
    folders = spec.submodule_search_locations
    text = _read(spec.loader.path)
    return None if text is None else Source(spec.loader.path, text, None if folders is None else list(folders))


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def _spec(name: str, source: Source) -> ModuleSpec | None:
    """Loads from the file, and from Python's cache for it, if it still says the same."""
    same = _read(source.origin) == source.text
    loader = SourceFileLoader(name, source.origin) if same else Kept(name, source)
    return spec_from_file_location(name, source.origin, loader=loader, submodule_search_locations=source.folders)


def _agrees(module: ModuleType, source: Source) -> bool:
    """Whether the functions and methods of a module are those of the source."""
    known = set(nested(SourceFileLoader(module.__name__, source.origin).source_to_code(source.text, source.origin)))
    return all(code in known for code in _codes(module) if code.co_filename == source.origin)


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
        plain = getattr(member, "__func__", getattr(member, "fget", member))  # of static and class methods, properties
        if isinstance(plain, FunctionType):
            yield plain.__code__
        elif isinstance(member, type) and member.__module__ == module.__name__ and member not in classes:
            classes.add(member)
            waiting.extend(vars(member).values())


SOURCES = Sources()
