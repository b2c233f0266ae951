"""Digests, SHA-256 each: of a state, of a batch, and of what a recipe holds.

Into that of a state each entry brings its kind, name, dtype and shape, then its bytes in C order, and the step number
comes last. Layout in memory, device, worker count and engine do not enter. Contents of a recipe are read whole up to a
size, and sampled beyond.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WHOLE_BYTES = 64 << 20  # of an array; 40 ms where the processor has instructions for SHA-256
LIST_BYTES = 256 << 20  # of a list of samples; about a second
SAMPLED_BYTES, SAMPLED_ROWS = 4 << 20, 4096
ITEM_BYTES = 1024  # an item of a list costs as much time as hashing so many bytes
DEEP = 20
NESTED = (list, tuple, dict)
KEYS = "key<"  # how the dtypes of jax's random keys begin
SHOWN = 60  # characters
PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True, slots=True)
class Entry:
    """One named tensor or scalar of a state; ``content`` is a buffer of its bytes in C order."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Any


def leaf_hash(code: str, shape: Sequence[int], content: Any) -> str:
    """SHA-256, in hexadecimal, of a tensor by itself: what it is (``code``: its dtype in safetensors) and its bytes."""
    sha = hashlib.sha256(json.dumps([code, list(shape)]).encode())
    sha.update(content)
    return sha.hexdigest()


def digest_of(entries: Iterable[Entry], step: int | None) -> str:
    """SHA-256, in hexadecimal, of ``entries`` in their order and the number of finished steps."""
    sha = hashlib.sha256()
    for entry in entries:
        header = json.dumps([entry.kind, entry.name, entry.dtype, list(entry.shape)])
        sha.update(header.encode() + b"\n")
        sha.update(entry.content)
    if step is not None:
        sha.update(json.dumps(["step", step]).encode() + b"\n")
    return sha.hexdigest()


def told_of_array(value: Any) -> list[str]:
    """An array or tensor as two texts, what is shown and a hash. A single number is shown.

    Raises
    ------
    Exception
        It cannot be read.
    """
    head = _dtype(value) + str(list(value.shape))
    if head.startswith(KEYS):
        value = sys.modules[type(value).__module__.partition(".")[0]].random.key_data(value)
    if math.prod(value.shape) == 1:
        return [f"{head} {value.tolist()!r}", ""]
    whole = _bytes(value) <= WHOLE_BYTES
    sha = hashlib.sha256()
    for piece in [value] if whole else _sample(value):
        sha.update(content(piece))
    return [head + " sampled" * (not whole), sha.hexdigest()[:16]]


def told_of_container(value: Any) -> list[str]:
    """A list, tuple or dict of plain values, arrays and more such containers, told in the same way.

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
    """A plain value as text, and a set of them, which come in any order; hashed if it is long."""
    is_set = isinstance(value, (set, frozenset))
    told = f"{type(value).__name__}({', '.join(sorted(map(repr, value)))})" if is_set else repr(value)
    if len(told) <= SHOWN or not hasattr(value, "__len__"):
        return told
    return f"{type(value).__name__} of {len(value)} {short(told)}"


def short(text: str) -> str:
    """Sixteen digits of a hash."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def hashed(batch: Any) -> bytes:
    """32 bytes that are equal for equal batches: containers, arrays and tensors, and what else they hold as text."""
    sha = hashlib.sha256()
    for piece in _pieces(batch, None):
        sha.update(piece)
    return sha.digest()


def is_array(value: Any) -> bool:
    """Whether it has a dtype, a shape and a way to numpy; nothing of its own is executed to find out."""
    return all(hasattr(type(value), name) for name in ("dtype", "shape", "__array__")) and not isinstance(value, type)


def _evenly(length: int, most: int) -> list[int]:
    """At most so many indices, evenly spaced, with the first and the last."""
    if length <= most:
        return list(range(length))
    return sorted({number * (length - 1) // (most - 1) for number in range(most)})


def _pieces(value: Any, depth: int | None) -> Iterator[bytes | memoryview]:
    """Everything in a container. ``depth``: what may be nested; None: as deep as it goes, all else as its type."""
    if type(value) in NESTED or (depth is None and isinstance(value, (*NESTED, Mapping))):
        if depth == 0:
            raise TypeError("nested too deeply")
        items: Any = list(value.items()) if isinstance(value, Mapping) else value
        yield f"{len(items)} in a {type(value).__name__}".encode()
        for item in items:
            yield from _pieces(item, None if depth is None else depth - 1)
    elif depth is None and hasattr(type(value), "__array_interface__") and not is_array(value):  # a picture, say
        yield from _pieces(np.asarray(value), depth)
    elif is_array(value) and not (depth is None and getattr(value.dtype, "hasobject", False)):
        yield f"{_dtype(value)}{list(value.shape)}".encode()
        yield content(value)
    elif type(value) in PLAIN or (depth is None and isinstance(value, PLAIN)):
        told = repr(value)
        yield f"{len(told)}:{told}".encode(errors="surrogatepass")
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


def _sample(array: Any) -> Iterator[Any]:
    """Rows of a large array, evenly spaced."""
    length = int(array.shape[0])
    row = max(1, _bytes(array) // length)
    if row > SAMPLED_BYTES // 4:
        for number in _evenly(length, 4):
            yield from _sample(array[number])
    else:
        yield array[np.array(_evenly(length, min(SAMPLED_ROWS, SAMPLED_BYTES // row)))]


def _dtype(array: Any) -> str:
    """A dtype without the module that it is from: all frameworks have the same name for it."""
    return str(array.dtype).removeprefix(f"{type(array.dtype).__module__}.")


def _bytes(array: Any) -> int:
    size = getattr(array, "itemsize", None) or getattr(array.dtype, "itemsize", 8)
    return math.prod(array.shape) * int(size)
