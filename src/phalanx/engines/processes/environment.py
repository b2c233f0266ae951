"""What a worker has in common with the caller's process, so that user code finds itself at home there.

A new interpreter imports what this one did from where this one did, and nothing from the working directory; settings
of the process, and the source of modules as the caller imported it, follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.engines.processes.serialization import pack
from phalanx.frameworks.registry import adopt_numeric_environment, harmless_warnings, numeric_environment, reduced
from phalanx.shared.memory import Memory
from phalanx.surroundings import sources


def pack_recipe(
    definition: Definition, framework: str, environment: Memory, parcel: Memory, facts: Mapping[str, Any]
) -> None:
    """Write what surrounds this process, and a recipe with other facts, for processes that start from here."""
    pack({**described(framework), "threads": definition.threads}, environment, reduced)
    fields = {item.name: getattr(definition, item.name) for item in dataclasses.fields(Definition)}
    pack({**facts, "fields": fields}, parcel, reduced)


def described(framework: str) -> dict[str, Any]:
    """What surrounds this process: environment, folder, import path, arguments, warning filters, numeric settings."""
    try:
        folder = os.getcwd()
    except OSError:  # it may be gone
        folder = None
    return {
        "environment": dict(os.environ),
        "folder": folder,
        "path": list(sys.path),
        "sources": sources.proven(),
        "arguments": list(sys.argv),
        "depth": sys.getrecursionlimit(),
        "filters": [(*rest, (kind.__module__, kind.__name__)) for *rest, kind in map(_category_last, warnings.filters)],
        "framework": framework,
        "numeric": numeric_environment(framework),
    }


def adopt_environment(place: dict[str, Any]) -> None:
    """Make this process like the described one."""
    os.environ.clear()
    os.environ.update(place["environment"])
    if place["folder"] is not None:
        with contextlib.suppress(OSError):
            os.chdir(place["folder"])
    sys.path[:] = place["path"]
    sys.meta_path.insert(0, sources.Finder(place["sources"]))
    sys.argv[:] = place["arguments"]
    sys.setrecursionlimit(place["depth"])
    adopt_numeric_environment(place["numeric"])
    filters: Any = warnings.filters  # last: what is imported above may put its own first
    filters[:] = list(_known_filters(place["filters"]))
    warnings._filters_mutated()  # type: ignore[attr-defined]
    for message in harmless_warnings(place["numeric"]):
        warnings.filterwarnings("ignore", message=message)


def _category_last(item: Any) -> tuple[Any, ...]:
    action, message, category, module, line = item
    return action, message, module, line, category


def _known_filters(filters: list[Any]) -> Iterator[Any]:
    """Filters whose category is loaded here: importing a library only to filter its warnings would take long."""
    for action, message, module, line, (home, name) in filters:
        category = getattr(sys.modules.get(home), name, None)
        if category is not None:
            yield action, message, category, module, line
