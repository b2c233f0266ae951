"""The collectives of a group: every rank shows something in its slot, round by round, and reads what others show there.

A rank that comes to round n has read all it wanted of round n-1, so once all have come to n, the slots of n-1 are free
for n+1: each rank has two slots, and one meeting per round is enough. Plain counters carry it, one writer each. Big
tensors go through in pieces that stay in cache.

Every collective is a generator that yields the ranks it waits for. Tensors are flat and contiguous. Sums and other
reductions are taken in the fixed order of the fold: by rank, pairs of neighbours, then pairs of pairs. float16 and
bfloat16 are added in float32 and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.backend.memory import SLOT, GroupMemory
from phalanx.backend.progress import Steps
from phalanx.errors import PeerError, UsageError
from phalanx.plan.fold import fold_values
from phalanx.plan.shares import share_bounds
from phalanx.shared.memory import order

Tensors = Sequence[torch.Tensor]
KEPT_VIEWS = 64
SIZE = 26  # the bit of a signature from which on it holds a number of bytes
MOST = (1 << 37) - 1  # bytes that fit there
OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
ROOTED = ("reduce", "broadcast", "gather", "scatter")
DTYPES = (
    torch.uint8, torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
KINDS = (
    "barrier", "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
    "sparse all_reduce",
)  # fmt: skip
DIRECT = 1 << 14  # bytes up to which every rank adds all of it, however many there are
NARROW = (torch.float16, torch.bfloat16)
DIMENSIONS = 64  # that a sparse tensor may have


@functools.lru_cache
def signature(kind: str, dtype: torch.dtype = torch.uint8, op: int = 0, root: int = 0) -> int:
    """One word for what all ranks must do alike in a round: kind, dtype, op, root. The size starts at bit SIZE."""
    return KINDS.index(kind) | DTYPES.index(dtype) << 4 | op << 10 | root << 14


def spelled(word: int) -> str:
    """A signature in words."""
    kind, dtype, root, size = KINDS[word & 15], DTYPES[word >> 4 & 63], word >> 14 & 4095, word >> SIZE
    if kind in ("barrier", "all_to_all"):
        return kind
    op = f" {list(OPERATIONS)[word >> 10 & 15]}" if "reduce" in kind else ""
    return f"{kind}{op} of {size // dtype.itemsize} x {dtype}" + (f" with root {root}" if kind in ROOTED else "")


class GroupRounds:
    """The rounds of one group, as one rank goes through them.

    Parameters
    ----------
    memory : GroupMemory
    """

    def __init__(self, memory: GroupMemory) -> None:
        self.rank, self.size = memory.rank, memory.size
        self._memory = memory
        self.others = [rank for rank in range(memory.size) if rank != memory.rank]
        self._round = 0
        self._tag = 0
        self._unseen = 0  # ranks whose slot of this round was not looked at
        self._views = functools.lru_cache(KEPT_VIEWS)(self._lying)

    def come(self, signature: int) -> Steps:
        """Come to the next round. The slots of two rounds ago may then be overwritten.

        Raises
        ------
        PeerError
            Somebody did something else in the latest round.
        """
        if self._unseen:
            yield from self.see(self.others)
        self._round, self._tag, self._unseen = self._round + 1, signature, len(self.others)

    def slots(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """The slots of this round, ``count`` elements of each: our own to be written before ``show``."""
        return self._views(dtype, count, self._round & 1)

    def show(self) -> None:
        """Announce our slot: it is written, or need not be."""
        self._memory.arrive(self._round, self._tag)

    def see(self, ranks: Sequence[int]) -> Steps:
        """Wait until these ranks, and not this one, have announced their slots.

        Raises
        ------
        PeerError
            One of them does something else.
        """
        memory, number = self._memory, self._round
        for rank in ranks:
            if rank == self.rank:
                continue
            self._unseen -= 1
            while memory.arrived(rank) < number:
                yield [other for other in self.others if memory.arrived(other) < number]
            order()  # the counter is read before the tag and the slot
            tag = memory.tag(rank, number)
            if tag != self._tag:
                raise PeerError(
                    f"rank {memory.names[rank]} does {spelled(tag)} while rank {memory.names[self.rank]} does "
                    f"{spelled(self._tag)}; all ranks of a group must call the same collectives in the same order, "
                    "with equal sizes"
                )

    def _lying(self, dtype: torch.dtype, count: int, parity: int) -> list[torch.Tensor]:
        size = count * dtype.itemsize
        starts = [(2 * rank + parity) * SLOT for rank in range(self.size)]
        with torch.inference_mode(False):  # else they could not be written outside that mode
            return [torch.frombuffer(self._memory.slots[start : start + size], dtype=dtype) for start in starts]


class Reduction:
    """How values of several ranks become one.

    Parameters
    ----------
    op : ReduceOp.RedOpType
        One of torch.distributed's.
    dtype : torch.dtype
    ranks : int

    Raises
    ------
    UsageError
        There is no such reduction.
    """

    def __init__(self, op: Any, dtype: torch.dtype, ranks: int) -> None:
        name = str(op).rpartition(".")[2]
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

    def into(self, parts: Tensors, out: torch.Tensor) -> None:
        """Reduce ``parts``, one per rank, into ``out``, which must not be one of them."""
        if len(parts) == 2 and not self._narrow:
            total = self._op(parts[0], parts[1], out=out)
        else:
            total = fold_values([part.float() for part in parts] if self._narrow else parts, self._op)
            assert total is not None  # there is a part of every rank
        if self._divisor != 1:
            (torch.view_as_real(total) if total.is_complex() else total).div_(self._divisor)
        if total is not out:
            out.copy_(total)


reduction = functools.lru_cache(Reduction)


def barrier(rounds: GroupRounds) -> Steps:
    """Nobody goes on before all have come."""
    yield from rounds.come(signature("barrier"))
    rounds.show()
    yield from rounds.see(rounds.others)


def all_reduce(rounds: GroupRounds, flat: torch.Tensor, reduction: Reduction, root: int | None = None) -> Steps:
    """Reduce over all ranks, into every rank's tensor. With a root, only its tensor is written."""
    word = _word("all_reduce" if root is None else "reduce", flat, reduction, root or 0)
    for _, part in _pieces(flat, SLOT):
        slots = yield from _shown(rounds, word, part)
        if root not in (None, rounds.rank):
            continue
        yield from rounds.see(rounds.others)
        if rounds.size <= 2 or flat.nbytes <= DIRECT or root is not None:
            reduction.into(slots, part)
        else:
            yield from _in_sections(rounds, word, slots, part, reduction)


