"""Plain values as JSON and back, exactly: tuples, dicts with any keys, counters, infinities. No code, no classes."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

from phalanx.errors import UsageError

MARK = "!"  # of an object that stands for something that JSON has not
DEPTH = 40
Sink = Callable[[Any, str], Any]


def encoded(value: Any, keep: Sink, path: str, depth: int = 0) -> Any:
    """``value`` as JSON values; ``keep(leaf, path)`` says what stands for a leaf that is none, or None.

    Raises
    ------
    UsageError
        Something has no plain form; names its path.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {MARK: "float", "is": repr(value)}
    kept = keep(value, path)
    if kept is not None:
        return {MARK: "tensor", "is": kept}
    if isinstance(value, complex):
        return {MARK: "complex", "is": [encoded(part, keep, path) for part in (value.real, value.imag)]}
    if depth < DEPTH:
        if type(value) in (list, tuple):
            items = [encoded(item, keep, f"{path}.{n}", depth + 1) for n, item in enumerate(value)]
            return items if type(value) is list else {MARK: "tuple", "is": items}
        if isinstance(value, dict):
            pairs = [
                [
                    encoded(key, keep, path, depth + 1),
                    encoded(item, keep, _below(path, key), depth + 1),
                ]
                for key, item in value.items()
            ]
            return {MARK: "counter" if isinstance(value, collections.Counter) else "dict", "is": pairs}
    raise UsageError(
        f"{path} is a {type(value).__name__}, which no snapshot can hold; keep tensors, numbers, text, lists and dicts "
        "there, or train without run_dir"
    )


def _below(path: str, key: Any) -> str:
    return f"{path}.{key if isinstance(key, str) else (key,)}"


def decoded(value: Any, find: Callable[[Any], Any]) -> Any:
    """The value again; ``find(name)`` gives the leaves that were kept elsewhere.

    Raises
    ------
    ValueError
        This is not what ``encoded`` makes.
    """
    if isinstance(value, list):
        return [decoded(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value.get(MARK), value.get("is")
    if set(value) == {MARK, "is"}:
        if kind == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if kind == "tensor":
            return find(content)
        if isinstance(content, list):
            if kind == "complex" and len(content) == 2:
                return complex(*(decoded(part, find) for part in content))
            if kind == "tuple":
                return tuple(decoded(item, find) for item in content)
            if kind in ("dict", "counter") and all(isinstance(pair, list) and len(pair) == 2 for pair in content):
                pairs = {decoded(key, find): decoded(item, find) for key, item in content}
                return pairs if kind == "dict" else collections.Counter(pairs)
    raise ValueError(f"a field of an unknown kind: {kind!r}")
