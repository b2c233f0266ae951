"""Plain values, and containers and arrays of them: as JSON and back, as text, and hashed. No code, no classes.

JSON is exact: tuples, dicts with any keys, counters, infinities. What a recipe holds is hashed whole up to a size, and
sampled beyond.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, NamedTuple

import numpy as np

from phalanx.definition.checks import outline
from phalanx.errors import PhalanxError, SnapshotError, UsageError, safe_str

MARK = "!"  # key of an object that stands for something that JSON lacks
DEPTH = 40
Sink = Callable[[Any, str], Any]
WHOLE_BYTES = 64 << 20  # of an array; 40 ms where the processor has instructions for SHA-256
LIST_BYTES = 256 << 20  # of a list of samples; about a second
SAMPLED_BYTES, SAMPLED_ROWS, LEAST_ROWS = 4 << 20, 4096, 4
ITEM_BYTES = 1024  # an item of a list costs as much time as hashing so many bytes
DEEP = 20
NESTED = (list, tuple, dict)
SHOWN = 60  # characters
PLAIN = (type(None), bool, int, float, complex, str, bytes)


def encoded(value: Any, keep: Sink, path: str, depth: int = 0) -> Any:
    """``value`` as JSON values; ``keep(leaf, path)`` returns what stands for any other leaf, or None.

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
    raise ValueError(f"{path} is of an unknown kind: {kind!r:.80}")


def distinct_names(values: Mapping[str, Any], taken: Iterable[str]) -> dict[str, Any]:
    """What was evaluated, by name: "evaluation/loss" where ``taken`` has another "loss"."""
    known = set(taken)
    return {f"evaluation/{name}" if name in known else name: value for name, value in values.items()}


class Each(NamedTuple):
    """Stands for a list of any length, in what a value is to be like."""

    like: Any


def inexact(dtype: Any) -> bool:
    """Whether torch can average and train numbers of this type; those of a byte are made elsewhere, and only read."""
    return dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)


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
    """Whether it is True, False or None."""
    return value is None or isinstance(value, bool)


