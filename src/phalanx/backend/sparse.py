"""All-reduce of sparse tensors, such as gradients of an embedding: each rank may hold other rows."""

from __future__ import annotations

import torch

from phalanx.backend import collectives
from phalanx.backend.collectives import NARROW, Reduction
from phalanx.backend.progress import Steps
from phalanx.backend.rounds import DTYPES, Rounds
from phalanx.errors import UsageError
from phalanx.plan.fold import fold_values

DIMENSIONS = 64  # that a tensor may have


def all_reduce(rounds: Rounds, tensor: torch.Tensor, reduction: Reduction) -> Steps:
    """Every rank ends with the sum of all, coalesced.

    Raises
    ------
    UsageError
        It is no sum, or the tensor is not one of real numbers on the CPU. (Of complex ones torch.distributed hands over
        a view as real ones, through which nothing can be written.)
    """
    if reduction.name != "SUM" or tensor.device.type != "cpu" or tensor.dtype == torch.bool or tensor._is_view():
        raise UsageError(
            f"all_reduce is {reduction.name} of a sparse tensor of {tensor.dtype} on {tensor.device}; "
            "backend 'phalanx' has SUM of real numbers on the CPU, no views; use to_dense() for others"
        )
    return _summed(rounds, tensor)


def _summed(rounds: Rounds, tensor: torch.Tensor) -> Steps:
    own = tensor.detach().coalesce()
    rows, values = own.indices().t(), own.values()
    shape = [own.sparse_dim(), DTYPES.index(own.dtype), *own.shape]
    header = torch.tensor([len(values), *shape, *[-1] * (DIMENSIONS - own.dim())])
    told = torch.stack((yield from _gathered(rounds, header)))
    if not torch.equal(told[:, 1:], header[1:].expand_as(told[:, 1:])):
        kinds = [row[1 : row.index(-1) if -1 in row else None] for row in told.tolist()]
        raise UsageError(
            f"ranks bring sparse tensors of {', '.join(map(_spelled, kinds))}; give each rank the same shape and dtype"
        )
    counts, narrow = told[:, 0].tolist(), own.dtype in NARROW
    parts = []
    all_rows, all_values = (yield from _padded(rounds, rows, counts)), (yield from _padded(rounds, values, counts))
    for each, given in zip(all_rows, all_values, strict=True):
        wide = given.float() if narrow else given
        parts.append(torch.sparse_coo_tensor(each.t(), wide, own.shape, is_coalesced=True, check_invariants=False))
    total = fold_values(parts, lambda left, right: (left + right).coalesce())
    assert total is not None  # there is a part of every rank
    with torch.no_grad():
        tensor.copy_(total.to(own.dtype))


def _padded(rounds: Rounds, mine: torch.Tensor, counts: list[int]) -> Steps:
    """The rows of all ranks, of which rank i has ``counts[i]``."""
    shape = (max(counts), *mine.shape[1:])
    flat = mine.new_zeros(shape)
    flat[: len(mine)] = mine
    found = yield from _gathered(rounds, flat.view(-1))
    return [each.view(shape)[:count] for each, count in zip(found, counts, strict=True)]


def _gathered(rounds: Rounds, flat: torch.Tensor) -> Steps:
    found = [torch.empty_like(flat) for _ in range(rounds.size)]
    yield from collectives.all_gather(rounds, found, flat, "sparse all_reduce")
    return found


def _spelled(kind: list[int]) -> str:
    return f"shape {tuple(kind[2:])} ({kind[0]} sparse) and {DTYPES[kind[1]]}"
