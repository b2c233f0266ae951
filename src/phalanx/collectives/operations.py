"""What is done with the schedules: sums and copies between the tensors of a list, in one process.

The loop in ``_carry_out`` is all there is to an algorithm; the rest cuts, converts and puts back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from phalanx.collectives import arguments
from phalanx.collectives.schedules import ALGORITHMS, Transfer, schedule
from phalanx.definition import checks
from phalanx.plan.shares import share_bounds
from phalanx.surroundings import interrupts

Bounds = Sequence[tuple[int, int]]
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
    members = arguments.tensors_of("tensors", tensors)
    arguments.reducible(op, members[0].dtype)
    checks.choice("algorithm", algorithm, tuple(ALGORITHMS))
    arguments.writable("tensors", members)
    if len(members) == 1:
        return
    transfers = schedule(algorithm, len(members))
    sums = [_flat(tensor) for tensor in members]
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
    members = arguments.tensors_of("tensors", tensors)
    root = checks.integer("root", root, least=0, most=len(members) - 1)
    arguments.writable("tensors", members)
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
    arguments.dense("tensor", tensor)
    arguments.cuttable("tensor", tensor)
    homes = arguments.usable("devices", devices)
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
    members = arguments.tensors_of("pieces", pieces, pieces=True)
    home = arguments.device("device", device)
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
    members = arguments.tensors_of("tensors", tensors)
    arguments.reducible(op, members[0].dtype)
    arguments.cuttable("tensors[0]", members[0])
    dtype = members[0].dtype
    bounds = share_bounds(len(members[0]), len(members))
    chunks = [_cut(tensor.to(arguments.SUMMED_IN[dtype], copy=True).resolve_conj(), bounds) for tensor in members]
    _carry_out(schedule("reduce_scatter", len(members)), chunks, op)
    own = [_finished(mine[index], op, len(members)) for index, mine in enumerate(chunks)]
    return [piece.to(dtype, copy=True) for piece in own]


@torch.no_grad()
def all_gather(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Put the pieces one after the other along their first dimension, once per participant: the ring's second half.

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
    members = arguments.tensors_of("pieces", pieces, pieces=True)
    ends = [sum(map(len, members[:number])) for number in range(len(members) + 1)]
    wholes = [piece.new_empty((ends[-1], *piece.shape[1:])) for piece in members]
    chunks = [_cut(whole, list(itertools.pairwise(ends))) for whole in wholes]
    for index, piece in enumerate(members):
        chunks[index][index].copy_(piece)
    _carry_out(schedule("all_gather", len(members)), chunks)
    return wholes


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


def _cut(tensor: torch.Tensor, bounds: Bounds) -> list[torch.Tensor]:
    return [tensor[start:end] for start, end in bounds]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """What is summed in place of the tensor: a view of its memory where that is possible."""
    return tensor.detach().to(arguments.SUMMED_IN[tensor.dtype]).resolve_conj().reshape(-1)


def _finished(reduced: torch.Tensor, op: str, count: int) -> torch.Tensor:
    """The result: for the mean, the sum divided in place, real and imaginary parts apart."""
    if op == "mean":
        parts = torch.view_as_real(reduced) if reduced.is_complex() else reduced
        divisor = torch.full((), count, dtype=parts.dtype, device=parts.device)
        parts.div_(divisor)  # by a tensor: by a number, CUDA would multiply by its rounded inverse
    return reduced