def _in_sections(rounds: GroupRounds, word: int, slots: Tensors, part: torch.Tensor, reduction: Reduction) -> Steps:
    """Reduce a section of ``part`` on each rank, and gather the sections in one more round."""
    bounds = share_bounds(len(part), rounds.size)
    start, end = bounds[rounds.rank]
    mine = part[start:end]
    reduction.into([slot[start:end] for slot in slots], mine)
    yield from rounds.come(word)
    slots = rounds.slots(part.dtype, bounds[0][1])
    slots[rounds.rank][: end - start].copy_(mine)
    rounds.show()
    for rank in rounds.others:
        yield from rounds.see((rank,))
        start, end = bounds[rank]
        part[start:end].copy_(slots[rank][: end - start])


def broadcast(rounds: GroupRounds, flat: torch.Tensor, root: int) -> Steps:
    """Every rank ends with what the root has."""
    word = _word("broadcast", flat, root=root)
    for _, part in _pieces(flat, SLOT):
        slots = yield from _shown(rounds, word, part, shows=rounds.rank == root)
        if rounds.rank != root:
            yield from rounds.see((root,))
            part.copy_(slots[root])


def all_gather(
    rounds: GroupRounds, outputs: Tensors, flat: torch.Tensor, kind: str = "all_gather", root: int = 0
) -> Steps:
    """Copy what each rank has into ``outputs``. Every rank has some; in a "gather", only the root."""
    word = _word(kind, flat, root=root)
    for start, part in _pieces(flat, SLOT):
        slots = yield from _shown(rounds, word, part)
        for rank, output in enumerate(outputs):
            yield from rounds.see((rank,))
            output[start : start + len(part)].copy_(slots[rank])


