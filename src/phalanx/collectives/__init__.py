"""Collective operations over lists of tensors, one per device, in one process.

``schedule`` gives an algorithm as data, ``all_reduce`` and the others carry out that very data, and ``spell_rounds``
puts it into words. Nothing is asynchronous: on return everything is done, as far as torch's streams are concerned.
What is wrong with a call is found before a tensor is written; the error names the argument, the value and the way out.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.collectives.schedules import ALGORITHMS, Transfer, schedule, spell_rounds
from phalanx.definition import checks
from phalanx.errors import UsageError
from phalanx.plan.shares import share_bounds
from phalanx.surroundings import interrupts

__all__ = [
    "Transfer",
    "all_gather",
    "all_reduce",
    "broadcast",
    "gather",
    "reduce_scatter",
    "scatter",
    "schedule",
    "spell_rounds",
]

SUMMED_IN = {  # torch has no arithmetic in the two integer dtypes; wider sums wrap to the same bits
    torch.complex32: torch.complex64,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {  # what arrives, into what is there
    "sum": torch.Tensor.add_,
    "mean": torch.Tensor.add_,
    "max": lambda mine, incoming: torch.maximum(mine, incoming, out=mine),
    "min": lambda mine, incoming: torch.minimum(mine, incoming, out=mine),
}


@torch.no_grad()
def all_reduce(tensors: Sequence[torch.Tensor], op: str = "sum", algorithm: str = "ordered") -> None:
    """Write the reduction over all tensors into each of them, in place. All end with equal bits.

    The tensors themselves are written, whatever their strides, never the entries of the list. One tensor alone is
    left as it is. Ctrl-C comes before the first is written, or after the last.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        One per participant: any number, of one dtype and one shape (none, empty and not divisible ones too), on any
        devices. Leaves that require grad may be among them; nothing is recorded for autograd.
    op : "sum", "mean", "max" or "min"
        The mean is the sum, divided once. Floats narrower than float32 are added up in float32 and rounded once, at the
        end; all other dtypes in themselves, so integers wrap. NaN wins in max and min; which sign a zero has there is
        not promised. For bool, max is any and min is all.
    algorithm : "ordered", "ring" or "naive"
        See :func:`schedule`. The order of additions belongs to it, and so do the bits of float sums. Those of
        "ordered" are ``phalanx.plan.fold.fold_values`` over the tensors: the bits of a ``phalanx.Recipe``.

    Raises
    ------
    phalanx.UsageError
        The tensors differ, share memory, or cannot be written; op or algorithm is unknown, or op has no result in this
        dtype. No tensor was changed.
    """
    members = tensors_of("tensors", tensors)
    reducible(op, members[0].dtype)
    checks.choice("algorithm", algorithm, tuple(ALGORITHMS))
    writable("tensors", members)
    if len(members) == 1:
        return
    transfers = schedule(algorithm, len(members))
    sums = [_wide(tensor).reshape(-1) for tensor in members]
    bounds = share_bounds(sums[0].numel(), 1 + max(transfer.chunk for transfer in transfers))
    with interrupts.guarded():  # Ctrl-C waits: all tensors are written, or none
        _carry_out(transfers, [_cut(flat, bounds) for flat in sums], op)
        for tensor, flat in zip(members, sums, strict=True):
            reduced = _finished(flat, op, len(members))
            if reduced.data_ptr() != tensor.data_ptr():  # else it was summed where it lies
                tensor.detach().copy_(reduced.view(tensor.shape))


@torch.no_grad()
def broadcast(tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Copy ``tensors[root]`` into all others, in place, bit for bit; down a binary tree, in ceil(log2 n) rounds.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        As for :func:`all_reduce`; any dtype.
    root : int
        Index of the tensor that is copied.

    Raises
    ------
    phalanx.UsageError
        The tensors differ, share memory, or cannot be written; root is not one of them. No tensor was changed.
    """
    members = tensors_of("tensors", tensors)
    root = checks.integer("root", root, least=0, most=len(members) - 1)
    writable("tensors", members)
    rooted = members[root:] + members[:root]
    with interrupts.guarded():
        _carry_out(schedule("broadcast", len(members)), [[tensor.detach()] for tensor in rooted])