def check_specs(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse tensors of a snapshot that do not fit those here; names the first that differs, and how.

    Raises
    ------
    SnapshotError
        They are of another model, or of another optimizer.
    """
    for name in [*mine, *theirs]:
        here, there = (outline(part[name]) if name in part else "missing" for part in (mine, theirs))
        if here != there:
            raise SnapshotError(f"{name} is {there} in the snapshot, but {here} here")


def changes(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """What has changed, in words."""
    differing = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    return [f"{name} is {now.get(name)}, was {then.get(name)}" for name in differing]


@contextlib.contextmanager
def taking_over(part: str) -> Iterator[None]:
    """Turn what is raised while a part of a snapshot is taken over into an error that says it does not fit."""
    try:
        yield
    except PhalanxError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: " * (not isinstance(error, ValueError)) + safe_str(error)
        raise SnapshotError(f"{part} in the snapshot does not fit this recipe's: {why}") from error


def array_summary(value: Any) -> list[str]:
    """Describe an array or tensor by two texts: one to show, and a hash. A single number is shown itself.

    Raises
    ------
    Exception
        It cannot be read.
    """
    head = _dtype(value) + str(list(value.shape))
    if math.prod(value.shape) == 1:
        return [f"{head} {value.tolist()!r}", ""]
    size, length = _bytes(value), value.shape[0] if value.shape else 1
    if sampled := size > WHOLE_BYTES and length > LEAST_ROWS:  # evenly spaced
        most = max(LEAST_ROWS, min(SAMPLED_ROWS, SAMPLED_BYTES * length // size))
        value = value[np.array(_evenly(length, most))]
    return [head + " sampled" * sampled, hashlib.sha256(content(value)).hexdigest()[:16]]


def container_summary(value: Any) -> list[str]:
    """Describe a list, tuple or dict of plain values, arrays and more such containers in the same way.

    Raises
    ------
    TypeError
        It holds something else, or is nested too deeply.
    """
    sha = hashlib.sha256()
    items: Any = list(value.items()) if isinstance(value, dict) else value
    cost = ITEM_BYTES + sum(map(len, _pieces(items[0], DEEP))) if len(items) else 1
    numbers = _evenly(len(items), max(SAMPLED_ROWS, LIST_BYTES // cost))
    for number in numbers:
        for piece in _pieces(items[number], DEEP):
            sha.update(piece)
    return [f"{type(value).__name__} of {len(items)}" + " sampled" * (len(numbers) < len(items)), sha.hexdigest()[:16]]


def plain(value: Any) -> str:
    """A plain value, or a set of them, as text; sets are sorted, and long texts are hashed."""
    is_set = isinstance(value, (set, frozenset))
    text = f"{type(value).__name__}({', '.join(sorted(map(repr, value)))})" if is_set else repr(value)
    if len(text) <= SHOWN or not hasattr(value, "__len__"):
        return text
    return f"{type(value).__name__} of {len(value)} {short(text)}"


def short(text: str) -> str:
    """Sixteen digits of a hash."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def hashed(batch: Any) -> bytes:
    """32 bytes that are equal for equal batches: containers, arrays and tensors, and what else they hold as text."""
    sha = hashlib.sha256()
    for piece in _pieces(batch, None):
        sha.update(piece)
    return sha.digest()


def is_plain_array(value: Any) -> bool:
    """Whether it has a dtype, a shape and a way to numpy; nothing of its own is executed to find out."""
    return all(hasattr(type(value), name) for name in ("dtype", "shape", "__array__")) and not isinstance(value, type)


def _evenly(length: int, most: int) -> list[int]:
    """At most so many indices, evenly spaced, with the first and the last."""
    if length <= most:
        return list(range(length))
    return sorted({number * (length - 1) // (most - 1) for number in range(most)})


def _pieces(value: Any, depth: int | None) -> Iterator[bytes | memoryview]:
    """The bytes of all that a container holds. ``depth``: levels allowed; None: any, other objects as their type."""
    if type(value) in NESTED or (depth is None and isinstance(value, (*NESTED, Mapping))):
        if depth == 0:
            raise TypeError("nested too deeply")
        items: Any = list(value.items()) if isinstance(value, Mapping) else value
        yield f"{len(items)} in a {type(value).__name__}".encode()
        for item in items:
            yield from _pieces(item, None if depth is None else depth - 1)
    elif depth is None and hasattr(type(value), "__array_interface__") and not is_plain_array(value):  # an image, say
        yield from _pieces(np.asarray(value), depth)
    elif is_plain_array(value) and not (depth is None and getattr(value.dtype, "hasobject", False)):
        yield f"{_dtype(value)}{list(value.shape)}".encode()
        yield content(value)
    elif type(value) in PLAIN or (depth is None and isinstance(value, PLAIN)):
        text = repr(value)
        yield f"{len(text)}:{text}".encode(errors="surrogatepass")
    elif depth is None:
        yield type(value).__qualname__.encode()
    else:
        raise TypeError(type(value).__name__)


def content(array: Any) -> bytes | memoryview:
    """The bytes of an array or tensor, in the order of its axes."""
    if callable(getattr(array, "detach", None)):
        try:
            return np.ascontiguousarray(array.numpy()).reshape(-1).view(np.uint8).data
        except (TypeError, RuntimeError):  # with a gradient, conjugated, on a device, of a dtype that numpy has not
            pass
        try:
            tensor = array.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            array = tensor.view(sys.modules[type(array.dtype).__module__].uint8).numpy()
        except (TypeError, RuntimeError, AttributeError):  # quantized, sparse
            return repr(array.tolist()).encode()
    values = np.asarray(array)
    if values.dtype.hasobject:
        raise TypeError("an array of objects")
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _dtype(array: Any) -> str:
    """A dtype without the module that it is from: all frameworks have the same name for it."""
    return str(array.dtype).removeprefix(f"{type(array.dtype).__module__}.")


def _bytes(array: Any) -> int:
    size = getattr(array, "itemsize", None) or getattr(array.dtype, "itemsize", 8)
    return math.prod(array.shape) * int(size)