def scatter(rounds: GroupRounds, flat: torch.Tensor, inputs: Tensors, root: int) -> Steps:
    """Each rank gets its part of what the root has. Only the root has ``inputs``."""
    word = _word("scatter", flat, root=root)
    for start, part in _pieces(flat, SLOT // rounds.size):
        dealt = yield from _dealt(rounds, word, part.dtype, start, len(part), inputs)
        yield from rounds.see((root,))
        part.copy_(dealt[root])


def reduce_scatter(rounds: GroupRounds, flat: torch.Tensor, reduction: Reduction, inputs: Tensors) -> Steps:
    """Each rank ends with the reduction of its part; ``inputs``: this rank's parts, one for each."""
    word = _word("reduce_scatter", flat, reduction)
    for start, part in _pieces(flat, SLOT // rounds.size):
        dealt = yield from _dealt(rounds, word, part.dtype, start, len(part), inputs)
        yield from rounds.see(rounds.others)
        reduction.into(dealt, part)


def all_to_all(rounds: GroupRounds, outputs: Tensors, inputs: Tensors) -> Steps:
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
        dealt = yield from _dealt(rounds, word, dtype, start, step, inputs)
        for rank, output in enumerate(outputs):
            yield from rounds.see((rank,))
            part = output[start : start + step]
            part.copy_(dealt[rank][: len(part)])


def all_reduce_sparse(rounds: GroupRounds, tensor: torch.Tensor, reduction: Reduction) -> Steps:
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


def _summed(rounds: GroupRounds, tensor: torch.Tensor) -> Steps:
    own = tensor.detach().coalesce()
    rows, values = own.indices().t(), own.values()
    shape = [*own.shape, own.sparse_dim()]
    header = torch.tensor([len(values), *shape, *[-1] * (DIMENSIONS - own.dim())])
    headers = torch.stack((yield from _gathered(rounds, header)))
    if not torch.equal(headers[:, 1:], header[1:].expand_as(headers[:, 1:])):
        shapes = sorted({str(tuple(row[1 : row.index(-1)])) for row in headers.tolist()})
        raise UsageError(
            f"ranks bring sparse tensors of shapes (and sparse dimensions) {', '.join(shapes)}; give each rank the same"
        )
    counts, narrow = headers[:, 0].tolist(), own.dtype in NARROW
    parts = []
    all_rows, all_values = (yield from _padded(rounds, rows, counts)), (yield from _padded(rounds, values, counts))
    for each, given in zip(all_rows, all_values, strict=True):
        wide = given.float() if narrow else given
        parts.append(torch.sparse_coo_tensor(each.t(), wide, own.shape, is_coalesced=True, check_invariants=False))
    total = fold_values(parts, lambda left, right: (left + right).coalesce())
    assert total is not None  # there is a part of every rank
    with torch.no_grad():
        tensor.copy_(total.to(own.dtype))


def _padded(rounds: GroupRounds, mine: torch.Tensor, counts: list[int]) -> Steps:
    """Gather the rows of all ranks, padded on the way to the longest; rank i has ``counts[i]``."""
    shape = (max(counts), *mine.shape[1:])
    flat = mine.new_zeros(shape)
    flat[: len(mine)] = mine
    padded = yield from _gathered(rounds, flat.view(-1))
    return [each.view(shape)[:count] for each, count in zip(padded, counts, strict=True)]


def _gathered(rounds: GroupRounds, flat: torch.Tensor) -> Steps:
    gathered = [torch.empty_like(flat) for _ in range(rounds.size)]
    yield from all_gather(rounds, gathered, flat, "sparse all_reduce")
    return gathered


def _shown(rounds: GroupRounds, word: int, part: torch.Tensor, *, shows: bool = True) -> Steps:
    """Come to a round and show ``part`` in it, or only read. Returns the slots of all ranks."""
    yield from rounds.come(word)
    slots = rounds.slots(part.dtype, len(part))
    if shows:
        slots[rounds.rank].copy_(part)
    rounds.show()
    return slots


def _dealt(rounds: GroupRounds, word: int, dtype: torch.dtype, start: int, step: int, inputs: Tensors) -> Steps:
    """Come to a round and show ``step`` elements of each rank's input, from ``start``. Returns those for this rank."""
    yield from rounds.come(word)
    slots = [slot.view(rounds.size, step) for slot in rounds.slots(dtype, rounds.size * step)]
    for target, value in zip(slots[rounds.rank], inputs, strict=False):
        part = value[start : start + step]
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
