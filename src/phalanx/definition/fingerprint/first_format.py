"""Fingerprints of format 1, of names and sampled values: snapshots that have one are compared in its own terms.

Format 1 knows source only as text, so what it says of source is a doubt, and no difference.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from phalanx.definition.data import Columns, Samples, content
from phalanx.definition.fields import Definition
from phalanx.definition.fingerprint.compare import FUNCTIONS, VALUES, Comparison, between
from phalanx.definition.plain import encoded

SAMPLED = 16  # rows of each column
DEEP = 12  # functions that enclose functions
SOURCE = "source of "


def compared(definition: Definition, theirs: Mapping[str, Any]) -> Comparison:
    """How a recipe compares with a fingerprint of format 1."""
    mine = _fingerprint(definition)
    comparison = Comparison()
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            if name.startswith(SOURCE):
                comparison.doubts.append(f"the {name} changed, in which the snapshot does not tell comments from code")
            else:
                comparison.differs.append(between(name, repr(mine.get(name)), repr(theirs.get(name))))
    return comparison


def _fingerprint(definition: Definition) -> dict[str, Any]:
    fields = {name: encoded(getattr(definition, name), lambda leaf, path: None, name) for name in VALUES}
    for name in FUNCTIONS:
        value = getattr(definition, name)
        fields[name] = None if value is None else _spelled(value)
        fields[SOURCE + name] = None if value is None else _source(value)
    return fields | {"data": _data(definition.source)}


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
    rows = np.unique(np.linspace(0, len(source) - 1, SAMPLED).astype(np.int64))
    for array in source.arrays:
        for row in rows:
            hashed.update(content(array[int(row)])[-1])
    shapes = ", ".join(f"{str(array.dtype).removeprefix('torch.')}{list(array.shape)}" for array in source.arrays)
    return f"{shapes}, sampled {hashed.hexdigest()[:16]}"