@torch.no_grad()
def scatter(tensor: torch.Tensor, devices: Sequence[str | torch.device]) -> list[torch.Tensor]:
    """Cut along the first dimension as ``numpy.array_split`` does, and put piece i on device i.

    Parameters
    ----------
    tensor : torch.Tensor
        At least one-dimensional. It is not changed, and no piece shares its memory.
    devices : sequence of str or torch.device
        One per piece; a device may be named several times.

    Returns
    -------
    list of torch.Tensor
        As many as devices; the first ones are larger by one where it does not come out even, the last ones may be
        empty.

    Raises
    ------
    phalanx.UsageError
        The tensor cannot be cut, no device is named, or torch cannot use one here.
    """
    dense("tensor", tensor)
    cuttable("tensor", tensor)
    homes = usable("devices", devices)
    pieces = _cut(tensor, share_bounds(len(tensor), len(homes)))
    return [piece.to(home, copy=True) for piece, home in zip(pieces, homes, strict=True)]


@torch.no_grad()
def gather(pieces: Sequence[torch.Tensor], device: str | torch.device = "cpu") -> torch.Tensor:
    """One new tensor on ``device``: the pieces one after the other along their first dimension. Undoes ``scatter``.

    Raises
    ------
    phalanx.UsageError
        The pieces differ in dtype, or in a dimension other than the first; torch cannot use the device here.
    """
    members = tensors_of("pieces", pieces, pieces=True)
    home = usable_device("device", device)
    return torch.cat([piece.to(home) for piece in members])


