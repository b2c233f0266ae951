"""What of the caller's process user code may look at: copied to workers, so that it finds itself at home there."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.engines.memory import Memory
from phalanx.engines.parcel import pack, unpack
from phalanx.errors import RunError
from phalanx.frameworks.opening import adopt_numeric_environment, numeric_environment, reduced
from phalanx.sources import SOURCES, Source

STACK_BYTES = 120 << 20  # what the kernel leaves free below the main thread's stack, less a reserve


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
        "sources": SOURCES.noted(),
        "arguments": list(sys.argv),
        "depth": sys.getrecursionlimit(),
        "stack": max(_stack_limit(), threading.stack_size()),
        "filters": [(*rest, (kind.__module__, kind.__name__)) for *rest, kind in map(_category_last, warnings.filters)],
        "numeric": numeric_environment(framework),
    }


def inhabit(place: dict[str, Any], tell_imported: Callable[[str, Source], None]) -> None:
    """Make this process like the described one; ``tell_imported`` hears which of the user's modules it did not have."""
    os.environ.clear()
    os.environ.update(place["environment"])
    if place["folder"] is not None:
        with contextlib.suppress(OSError):
            os.chdir(place["folder"])
    sys.path[:] = place["path"]
    SOURCES.give(place["sources"], tell_imported)
    sys.argv[:] = place["arguments"]
    _allow_depth(place["depth"], place["stack"])
    adopt_numeric_environment(place["numeric"])
    filters: Any = warnings.filters  # last: what is imported above may put its own first
    filters[:] = list(_known_filters(place["filters"]))
    warnings._filters_mutated()  # type: ignore[attr-defined]
    ours = "JAX_COMPILATION_CACHE_DIR" not in place["environment"]
    if ours and "jax" in place["numeric"]:  # what one worker writes another may be reading
        warnings.filterwarnings("ignore", message="Error reading persistent compilation cache")


class Imported:
    """Modules of the user's that workers imported while they ran: one that takes another's place gets the same.

    Parameters
    ----------
    habitat : Memory
        Where workers read what surrounds the caller's process.
    """

    def __init__(self, habitat: Memory) -> None:
        self._habitat = habitat
        self._told: dict[str, Source] = {}
        self._published = 0

    def add(self, name: str, source: Source) -> None:
        """A worker imported this.

        Raises
        ------
        RunError
            Another worker, or this process, imported something else.
        """
        known = self._told.setdefault(name, SOURCES.loaded(name) or source)
        if known != source:
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
