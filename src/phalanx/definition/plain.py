"""Plain values as JSON and back, exactly: tuples, dicts with any keys, counters, infinities. No code, no classes."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
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
    wanted: Any = [like.like] * len(value) if isinstance(like, Each) and value.__class__ is list else like
    pairs: list[tuple[Any, Any, str]] = []
    same = value.__class__ is wanted.__class__
    if isinstance(wanted, dict) and same:
        odd = [key for key in {**wanted, **value} if key not in wanted or not (key in value or is_flag(wanted[key]))]
        if odd:
            raise ValueError(f"{path} has unknown fields or lacks them: {', '.join(map(repr, odd))}")
        pairs = [(item, wanted[key], _below(path, key)) for key, item in value.items()]
    elif isinstance(wanted, (list, tuple)) and same and len(value) == len(wanted):
        numbers = [float if type(item) is int else item for item in wanted]
        pairs = [(*pair, f"{path}.{n}") for n, pair in enumerate(zip(value, numbers, strict=True))]
    elif hasattr(wanted, "dtype"):
        same = all(getattr(value, name, None) == getattr(wanted, name) for name in ("dtype", "shape"))
    elif not isinstance(wanted, (dict, list, tuple)):
        kind = wanted if isinstance(wanted, (type, UnionType)) else type(wanted)
        kind = float | int if kind is float else kind
        same = isinstance(value, kind) and (kind in (bool, object) or not isinstance(value, bool))
    else:
        same = False
    if not same:
        raise ValueError(f"{path} is {value!r:.80}, and should be like {like!r:.80}")
    for pair in pairs:
        check_like(*pair)


def is_flag(value: Any) -> bool:
    """Whether it is true, false or nothing."""
    return value is None or isinstance(value, bool)


def check_specs(mine: Mapping[str, Any], theirs: Mapping[str, Any], spelled: Callable[[Any], str]) -> None:
    """Refuse tensors of a snapshot that are not those that are here; names the first that differs, and how.

    Raises
    ------
    SnapshotError
        They are of another model, or of another optimizer.
    """
    for name in [*mine, *theirs]:
        here, there = (spelled(part[name]) if name in part else "missing" for part in (mine, theirs))
        if here != there:
            raise SnapshotError(f"{name} is {there} in the snapshot, but {here} here")


def changes(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """What is not as it was, in words."""
    differing = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    return [f"{name} is {now.get(name)}, was {then.get(name)}" for name in differing]


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
