"""What of the caller's process user code may look at: copied to workers, so that it finds itself at home there."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from phalanx.frameworks.opening import adopt_numeric_environment, numeric_environment


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
        "arguments": list(sys.argv),
        "filters": [(*rest, (kind.__module__, kind.__name__)) for *rest, kind in map(_category_last, warnings.filters)],
        "numeric": numeric_environment(framework),
    }


def inhabit(place: dict[str, Any]) -> None:
    """Make this process like the described one."""
    os.environ.clear()
    os.environ.update(place["environment"])
    if place["folder"] is not None:
        with contextlib.suppress(OSError):
            os.chdir(place["folder"])
    sys.path[:] = place["path"]
    sys.argv[:] = place["arguments"]
    adopt_numeric_environment(place["numeric"])
    filters: Any = warnings.filters  # last: what is imported above may put its own first
    filters[:] = list(_known_filters(place["filters"]))
    warnings._filters_mutated()  # type: ignore[attr-defined]
    ours = "JAX_COMPILATION_CACHE_DIR" not in place["environment"]
    if ours and "jax" in place["numeric"]:  # what one worker writes another may be reading
        warnings.filterwarnings("ignore", message="Error reading persistent compilation cache")


def _category_last(item: Any) -> tuple[Any, ...]:
    action, message, category, module, line = item
    return action, message, module, line, category


def _known_filters(filters: list[Any]) -> Iterator[Any]:
    """Filters whose category is loaded here: importing a library only to filter its warnings would take long."""
    for action, message, module, line, (home, name) in filters:
        category = getattr(sys.modules.get(home), name, None)
        if category is not None:
            yield action, message, category, module, line
