"""Tensors as collectives take them: flat, contiguous, without autograd, as numbers or as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.backend.collectives import DTYPES
from phalanx.backend.progress import Steps
from phalanx.errors import UsageError

Flat = list[torch.Tensor]
Back = list[tuple[torch.Tensor, torch.Tensor]]  # what has to be copied back, and from where


def flattened(tensor: torch.Tensor, back: Back | None = None) -> torch.Tensor:
    """``tensor`` in one dimension: itself, or a copy, which is noted in ``back`` if it will be written.

    Tensors of inference mode are copied too: only in that mode may they be written, and a wait may come outside of it.

    Raises
    ------
    UsageError
        It is not on the CPU, not dense, or to be written and expanded.
    """
    if tensor.is_cpu and tensor.dim() == 1 and not tensor.requires_grad and tensor.layout == torch.strided:
        own = tensor
    elif tensor.device.type != "cpu" or tensor.layout != torch.strided:
        kind = tensor.device.type if tensor.device.type != "cpu" else str(tensor.layout)
        raise UsageError(
            f"a tensor is {kind}, and backend 'phalanx' moves dense tensors on the CPU; use 'nccl' for GPUs, and "
            "to_dense() for sparse ones"
        )
    else:
        own = tensor.detach()
    written = back is not None and own.is_inference()
    if own.is_contiguous() and not own.is_neg() and not written:
        return own if own.dim() == 1 else own.view(-1)
    with torch.inference_mode(False):
        copy = own.clone(memory_format=torch.contiguous_format).view(-1)
    if back is not None:
        if any(length > 1 and not stride for length, stride in zip(own.shape, own.stride(), strict=True)):
            raise UsageError(
                f"a tensor has shape {tuple(own.shape)} and strides {own.stride()}, so several of its elements share "
                "memory and cannot be written; take a copy: .contiguous()"
            )
        back.append((own, copy))
    return copy


def raw(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor as bytes."""
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element is contiguous at any stride


def movable(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor of a dtype that slots have: its own, so that ranks can compare it, or bytes."""
    return flat if flat.dtype in DTYPES else raw(flat)


def fitting(name: str, parts: Sequence[torch.Tensor], like: torch.Tensor, ranks: int, back: Back | None = None) -> Flat:
    """One part for each rank, each with as many elements as ``like`` and of its dtype; flat.

    Raises
    ------
    UsageError
        They are not.
    """
    if len(parts) != ranks or any(part.numel() != like.numel() or part.dtype != like.dtype for part in parts):
        told = ", ".join(f"{part.numel()} of {part.dtype}" for part in parts)
        raise UsageError(
            f"{name} are {len(parts)} tensors of elements: {told}; there must be {ranks}, each with {like.numel()} of "
            f"{like.dtype}"
        )
    return [movable(flattened(part, back)) for part in parts]


def split(flat: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """A flat tensor in equal parts.

    Raises
    ------
    UsageError
        It cannot be cut so.
    """
    if len(flat) % ranks:
        raise UsageError(f"a tensor of {len(flat)} elements cannot be cut for {ranks} ranks; pad it")
    return list(flat.view(ranks, -1))


def rows(flat: torch.Tensor, tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> Flat:
    """``flat``, which is ``tensor``, in parts of so many rows; equal ones if ``splits`` is empty."""
    if not splits:
        if len(tensor) % ranks:
            raise UsageError(f"a tensor of {len(tensor)} rows cannot be cut for {ranks} ranks; pad it, or give splits")
        return [movable(part) for part in split(flat, ranks)]
    row = tensor[0].numel() if len(tensor) else 0
    if len(splits) != ranks or sum(splits) != len(tensor):
        raise UsageError(f"splits are {list(splits)} for {len(tensor)} rows and {ranks} ranks; make them add up")
    return [movable(part) for part in flat.split([row * count for count in splits])]


def then(steps: Sequence[Steps], back: Back) -> Steps:
    """One after another; then copy back what was copied."""
    for each in steps:
        yield from each
    if back:
        with torch.inference_mode():
            for own, copy in back:
                own.copy_(copy.view(own.shape))
