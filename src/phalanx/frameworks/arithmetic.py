"""Arrays over shared memory, and elementwise arithmetic over gradients, in numpy.

Each operation is rounded once, whatever other operations surround it. XLA does not promise that: a division whose
divisor has one user becomes a product with its reciprocal. Implements ``seams.Arrays`` and ``seams.Arithmetic``.
"""

from __future__ import annotations

import functools
import math
import mmap
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.plan.fold import fold_mean
from phalanx.plan.shares import share_weights
from phalanx.shared.layout import Spec

Gradient = list[Any]  # jax arrays, which nobody can write, or numpy arrays that may be written

BLOCK = 4096  # elements whose squares are summed first, before blocks are
ALIGNMENT = 64  # bytes; XLA uses memory that is aligned so without a copy


def add(left: Gradient, right: Gradient) -> Gradient:
    """``left + right``, in the memory of ``left`` where that may be written."""
    pairs = [(_plain(a), _plain(b)) for a, b in zip(left, right, strict=True)]
    return [np.add(a, b, out=_room(a)) for a, b in pairs]


def add_into(left: Gradient, right: Gradient, homes: Gradient) -> Gradient:
    """``left + right``. Vectors are published later, as a whole, so ``homes`` are not used."""
    return add(left, right)


def scale(vector: Gradient, factor: float) -> Gradient:
    """``vector * factor``, each element computed in float32 at least and rounded once."""
    return [_applied(np.multiply, _plain(entry), factor) for entry in vector]


def divide(vector: Gradient, divisor: float) -> Gradient:
    """``vector / divisor``, each element computed in float32 at least and rounded once."""
    return [_applied(np.divide, _plain(entry), divisor) for entry in vector]


def read(scalars: Sequence[float]) -> list[float]:
    """Losses are read when they are computed, so they are numbers already."""
    return list(scalars)


def checksum(vector: Sequence[Any]) -> int:
    """The checksum of the bytes of all entries."""
    entries = (b"-" if entry is None else _plain(entry).tobytes() for entry in vector)
    return functools.reduce(lambda total, entry: zlib.crc32(entry, total), entries, 0)


def finite(vector: Gradient) -> bool:
    """Whether every element is finite; None entries belong to another worker."""
    return all(bool(np.isfinite(_plain(entry)).all()) for entry in vector if entry is not None)


def squares(vector: Gradient) -> np.ndarray:
    """The sum of squares of each entry, added in float32 at least."""
    return np.array([_square_sum(_plain(entry)) for entry in vector], np.float64)


def root(sums: np.ndarray) -> float:
    """2-norm over all entries, from their ``squares``."""
    return math.sqrt(sums.sum())


def norm(vector: Gradient) -> float:
    """2-norm over all entries."""
    return root(squares(vector))


def settled(replicas: Sequence[tuple[int, list[np.ndarray]]], starts: list[np.ndarray]) -> list[np.ndarray]:
    """Buffers after a step, from (samples, buffers) of each replica that ran, in order.

    All frameworks have this rule; for torch's tensors it is in ``frameworks/torch/replica/buffers.py``.
    A buffer whose bytes are equal on all replicas keeps them. Otherwise a floating one becomes the mean, weighted by
    sample count and added in the fold's order. Other dtypes take the first replica's bytes.
    """
    if not replicas or not starts:
        return starts
    weights = share_weights([samples for samples, _ in replicas])
    return [_settled([buffers[number] for _, buffers in replicas], weights) for number in range(len(starts))]


def _settled(values: list[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    first = values[0]
    if first.dtype.kind != "f" or all(first.tobytes() == other.tobytes() for other in values[1:]):
        return first
    number = first.dtype.type
    terms = [value if weight == 1 else value * number(weight) for value, weight in zip(values, weights, strict=True)]
    return np.asarray(fold_mean(terms, weights, np.add, number))


def add_up(parts: Sequence[Any], additions: Sequence[tuple[int, int]], first: int, divisor: float) -> np.ndarray:
    """Do the additions (into, from) between ``parts``, then divide part ``first``."""
    sums = list(parts)
    for into, other in additions:
        (sums[into],) = add([sums[into]], [sums[other]])
    return sums[first] if divisor == 1 else _applied(np.divide, _plain(sums[first]), divisor)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory for an array, placed so that XLA need not copy it."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def view(memory: mmap.mmap, offset: int, spec: Spec) -> np.ndarray:
    """An array over memory."""
    return np.frombuffer(memory, np.uint8, spec.nbytes, offset).view(np.dtype(spec.dtype)).reshape(spec.shape)


def _plain(entry: Any) -> np.ndarray:
    return np.asarray(entry)


def _room(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else empty(array.shape, array.dtype)


def _applied(operation: np.ufunc, array: np.ndarray, number: float) -> np.ndarray:
    room = _room(array)
    if array.dtype.itemsize >= np.dtype(np.float32).itemsize:
        return operation(array, array.dtype.type(number), out=room)
    room[...] = operation(array.astype(np.float32), np.float32(number))
    return room


def _square_sum(array: np.ndarray) -> float:
    flat = array.reshape(-1)
    if flat.dtype.itemsize < np.dtype(np.float32).itemsize:
        flat = flat.astype(np.float32)
    blocks, rest = len(flat) // BLOCK, flat[len(flat) // BLOCK * BLOCK :]
    total = float(np.einsum("i,i->", rest, rest))
    if blocks:
        table = flat[: blocks * BLOCK].reshape(blocks, BLOCK)
        total += float(np.einsum("ij,ij->i", table, table).sum(dtype=np.float64))
    return total
