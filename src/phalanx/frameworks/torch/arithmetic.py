"""Tensors over shared memory, and elementwise arithmetic over gradients: lists of tensors, None where absent.

Implements ``seams.Arrays`` and ``seams.Arithmetic``. Elementwise, so slicing moves no bit.
"""

from __future__ import annotations

import functools
import math
import mmap
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.frameworks.torch.replica.buffers import bytes_of
from phalanx.shared.layout import Spec, row_major

Gradient = list[torch.Tensor | None]
FOREACH: Any = torch  # its names are private, its optimizers are made of them
SLICE = 1 << 16  # elements: what is added stays in cache until it is divided


def add(left: Gradient, right: Gradient) -> Gradient:
    """``left + right``, written into ``left``; absent + x = x. What is in ``left`` itself was added already."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None and b is not a]
    if pairs:
        into, sources = zip(*pairs, strict=True)
        FOREACH._foreach_add_(into, sources)
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def scale(vector: Gradient, factor: float) -> Gradient:
    """``vector * factor``, in place."""
    return [None if a is None else a.mul_(factor) for a in vector]  # over lists, a factor is rounded to their dtype


def divide(vector: Gradient, divisor: float) -> Gradient:
    """``vector / divisor``, in place."""
    return [None if a is None else _over(a, divisor) for a in vector]


def read(scalars: list[float]) -> list[float]:
    """Losses are read when they are computed, so they are numbers already."""
    return scalars


def checksum(vector: Sequence[torch.Tensor | None]) -> int:
    """Of the bytes of all entries."""
    return functools.reduce(
        lambda total, entry: zlib.crc32(b"-" if entry is None else bytes_of(entry).cpu().numpy().data, total), vector, 0
    )


def finite(vector: Gradient) -> bool:
    """Whether every element is finite."""
    return all(bool(torch.isfinite(a).all()) for a in vector if a is not None)


def add_into(left: Gradient, right: Gradient, homes: Gradient) -> Gradient:
    """See ``seams.Arrays.add_into``. What is in ``left`` itself was added already."""
    added: Gradient = []
    for mine, other, home in zip(left, right, homes, strict=True):
        if mine is not None:
            added.append(mine if other is None or other is mine else mine.add_(other))
        else:
            added.append(other if other is None or home is None else home.copy_(other))
    return added


def add_up(
    parts: Sequence[torch.Tensor | None], additions: Sequence[tuple[int, int]], first: int, divisor: float
) -> torch.Tensor:
    """Do the additions (into, from) between ``parts``, then divide part ``first``; slice by slice, while in cache."""
    total = parts[first]
    assert total is not None
    there = [part for part in parts if part is not None]
    size = total.numel()
    if size <= SLICE or any(part.stride() != total.stride() for part in there):
        _add(parts, additions, total, divisor)
        return total
    flat = [None if part is None else part.as_strided((size,), (1,)) for part in parts]
    whole = total.as_strided((size,), (1,))
    for start in range(0, size, SLICE):
        slices = [None if part is None else part[start : start + SLICE] for part in flat]
        _add(slices, additions, whole[start : start + SLICE], divisor)
    return total


def spec_of(tensor: torch.Tensor) -> Spec:
    """What autograd makes a tensor's gradient look like: the tensor's own strides if it is dense, else row by row."""
    shape = tuple(tensor.shape)
    steps = [(length - 1) * stride for length, stride in zip(shape, tensor.stride(), strict=True)]
    strides = tensor.stride() if sum(steps) + 1 == tensor.numel() else row_major(shape)
    return Spec(shape, strides, str(tensor.dtype).removeprefix("torch."), tensor.dtype.itemsize)


def blank(spec: Spec) -> torch.Tensor:
    """A tensor with any content."""
    return torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype))


def view(memory: mmap.mmap, offset: int, spec: Spec) -> torch.Tensor:
    """A tensor over memory, with a version counter of its own."""
    if spec.elements == 0:
        return blank(spec)
    flat = torch.frombuffer(memory, dtype=getattr(torch, spec.dtype), count=spec.elements, offset=offset)
    return flat.as_strided(spec.shape, spec.strides)


def _add(
    parts: Sequence[torch.Tensor | None], additions: Sequence[tuple[int, int]], total: torch.Tensor, divisor: float
) -> None:
    for into, source in additions:
        parts[into].add_(parts[source])  # type: ignore[union-attr, arg-type]
    if divisor != 1:
        _over(total, divisor)


def _over(array: torch.Tensor, divisor: float) -> torch.Tensor:
    """``array / divisor``, in place; a power of two as a factor, which gives the same bits in half the time."""
    factor = _factor(divisor) if array.is_floating_point() else None  # complex products have other zeros
    return array.div_(divisor) if factor is None else array.mul_(factor)


@functools.lru_cache(64)
def _factor(divisor: float) -> torch.Tensor | None:
    """``1 / divisor`` of a power of two that float32 has, as a scalar tensor: torch makes one of a number each time.

    It is kept, so it lies on the CPU whatever the caller's default device is; it may be multiplied with any.
    """
    mantissa, exponent = math.frexp(divisor)
    if mantissa != 0.5 or abs(exponent) > 64:
        return None
    return torch.tensor(1 / divisor, dtype=torch.float64, device="cpu")
