"""Fingerprints of format 1, of names and sampled values: snapshots that have one are compared in its own terms."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from phalanx.definition.data import Columns, Samples
from phalanx.definition.fields import Definition
from phalanx.definition.plain import encoded

SAMPLED = 16  # rows of each column
DEEP = 12  # functions that enclose functions
SOURCE = "source of "


def fingerprint(definition: Definition, values: tuple[str, ...], functions: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a recipe by name. Source counts only as text of which a change is told."""
    found = {name: encoded(getattr(definition, name), lambda leaf, path: None, name) for name in values}
    for name in functions:
        value = getattr(definition, name)
        found[name] = None if value is None else _spelled(value)
        found[SOURCE + name] = None if value is None else _source(value)
    found["data"] = _data(definition.source)
    return found


def _spelled(value: Any) -> str:
    """A function by its name, a partial with its arguments, an object by its class, a pair of functions by all."""
    if isinstance(value, functools.partial):
        given = [_argument(item) for item in value.args]
        given += [f"{name}={_argument(item)}" for name, item in sorted(value.keywords.items())]
        return f"{_spelled(value.func)}({', '.join(given)})"
    if inspect.isroutine(value) or isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, tuple):  # an optimizer of optax: what it is lies in what its functions enclose
        return f"{name} {hashlib.sha256(_enclosed(value).encode()).hexdigest()[:16]}"
    if not hasattr(value, "named_buffers"):  # attributes of other objects may change as they are used
        return name
    given = {name: item for name, item in vars(value).items() if not name.startswith("_") and _is_plain(item)}
    given |= dict(value.named_buffers())
    return f"{name}({', '.join(f'{key}={_argument(item)}' for key, item in sorted(given.items()))})"


def _argument(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_argument, value))})"
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        hashed = hashlib.sha256(repr(value.tolist()).encode()).hexdigest()[:16]
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {hashed}"
    return repr(value) if _is_plain(value) else _spelled(value)


def _enclosed(value: Any, depth: int = 0) -> str:
    """A function with everything that it encloses, functions in turn."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_enclosed(item, depth) for item in value)})"
    if not inspect.isfunction(value) or depth > DEEP:
        return _argument(value)
    cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]
    return f"{_spelled(value)}({', '.join(_enclosed(cell.cell_contents, depth + 1) for cell in cells)})"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _source(value: Any) -> str | None:
    """A hash of the source, where there is one."""
    while isinstance(value, functools.partial):
        value = value.func
    try:
        text = inspect.getsource(value if inspect.isroutine(value) or isinstance(value, type) else type(value))
    except (OSError, TypeError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _data(source: Columns | Samples | None) -> Any:
    if source is None:
        return None
    if isinstance(source, Samples):
        return f"{len(source)} samples in a {type(source.items).__name__}"
    hashed = hashlib.sha256()
    for part in _sampled(source):
        hashed.update(part)
    shapes = ", ".join(f"{str(array.dtype).removeprefix('torch.')}{list(array.shape)}" for array in source.arrays)
    return f"{shapes}, sampled {hashed.hexdigest()[:16]}"


def _content(array: Any) -> bytes:
    """The bytes of an array or tensor."""
    try:
        return np.ascontiguousarray(np.asarray(array)).tobytes()
    except (TypeError, RuntimeError):  # what numpy has no dtype for, or does not read
        return repr(array.tolist()).encode()


def _sampled(source: Columns) -> Iterator[bytes]:
    rows = np.unique(np.linspace(0, len(source) - 1, SAMPLED).astype(np.int64))
    for array in source.arrays:
        for row in rows:
            yield _content(array[int(row)])
