"""Elementwise arithmetic over gradients: lists of tensors, None where absent. Elementwise, so slicing moves no bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Gradient = list[torch.Tensor | None]
SLICE = 1 << 16  # elements: what is added stays in cache until it is divided


def add(left: Gradient, right: Gradient) -> Gradient:
    """``left + right``, written into ``left``; absent + x = x."""
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(left, right, strict=True)]


def scale(vector: Gradient, factor: float) -> Gradient:
    """``vector * factor``, in place."""
    return [None if a is None else a.mul_(factor) for a in vector]


def divide(vector: Gradient, divisor: float) -> Gradient:
    """``vector / divisor``, in place."""
    return [None if a is None else a.div_(divisor) for a in vector]


def finite(vector: Gradient) -> bool:
    """Whether every element is finite."""
    return all(bool(torch.isfinite(a).all()) for a in vector if a is not None)


def add_sliced(
    parts: Sequence[torch.Tensor | None],
    additions: Sequence[tuple[int, int]],
    total: torch.Tensor,
    divisor: float,
) -> None:
    """Do the additions (into, from) between ``parts``, then divide ``total``; slice by slice, while in cache."""
    there = [part for part in parts if part is not None]
    size = total.numel()
    if size <= SLICE or any(part.stride() != total.stride() for part in there):
        _add(parts, additions, total, divisor)
        return
    flat = [None if part is None else part.as_strided((size,), (1,)) for part in parts]
    whole = total.as_strided((size,), (1,))
    for start in range(0, size, SLICE):
        slices = [None if part is None else part[start : start + SLICE] for part in flat]
        _add(slices, additions, whole[start : start + SLICE], divisor)


def _add(
    parts: Sequence[torch.Tensor | None], additions: Sequence[tuple[int, int]], total: torch.Tensor, divisor: float
) -> None:
    for into, source in additions:
        parts[into].add_(parts[source])  # type: ignore[union-attr, arg-type]
    if divisor != 1:
        total.div_(divisor)
