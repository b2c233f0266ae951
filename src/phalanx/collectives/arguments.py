"""Tensors at the door of the collectives: they are alike, they may be written, the operation fits them.

Nothing is changed here; each check raises a UsageError that names the argument, the value and the way out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.definition import checks
from phalanx.errors import UsageError

OPS = ("sum", "mean", "max", "min")
PLAIN = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
         torch.float32, torch.float64, torch.complex64, torch.complex128)  # fmt: skip
NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
          torch.float8_e5m2fnuz)  # fmt: skip
SUMMED_IN = {
    **dict.fromkeys(NARROW, torch.float32),
    **{dtype: dtype for dtype in PLAIN},
    torch.complex32: torch.complex64,
    torch.uint16: torch.int32,  # torch has no arithmetic in these two; wider sums wrap to the same bits
    torch.uint32: torch.int64,
}


def tensors_of(name: str, values: Any, *, pieces: bool = False) -> list[torch.Tensor]:
    """``values`` as a list of dense tensors of one dtype and shape; of ``pieces`` the first dimension may differ."""
    if isinstance(values, torch.Tensor) or not isinstance(values, Sequence):
        raise UsageError(f"{name} is a {type(values).__name__}; it must be a list of tensors, one per participant")
    if not values:
        raise UsageError(f"{name} is empty; it needs at least one tensor")
    free = 1 if pieces else 0
    for index, value in enumerate(values):
        dense(f"{name}[{index}]", value)
        if value.dtype != values[0].dtype:
            raise UsageError(
                f"{name}[{index}] has dtype {value.dtype} and {name}[0] has {values[0].dtype}; convert with .to(dtype)"
            )
        if pieces:
            cuttable(f"{name}[{index}]", value)
        if value.shape[free:] != values[0].shape[free:]:
            way = "pieces may differ in the first dimension only" if pieces else "all must be of the same shape"
            raise UsageError(
                f"{name}[{index}] has shape {tuple(value.shape)} and {name}[0] has {tuple(values[0].shape)}; {way}"
            )
    return list(values)


def dense(name: str, value: Any) -> None:
    """``value`` is a tensor with memory of its own kind: not sparse, quantized or without data."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name} is {checks.shown(value)} ({type(value).__name__}); it must be a torch.Tensor")
    kinds = {"nested": value.is_nested, "quantized": value.is_quantized, "meta": value.is_meta}
    kinds[str(value.layout)] = value.layout != torch.strided
    for kind, applies in kinds.items():
        if applies:
            raise UsageError(f"{name} is a {kind} tensor; it must be a dense one with data, as .to_dense() gives it")
    if value.untyped_storage().nbytes() < (value.storage_offset() + _extent(value)) * value.element_size():
        raise UsageError(
            f"{name} has shape {tuple(value.shape)}, but its memory was freed (its storage was resized); fill it first"
        )


def cuttable(name: str, tensor: torch.Tensor) -> None:
    """``tensor`` has a first dimension."""
    if not tensor.ndim:
        raise UsageError(f"{name} has no dimension to cut along; give it one: tensor.reshape(1)")


def usable(name: str, devices: Any) -> list[torch.device]:
    """``devices`` as a list of at least one device that torch can use here."""
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise UsageError(f"{name} is {checks.shown(devices)}; it must be a list of devices, as in ['cpu'] * 4")
    return [device(f"{name}[{index}]", one) for index, one in enumerate(devices)]


def device(name: str, value: Any) -> torch.device:
    """``value`` as a device that torch can use here."""
    try:
        return torch.empty(0, device=str(value)).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"{name} is {value!r}, which torch cannot use here ({reason}); use 'cpu'") from error


def reducible(op: Any, dtype: torch.dtype) -> None:
    """``op`` is known, and its result is a value of ``dtype``."""
    checks.choice("op", op, OPS)
    if dtype not in SUMMED_IN:
        raise UsageError(
            f"tensors[0] has dtype {dtype}, in which torch cannot compute; convert with .long() or .float()"
        )
    if op == "sum" and dtype == torch.bool:
        raise UsageError("op is 'sum', which torch.bool cannot hold; take op='max' (any) or 'min' (all), or use .int()")
    if op == "mean" and not dtype.is_floating_point and not dtype.is_complex:
        other = "op='max' (any)" if dtype == torch.bool else "op='sum'"
        raise UsageError(f"op is 'mean', which {dtype} cannot hold; take {other}, or convert with .double()")
    if op in ("max", "min") and dtype.is_complex:
        raise UsageError(f"op is {op!r}, but complex numbers ({dtype}) have no order; reduce x.abs(), or take op='sum'")


def writable(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Every element of every tensor has a place of its own, so that writing one changes no other."""
    for index, tensor in enumerate(tensors):
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise UsageError(
                f"{name}[{index}] was made in inference mode and cannot be written outside it; use .clone()"
            )
        if not tensor.is_contiguous() and _overlap([tensor]):
            raise UsageError(
                f"{name}[{index}] has shape {tuple(tensor.shape)} and strides {tensor.stride()}, so several of its "
                "elements share memory and cannot be written; reduce a copy: .contiguous()"
            )
    spans = sorted(_span(index, tensor) for index, tensor in enumerate(tensors) if tensor.numel())
    for position, (device, _, end, first) in enumerate(spans):
        for other, start, _, second in itertools.islice(spans, position + 1, None):
            if other != device or start >= end:
                break
            if _overlap([tensors[first], tensors[second]]):
                low, high = sorted((first, second))
                raise UsageError(
                    f"{name}[{low}] and {name}[{high}] share memory, so what one of them brings would count twice; "
                    "give each participant a .clone()"
                )


def _span(index: int, tensor: torch.Tensor) -> tuple[str, int, int, int]:
    """Where a tensor lies: its device, its first byte, the one after its last, and which tensor it is."""
    return str(tensor.device), (start := tensor.data_ptr()), start + _extent(tensor) * tensor.element_size(), index


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an element lies where another one does: each marks its place, and marks are counted."""
    elements = [tensor.data_ptr() // tensor.element_size() for tensor in tensors]
    starts = [element - min(elements) for element in elements]
    ends = [start + _extent(tensor) for start, tensor in zip(starts, tensors, strict=True)]
    marks = torch.zeros(max(ends), dtype=torch.bool, device="cpu")
    for start, tensor in zip(starts, tensors, strict=True):
        marks.as_strided(tensor.shape, tensor.stride(), start).fill_(True)
    return int(marks.sum()) < sum(tensor.numel() for tensor in tensors)


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory, gaps counted; 0 if there is none."""
    if not tensor.numel():
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
