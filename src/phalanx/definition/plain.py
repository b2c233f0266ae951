"""Plain values as JSON and back, exactly: tuples, dicts with any keys, counters, infinities. No code, no classes."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, NamedTuple

from phalanx.errors import PhalanxError, SnapshotError, UsageError

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


def decoded(value: Any, find: Callable[[Any, str], Any], path: str) -> Any:
    """The value again; ``find(kept, path)`` gives the leaves that were kept elsewhere. ``path``: as for ``encoded``.

    Raises
    ------
    ValueError
        This is not what ``encoded`` makes.
    """
    if isinstance(value, list):
        return [decoded(item, find, f"{path}.{n}") for n, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kind, content = value.get(MARK), value.get("is")
    if set(value) == {MARK, "is"}:
        if kind == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if kind == "tensor":
            return find(content, path)
        if isinstance(content, list):
            if kind == "complex" and len(content) == 2:
                return complex(*(decoded(part, find, path) for part in content))
            if kind == "tuple":
                return tuple(decoded(content, find, path))
            if kind in ("dict", "counter") and all(isinstance(pair, list) and len(pair) == 2 for pair in content):
                keys = [decoded(key, find, path) for key, _ in content]
                pairs = {
                    key: decoded(item, find, _below(path, key)) for key, (_, item) in zip(keys, content, strict=True)
                }
                if len(pairs) == len(content):
                    return pairs if kind == "dict" else collections.Counter(pairs)
    raise ValueError(f"{path} is of an unknown kind: {kind!r}")


class Each(NamedTuple):
    """Stands for a list of any length, in what a value is to be like."""

    like: Any


def check_like(value: Any, like: Any, path: str) -> None:
    """Refuse a plain value that is not like another: the same keys, lengths and types, and shapes of tensors.

    Parameters
    ----------
    value : Any
    like : Any
        Such a value; types may stand for values in it. A list of integers is like one of any numbers, and a dict may
        lack flags.
    path : str
        Where the value was.

    Raises
    ------
    ValueError
        It is not; says where.
    """
    pairs: list[tuple[Any, Any, str]] = []
    if isinstance(like, Each):
        like = [like.like] * len(value) if isinstance(value, list) else []
    if isinstance(like, dict) and type(value) is type(like):
        odd = [key for key in {**like, **value} if key not in like or (key not in value and not _flag(like[key]))]
        if odd:
            raise ValueError(f"{path} has or lacks {', '.join(map(repr, odd))}")
        same, pairs = True, [(item, like[key], _below(path, key)) for key, item in value.items()]
    elif isinstance(like, (list, tuple)):
        same = type(value) is type(like) and len(value) == len(like)
        wanted = [float if type(item) is int else item for item in like]
        pairs = [(*pair, f"{path}.{n}") for n, pair in enumerate(zip(value, wanted, strict=True))] if same else []
    elif hasattr(like, "dtype"):
        same = [getattr(value, name, None) for name in ("dtype", "shape")] == [like.dtype, like.shape]
    else:
        kind = like if isinstance(like, (type, UnionType)) else type(like)
        kind = float | int if kind is float else kind
        same = isinstance(value, kind) and (kind in (bool, object) or not isinstance(value, bool))
    if not same:
        raise ValueError(f"{path} is {value!r:.80}, and should be like {like!r:.80}")
    for pair in pairs:
        check_like(*pair)


def _flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


@contextlib.contextmanager
def taking_over(part: str) -> Iterator[None]:
    """Whatever is raised while a part of a snapshot is taken over says that it does not fit."""
    try:
        yield
    except PhalanxError:
        raise
    except Exception as error:
        why = error if isinstance(error, ValueError) else repr(error)
        raise SnapshotError(f"{part} in the snapshot does not fit this recipe's: {why}") from error