@torch.no_grad()
def reduce_scatter(tensors: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """Reduce over all tensors and leave each participant its own piece: the first half of the ring.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        As for :func:`all_reduce`, at least one-dimensional. They are not changed.
    op : "sum", "mean", "max" or "min"

    Returns
    -------
    list of torch.Tensor
        Piece i of the result, on the device of tensor i: what :func:`scatter` would cut along the first dimension. For
        tensors of one dimension these are the bits of ``all_reduce(tensors, op, "ring")``.

    Raises
    ------
    phalanx.UsageError
        The tensors differ or have no first dimension; op is unknown or has no result in this dtype.
    """
    members = tensors_of("tensors", tensors)
    reducible(op, members[0].dtype)
    cuttable("tensors[0]", members[0])
    bounds = share_bounds(len(members[0]), len(members))
    chunks = [_cut(_wide(tensor, copy=True), bounds) for tensor in members]
    _carry_out(schedule("reduce_scatter", len(members)), chunks, op)
    own = [_finished(mine[index], op, len(members)) for index, mine in enumerate(chunks)]
    return [piece.to(members[0].dtype, copy=True) for piece in own]


@torch.no_grad()
def all_gather(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Put the pieces one after the other along their first dimension, once per participant.

    Parameters
    ----------
    pieces : sequence of torch.Tensor
        One per participant, of one dtype, at least one-dimensional and alike in all but the first dimension, which may
        be of any length. They are not changed.

    Returns
    -------
    list of torch.Tensor
        The whole, bit for bit, on the device of each piece in turn; none shares memory with another.

    Raises
    ------
    phalanx.UsageError
        The pieces differ in dtype, or in a dimension other than the first.
    """
    members = tensors_of("pieces", pieces, pieces=True)
    return [torch.cat([other.to(piece.device) for other in members]) for piece in members]


def _carry_out(transfers: Sequence[Transfer], chunks: Sequence[Sequence[torch.Tensor]], op: str = "sum") -> None:
    """Do what the schedule says to ``chunks[participant][chunk]``, in place."""
    for transfer in transfers:
        mine, theirs = chunks[transfer.target][transfer.chunk], chunks[transfer.source][transfer.chunk]
        # Between accelerators nobody waits: each device does its work in order. The CPU's memory may be used at once.
        free = "cpu" not in (mine.device.type, theirs.device.type)
        if transfer.reduces:
            COMBINE[op](mine, theirs.to(mine.device, non_blocking=free))
        else:
            mine.copy_(theirs, non_blocking=free)


def _cut(tensor: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    return [tensor[start:end] for start, end in bounds]


def _wide(tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """The tensor in the dtype that it is summed in; without ``copy``, in its own memory if that is possible."""
    narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize < torch.float32.itemsize
    dtype = torch.float32 if narrow else SUMMED_IN.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(dtype, copy=copy).resolve_conj()


def _finished(reduced: torch.Tensor, op: str, count: int) -> torch.Tensor:
    """The result: for the mean, the sum divided in place, real and imaginary parts apart."""
    if op == "mean":
        parts = torch.view_as_real(reduced) if reduced.is_complex() else reduced
        divisor = torch.full((), count, dtype=parts.dtype, device=parts.device)
        parts.div_(divisor)  # by a tensor: by a number, CUDA would multiply by its rounded inverse
    return reduced


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
    """Refuse what is not a dense tensor with data: sparse, nested, quantized or meta tensors."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name} is {checks.shown(value)} ({type(value).__name__}); it must be a torch.Tensor")
    if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
        raise UsageError(
            f"{name} is a {value.layout} tensor of {value.dtype} on {value.device}; it must be a dense one with data, "
            "as .to_dense() gives it"
        )


def cuttable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor without a first dimension."""
    if not tensor.ndim:
        raise UsageError(f"{name} has no dimension to cut along; give it one: tensor.reshape(1)")


def usable(name: str, devices: Any) -> list[torch.device]:
    """``devices`` as a list of at least one device that torch can use here."""
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise UsageError(f"{name} is {checks.shown(devices)}; it must be a list of devices, as in ['cpu'] * 4")
    return [usable_device(f"{name}[{index}]", one) for index, one in enumerate(devices)]


def usable_device(name: str, value: Any) -> torch.device:
    """``value`` as a device that torch can use here."""
    try:
        device = torch.empty(0, device=str(value)).device
        if device.type == "meta":
            raise NotImplementedError("it has no values")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"{name} is {value!r}, which torch cannot use here ({reason}); use 'cpu'") from error
    return device


def reducible(op: Any, dtype: torch.dtype) -> None:
    """Refuse an ``op`` that is unknown, or has no result in ``dtype``."""
    checks.choice("op", op, tuple(COMBINE))
    whole = not dtype.is_floating_point and not dtype.is_complex
    unfit = {"sum": dtype == torch.bool, "mean": whole, "max": dtype.is_complex, "min": dtype.is_complex}
    if unfit[op] or dtype == torch.uint64:
        others = ", ".join(repr(other) for other in COMBINE if not unfit[other])
        raise UsageError(
            f"op is {op!r}, which torch cannot compute in {dtype}; take one of {others}, or convert with .long() or "
            ".double()"
        )


def writable(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors whose elements share memory, since writing one would change another."""
    for index, tensor in enumerate(tensors):
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise UsageError(
                f"{name}[{index}] was made in inference mode and cannot be written outside it; use .clone()"
            )
        if _overlaps(tensor):
            raise UsageError(
                f"{name}[{index}] has shape {tuple(tensor.shape)} and strides {tensor.stride()}, so several of its "
                "elements share memory and cannot be written; reduce a copy: .contiguous()"
            )
    elements = list(map(_elements, tensors))
    for low, high in itertools.combinations(range(len(tensors)), 2):
        if tensors[low].device == tensors[high].device and np.shares_memory(elements[low], elements[high]):
            raise UsageError(
                f"{name}[{low}] and {name}[{high}] share memory, so what one of them brings would count twice; "
                "give each participant a .clone()"
            )


def _elements(tensor: torch.Tensor) -> np.ndarray:
    """The addresses of its elements, for numpy to compare. The memory, which may be a device's, is never read."""
    size = tensor.element_size()
    strides = tuple(size * stride for stride in tensor.stride())
    lies = {"shape": tuple(tensor.shape), "strides": strides, "data": (tensor.data_ptr(), True), "typestr": f"|V{size}"}
    return np.asarray(types.SimpleNamespace(__array_interface__={**lies, "version": 3}))


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory: a dimension's stride is within the reach of the smaller strides."""
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += (length - 1) * stride
    return False
