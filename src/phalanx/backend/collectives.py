"""The collectives of a group, each as rounds in slots; big tensors go through in pieces that stay in cache.

Every function is a generator that yields the ranks it waits for. Tensors are flat and contiguous. Sums and other
reductions are taken in a fixed order: pairs of neighbours, then pairs of pairs, by rank; that of the fold. float16 and
bfloat16 are added in float32 and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.backend.memory import SLOT
from phalanx.backend.progress import Steps
from phalanx.backend.rounds import DTYPES, MOST, OPERATIONS, SIZE, Rounds, signature
from phalanx.errors import UsageError
from phalanx.plan.fold import fold_values
from phalanx.plan.shares import share_bounds

DIRECT = 1 << 14  # bytes up to which every rank adds all of it, however many there are
NARROW = (torch.float16, torch.bfloat16)


@functools.lru_cache
def reduction(op: Any, dtype: torch.dtype, ranks: int) -> Reduction:
    """How values of several ranks become one; ``op`` is one of torch.distributed's."""
    return Reduction(str(op).rpartition(".")[2], dtype, ranks)


class Reduction:
    """How values of several ranks become one.

    Parameters
    ----------
    name : str
        Of the operation.
    dtype : torch.dtype
    ranks : int

    Raises
    ------
    UsageError
        There is no such reduction.
    """

    def __init__(self, name: str, dtype: torch.dtype, ranks: int) -> None:
        if name not in OPERATIONS:
            raise UsageError(f"op is {name}, which backend 'phalanx' has not; use one of {', '.join(OPERATIONS)}")
        self.name = name
        self.number = list(OPERATIONS).index(name)
        self._op = OPERATIONS[name]
        self._narrow = dtype in NARROW
        self._divisor = ranks if name == "AVG" else 1
        if dtype not in DTYPES or not self._possible(torch.ones(2, dtype=dtype)):
            raise UsageError(f"op {name} cannot be done for {dtype}; use another op, or convert the tensor first")

    def _possible(self, some: torch.Tensor) -> bool:
        try:
            self.into([some, some], some.clone())
        except RuntimeError:
            return False
        return True

    def into(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce ``parts``, one per rank, into ``out``, which may be none of them."""
        op = self._op
        if len(parts) == 2 and not self._narrow:
            op(parts[0], parts[1], out=out)
        else:
            total = fold_values([part.float() for part in parts] if self._narrow else parts, op)
            assert total is not None  # there is a part of every rank
            out.copy_(total / self._divisor if self._narrow and self._divisor != 1 else total)
        if self._divisor != 1 and not self._narrow:
            (torch.view_as_real(out) if out.is_complex() else out).div_(self._divisor)


def barrier(rounds: Rounds) -> Steps:
    """Nobody goes on before all have come."""
    yield from rounds.come(signature("barrier"))
    rounds.show()
    yield from rounds.see(rounds.others)


def all_reduce(rounds: Rounds, flat: torch.Tensor, reduction: Reduction, root: int | None = None) -> Steps:
    """Every rank ends with the reduction of all; where there is a root, it alone does, and the others keep theirs."""
    word = _word("all_reduce" if root is None else "reduce", flat, reduction, root or 0)
    if rounds.size <= 2 or flat.nbytes <= DIRECT or root is not None:
        for _, part in _pieces(flat, SLOT):
            slots = yield from _shown(rounds, word, part)
            if root is None or rounds.rank == root:
                yield from rounds.see(rounds.others)
                reduction.into(slots, part)
        return
    for _, part in _pieces(flat, SLOT):
        slots = yield from _shown(rounds, word, part)
        yield from rounds.see(rounds.others)
        bounds = share_bounds(len(part), rounds.size)
        start, end = bounds[rounds.rank]
        mine = part[start:end]  # each rank reduces a section of it
        reduction.into([slot[start:end] for slot in slots], mine)
        yield from rounds.come(word)
        slots = rounds.slots(part.dtype, bounds[0][1])
        slots[rounds.rank][: end - start].copy_(mine)
        rounds.show()
        for rank in rounds.others:
            yield from rounds.see((rank,))
            start, end = bounds[rank]
            part[start:end].copy_(slots[rank][: end - start])


def broadcast(rounds: Rounds, flat: torch.Tensor, root: int) -> Steps:
    """Every rank ends with what the root has."""
    word = _word("broadcast", flat, root=root)
    for _, part in _pieces(flat, SLOT):
        slots = yield from _shown(rounds, word, part, shows=rounds.rank == root)
        if rounds.rank != root:
            yield from rounds.see((root,))
            part.copy_(slots[root])


def all_gather(
    rounds: Rounds, outputs: Sequence[torch.Tensor], flat: torch.Tensor, kind: str = "all_gather", root: int = 0
) -> Steps:
    """Whoever has ``outputs`` ends with what each rank has: every rank, or of a "gather" the root."""
    word = _word(kind, flat, root=root)
    for start, part in _pieces(flat, SLOT):
        slots = yield from _shown(rounds, word, part)
        for rank, output in enumerate(outputs):
            if rank != rounds.rank:
                yield from rounds.see((rank,))
            output[start : start + len(part)].copy_(slots[rank])


def scatter(rounds: Rounds, flat: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Steps:
    """Each rank ends with its part of what the root has; the others have no ``inputs``."""
    word = _word("scatter", flat, root=root)
    for start, part in _pieces(flat, SLOT // rounds.size):
        end = start + len(part)
        dealt = yield from _dealt(rounds, word, part.dtype, len(part), [value[start:end] for value in inputs])
        if rounds.rank != root:
            yield from rounds.see((root,))
        part.copy_(dealt[root])


def reduce_scatter(rounds: Rounds, flat: torch.Tensor, reduction: Reduction, inputs: Sequence[torch.Tensor]) -> Steps:
    """Each rank ends with the reduction of its part; ``inputs``: this rank's parts, one for each."""
    word = _word("reduce_scatter", flat, reduction)
    for start, part in _pieces(flat, SLOT // rounds.size):
        end = start + len(part)
        dealt = yield from _dealt(rounds, word, part.dtype, len(part), [value[start:end] for value in inputs])
        yield from rounds.see(rounds.others)
        reduction.into(dealt, part)


def all_to_all(rounds: Rounds, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Steps:
    """Part i of each rank goes to rank i, where it becomes part j, if it came from rank j. Parts may differ in size.

    Raises
    ------
    UsageError
        A rank sends more or less than the other expects.
    """
    dtype = inputs[0].dtype
    word = signature("all_to_all", dtype)
    slots = yield from _shown(rounds, word, torch.tensor([len(value) for value in inputs]))
    yield from rounds.see(rounds.others)
    table = torch.stack(slots).tolist()
    wanted, sent = [len(output) for output in outputs], [row[rounds.rank] for row in table]
    if sent != wanted:
        raise UsageError(
            f"all_to_all: this rank expects parts of {wanted} elements, and the others send {sent}; make the splits of "
            "all ranks agree"
        )
    step = SLOT // rounds.size // dtype.itemsize
    for start in range(0, max(map(max, table)), step):
        end = start + step
        dealt = yield from _dealt(rounds, word, dtype, step, [value[start:end] for value in inputs])
        for rank, output in enumerate(outputs):
            if rank != rounds.rank:
                yield from rounds.see((rank,))
            part = output[start:end]
            part.copy_(dealt[rank][: len(part)])


def _shown(rounds: Rounds, word: int, part: torch.Tensor, *, shows: bool = True) -> Steps:
    """Come to a round and show ``part`` in it, or come to read only; the slots of all."""
    yield from rounds.come(word)
    slots = rounds.slots(part.dtype, len(part))
    if shows:
        slots[rounds.rank].copy_(part)
    rounds.show()
    return slots


def _dealt(rounds: Rounds, word: int, dtype: torch.dtype, step: int, parts: Sequence[torch.Tensor]) -> Steps:
    """Come to a round and show a part for each rank, ``step`` elements apart; what each rank has for this one."""
    yield from rounds.come(word)
    slots = [slot.view(rounds.size, step) for slot in rounds.slots(dtype, rounds.size * step)]
    for target, part in zip(slots[rounds.rank], parts, strict=False):
        target[: len(part)].copy_(part)
    rounds.show()
    return [slot[rounds.rank] for slot in slots]


def _pieces(flat: torch.Tensor, most: int) -> Sequence[tuple[int, torch.Tensor]]:
    """``flat`` in pieces of at most so many bytes, each with the index of its first element."""
    if 0 < flat.nbytes <= most:
        return [(0, flat)]
    step = most // flat.itemsize
    return [(start, flat[start : start + step]) for start in range(0, len(flat), step)]


def _word(kind: str, flat: torch.Tensor, reduction: Reduction | None = None, root: int = 0) -> int:
    op = 0 if reduction is None else reduction.number
    return signature(kind, flat.dtype, op, root) | (flat.nbytes & MOST) << SIZE
