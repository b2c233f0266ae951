"""Elementwise arithmetic over gradients: lists of tensors, None where absent. Elementwise, so slicing moves no bit."""

from __future__ import annotations

import torch

Gradient = list[torch.Tensor | None]


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
