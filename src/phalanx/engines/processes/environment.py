"""What a worker has in common with the caller's process, so that user code finds itself at home there.

A new interpreter imports what this one did from where this one did, and nothing from the working directory; settings
of the process, and the source of modules as the caller imported it, follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.engines.processes.serialization import pack, unpack
from phalanx.errors import RunError
from phalanx.frameworks.registry import adopt_numeric_environment, harmless_warnings, numeric_environment, reduced
from phalanx.shared.memory import Memory
from phalanx.surroundings import sources
from phalanx.surroundings.sources import Source

STACK_BYTES = 120 << 20  # what the kernel leaves free below the main thread's stack, less a reserve


def pack_recipe(
    definition: Definition, framework: str, environment: Memory, parcel: Memory, facts: Mapping[str, Any]
) -> None:
    """Write what surrounds this process, and a recipe with other facts, for processes that start from here."""
    pack({**described(framework), "threads": definition.threads}, environment, reduced)
    fields = {item.name: getattr(definition, item.name) for item in dataclasses.fields(Definition)}
    pack({**facts, "fields": fields}, parcel, reduced)


def described(framework: str) -> dict[str, Any]:
    """What surrounds this process: environment, folder, import path, arguments, warning filters, numeric settings."""
    with contextlib.suppress(OSError):  # the folder may be gone
        return _described(framework, os.getcwd())
    return _described(framework, None)


def _described(framework: str, folder: str | None) -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "folder": folder,
        "path": list(sys.path),
        "sources": sources.proven(),
        "arguments": list(sys.argv),
        "depth": sys.getrecursionlimit(),
        "stack": max(_stack_limit(), threading.stack_size()),
        "filters": [(*rest, (kind.__module__, kind.__name__)) for *rest, kind in map(_category_last, warnings.filters)],
        "framework": framework,
        "numeric": numeric_environment(framework),
    }


def adopt_environment(place: dict[str, Any], tell_imported: Callable[[str, Source], None]) -> None:
    """Make this process like the described one; ``tell_imported`` hears which of the user's modules it did not have."""
    os.environ.clear()
    os.environ.update(place["environment"])
    if place["folder"] is not None:
        with contextlib.suppress(OSError):
            os.chdir(place["folder"])
    sys.path[:] = place["path"]
    sys.meta_path.insert(0, sources.Finder(place["sources"], tell_imported))
    sys.argv[:] = place["arguments"]
    _allow_depth(place["depth"], place["stack"])
    adopt_numeric_environment(place["numeric"])
    filters: Any = warnings.filters  # last: what is imported above may put its own first
    filters[:] = list(_known_filters(place["filters"]))
    warnings._filters_mutated()  # type: ignore[attr-defined]
    for message in harmless_warnings(place["numeric"]):
        warnings.filterwarnings("ignore", message=message)


class Imported:
    """Modules of the user's that workers imported while they ran: one that takes another's place gets the same.

    Parameters
    ----------
    environment_memory : Memory
        Where workers read what surrounds the caller's process.
    """

    def __init__(self, environment_memory: Memory) -> None:
        self._habitat = environment_memory
        self._told: dict[str, Source] = {}
        self._published = 0

    def add(self, name: str, source: Source) -> None:
        """A worker imported this.

        Raises
        ------
        RunError
            Another worker imported something else.
        """
        if self._told.setdefault(name, source) != source:
            raise RunError(
                f"{source.origin} was changed between its import by one process of this run and by another; start "
                "the run again, and import what is edited meanwhile at the top of a module, not inside a function"
            )

    def publish(self) -> None:
        """Tell workers that are started from here on."""
        if len(self._told) > self._published:
            place = unpack(self._habitat)
            place["sources"] |= self._told
            pack(place, self._habitat, reduced)
            self._published = len(self._told)


def _stack_limit() -> int:
    """Bytes that the main thread's stack may take, as far as a worker could give as much."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return STACK_BYTES if limit == resource.RLIM_INFINITY else min(limit, STACK_BYTES)


def _allow_depth(calls: int, stack: int) -> None:
    """Let functions call each other as deep as in the caller's process, where they may run in a thread of its own."""
    sys.setrecursionlimit(calls)
    wanted, hard = min(stack, STACK_BYTES), resource.getrlimit(resource.RLIMIT_STACK)[1]
    if wanted > _stack_limit() and (hard == resource.RLIM_INFINITY or wanted <= hard):
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


def _category_last(item: Any) -> tuple[Any, ...]:
    action, message, category, module, line = item
    return action, message, module, line, category


def _known_filters(filters: list[Any]) -> Iterator[Any]:
    """Filters whose category is loaded here: importing a library only to filter its warnings would take long."""
    for action, message, module, line, (home, name) in filters:
        category = getattr(sys.modules.get(home), name, None)
        if category is not None:
            yield action, message, category, module, line


# Runs before any other import: until the path is set, ``sys`` alone comes from where it should.
START = """
import sys
sys.path[:] = {path!r}
import ctypes
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: until everything is imported
from phalanx.engines.processes.zygote import main
main({arguments})
"""
TUNED = "glibc.malloc.hugetlb=1"  # big blocks in huge pages; user code sees its own environment


def command(*arguments: object) -> list[str]:
    """The command that starts a zygote: its ``main`` gets these arguments."""
    code = START.format(path=_path(), arguments=", ".join(map(repr, arguments)))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-c", code]


def variables() -> dict[str, str]:
    """The environment of a zygote."""
    tunables = filter(None, [os.environ.get("GLIBC_TUNABLES"), TUNED])
    return {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}


def importing() -> dict[str, Any]:
    """Under what a zygote imports what this process did: its environment and path."""
    return {"environment": dict(os.environ), "path": _path()}


def _path() -> list[str]:
    """The path of this process without what is relative: the standard library, phalanx, installed packages, the rest.

    So a file of the user's that has the name of a library is not taken for it.
    """
    home = os.path.dirname(os.__file__)
    first = (home, os.path.join(home, "lib-dynload"), os.path.dirname(os.path.dirname(sources.OURS)))
    entries = [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]
    return [*first, *sorted(entries, key=lambda entry: not sources.is_installed(os.path.join(entry, "")))]
