"""The collectives of a group, each as rounds in slots; big tensors go through in pieces that stay in cache.

Every function is a generator that yields the ranks it waits for. Tensors are flat and contiguous. Sums and other
reductions are taken in a fixed order: pairs of neighbours, then pairs of pairs, by rank; that of the fold. float16 and
bfloat16 are added in float32 and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.backend.memory import SLOT
from phalanx.backend.progress import Steps
from phalanx.backend.rounds import DTYPES, MOST, OPERATIONS, SIZE, Rounds, signature
from phalanx.errors import UsageError
from phalanx.plan import share_bounds
from phalanx.plan.fold import fold_values

DIRECT = 1 << 14  # bytes up to which every rank adds all of it, however many there are
Op = Callable[..., torch.Tensor]
OPS: dict[str, Op] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
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
        if name not in OPS:
            raise UsageError(f"op is {name}, which backend 'phalanx' has not; use one of {', '.join(OPERATIONS)}")
        if dtype not in DTYPES:
            raise UsageError(f"a tensor of {dtype} cannot be reduced; convert it first, to float32 for example")
        plain = not (dtype.is_floating_point or dtype.is_complex)
        wrong = (
            (name in ("BAND", "BOR", "BXOR") and not plain)
            or (name in ("MIN", "MAX") and dtype.is_complex)
            or (name == "AVG" and plain)
        )
        if wrong:
            raise UsageError(f"op {name} cannot be done for {dtype}; use another op, or convert the tensor first")
        self.number = OPERATIONS.index(name)
        self._op = OPS[name]
        self._narrow = dtype in NARROW
        self._divisor = ranks if name == "AVG" else 1

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


def all_reduce(rounds: Rounds, flat: torch.Tensor, reduction: Reduction) -> Steps:
    """Every rank ends with the reduction of all."""
    word = _word("all_reduce", flat, reduction)
    if rounds.size <= 2 or flat.nbytes <= DIRECT:
        for part in _pieces(flat, SLOT):
            slots = yield from _shown(rounds, word, part)
            yield from rounds.see(rounds.others)
            reduction.into(slots, part)
        return
    for part in _pieces(flat, SLOT):
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


def reduce(rounds: Rounds, flat: torch.Tensor, reduction: Reduction, root: int) -> Steps:
    """The root ends with the reduction of all; the others keep theirs."""
    word = _word("reduce", flat, reduction, root)
    for part in _pieces(flat, SLOT):
        slots = yield from _shown(rounds, word, part)
        if rounds.rank == root:
            yield from rounds.see(rounds.others)
            reduction.into(slots, part)


def broadcast(rounds: Rounds, flat: torch.Tensor, root: int) -> Steps:
    """Every rank ends with what the root has."""
    word = _word("broadcast", flat, root=root)
    for part in _pieces(flat, SLOT):
        if rounds.rank == root:
            yield from _shown(rounds, word, part)
        else:
            slots = yield from _idle(rounds, word, part)
            yield from rounds.see((root,))
            part.copy_(slots[root])


def all_gather(rounds: Rounds, outputs: Sequence[torch.Tensor], flat: torch.Tensor, kind: str = "all_gather") -> Steps:
    """Every rank ends with what each has."""
    word = _word(kind, flat)
    for start, part in _placed(flat, SLOT):
        slots = yield from _shown(rounds, word, part)
        for rank in range(rounds.size):
            if rank != rounds.rank:
                yield from rounds.see((rank,))
            outputs[rank][start : start + len(part)].copy_(slots[rank])


def gather(rounds: Rounds, outputs: Sequence[torch.Tensor], flat: torch.Tensor, root: int) -> Steps:
    """The root ends with what each rank has."""
    word = _word("gather", flat, root=root)
    for start, part in _placed(flat, SLOT):
        slots = yield from _shown(rounds, word, part)
        if rounds.rank == root:
            yield from rounds.see(rounds.others)
            for output, slot in zip(outputs, slots, strict=True):
                output[start : start + len(part)].copy_(slot)


def scatter(rounds: Rounds, flat: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Steps:
    """Each rank ends with its part of what the root has."""
    word = _word("scatter", flat, root=root)
    for start, part in _placed(flat, SLOT // rounds.size):
        yield from rounds.come(word)
        slot = rounds.slots(part.dtype, rounds.size * len(part))[root].view(rounds.size, len(part))
        if rounds.rank == root:
            for target, value in zip(slot, inputs, strict=True):
                target.copy_(value[start : start + len(part)])
        rounds.show()
        if rounds.rank != root:
            yield from rounds.see((root,))
        part.copy_(slot[rounds.rank])


def reduce_scatter(rounds: Rounds, flat: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction) -> Steps:
    """Each rank ends with the reduction of its part; ``inputs``: this rank's parts, one for each."""
    word = _word("reduce_scatter", flat, reduction)
    for start, part in _placed(flat, SLOT // rounds.size):
        slots = yield from _dealt(rounds, word, [value[start : start + len(part)] for value in inputs])
        yield from rounds.see(rounds.others)
        reduction.into([slot.view(rounds.size, -1)[rounds.rank] for slot in slots], part)


def all_to_all(rounds: Rounds, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Steps:
    """Part i of each rank goes to rank i, where it becomes part j, if it came from rank j. Parts may differ in size.

    Raises
    ------
    UsageError
        A rank sends more or less than the other expects.
    """
    word = signature("all_to_all", inputs[0].dtype)
    sizes = torch.tensor([len(value) for value in inputs])
    slots = yield from _shown(rounds, word, sizes)
    yield from rounds.see(rounds.others)
    table = torch.stack(slots).tolist()
    wanted = [len(output) for output in outputs]
    if [row[rounds.rank] for row in table] != wanted:
        raise UsageError(
            f"all_to_all: this rank expects parts of {wanted} elements, and the others send "
            f"{[row[rounds.rank] for row in table]}; make the splits of all ranks agree"
        )
    most = max(map(max, table))
    step = SLOT // rounds.size // inputs[0].dtype.itemsize
    for start in range(0, most, step):
        slots = yield from _dealt(rounds, word, [value[start : start + step] for value in inputs], step)
        for rank in range(rounds.size):
            if rank != rounds.rank:
                yield from rounds.see((rank,))
            part = outputs[rank][start : start + step]
            part.copy_(slots[rank].view(rounds.size, step)[rounds.rank][: len(part)])


def _shown(rounds: Rounds, word: int, part: torch.Tensor) -> Steps:
    """Come to a round and show ``part`` in it; the slots of all."""
    yield from rounds.come(word)
    slots = rounds.slots(part.dtype, len(part))
    slots[rounds.rank].copy_(part)
    rounds.show()
    return slots


def _idle(rounds: Rounds, word: int, part: torch.Tensor) -> Steps:
    """Come to a round to read only."""
    yield from rounds.come(word)
    rounds.show()
    return rounds.slots(part.dtype, len(part))


def _dealt(rounds: Rounds, word: int, parts: Sequence[torch.Tensor], step: int = 0) -> Steps:
    """Come to a round and show a part for each rank, ``step`` elements apart."""
    step = step or len(parts[0])
    yield from rounds.come(word)
    slots = rounds.slots(parts[0].dtype, rounds.size * step)
    for target, part in zip(slots[rounds.rank].view(rounds.size, step), parts, strict=True):
        target[: len(part)].copy_(part)
    rounds.show()
    return slots


def _pieces(flat: torch.Tensor, most: int) -> Sequence[torch.Tensor]:
    """``flat`` in pieces of at most so many bytes."""
    return [flat] if 0 < flat.nbytes <= most else flat.split(most // flat.itemsize) if len(flat) else []


def _placed(flat: torch.Tensor, most: int) -> Sequence[tuple[int, torch.Tensor]]:
    """The same, each with the index of its first element."""
    pieces = _pieces(flat, most)
    return [(number * len(pieces[0]), piece) for number, piece in enumerate(pieces)]


def _word(kind: str, flat: torch.Tensor, reduction: Reduction | None = None, root: int = 0) -> int:
    op = 0 if reduction is None else reduction.number
    return signature(kind, flat.dtype, op, root) | (flat.nbytes & MOST) << SIZE
