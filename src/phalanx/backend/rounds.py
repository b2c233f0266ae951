"""Rounds: every rank shows something in its slot, and reads what others show there.

A rank that comes to round n has read all it wanted of round n-1, so once all have come to n, the slots of n-1 are free
for n+1: each rank has two slots, and one meeting per round is enough. Plain counters carry it, one writer each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from phalanx.backend.memory import SLOT, GroupMemory
from phalanx.backend.progress import Steps
from phalanx.errors import PeerError
from phalanx.shared.memory import order

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


@functools.lru_cache
def signature(kind: str, dtype: torch.dtype = torch.uint8, op: int = 0, root: int = 0) -> int:
    """What a rank does in a round, as far as all must do the same, as one word; the size is put in from bit SIZE on."""
    return KINDS.index(kind) | DTYPES.index(dtype) << 4 | op << 10 | root << 14


def spelled(word: int) -> str:
    """A signature for people."""
    kind, dtype, root, size = KINDS[word & 15], DTYPES[word >> 4 & 63], word >> 14 & 4095, word >> SIZE
    if kind in ("barrier", "all_to_all"):
        return kind
    op = f" {list(OPERATIONS)[word >> 10 & 15]}" if "reduce" in kind else ""
    return f"{kind}{op} of {size // dtype.itemsize} x {dtype}" + (f" with root {root}" if kind in ROOTED else "")


class Rounds:
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
        self._views: dict[tuple[torch.dtype, int], list[list[torch.Tensor]]] = {}  # for even and for odd rounds

    def come(self, signature: int) -> Steps:
        """Come to the next round. What was shown two rounds ago may then be written over.

        Raises
        ------
        PeerError
            Somebody did something else in the latest round.
        """
        if self._unseen and self._round:
            yield from self.see(self.others)
        self._round, self._tag, self._unseen = self._round + 1, signature, len(self.others)

    def slots(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """The slots of this round, ``count`` elements of each: our own to be written before ``show``."""
        shown = self._views.get((dtype, count))
        if shown is None:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # else they could not be written outside that mode
                shown = self._views[dtype, count] = [self._views_of(dtype, count, parity) for parity in (0, 1)]
        return shown[self._round & 1]

    def show(self) -> None:
        """Our slot is written, or need not be."""
        self._memory.arrive(self._round, self._tag)

    def see(self, ranks: Sequence[int]) -> Steps:
        """Wait until these ranks show theirs.

        Raises
        ------
        PeerError
            One of them does something else.
        """
        memory, number = self._memory, self._round
        for rank in ranks:
            self._unseen -= 1
            while memory.arrived(rank) < number:
                yield [other for other in self.others if memory.arrived(other) < number]
            order()  # the counter was read before the tag and the slot are
            tag = memory.tag(rank, number)
            if tag != self._tag:
                raise PeerError(
                    f"rank {memory.names[rank]} does {spelled(tag)} while rank {memory.names[self.rank]} does "
                    f"{spelled(self._tag)}; all ranks of a group must call the same collectives in the same order, "
                    "with equal sizes"
                )

    def _views_of(self, dtype: torch.dtype, count: int, parity: int) -> list[torch.Tensor]:
        size = count * dtype.itemsize
        starts = [(2 * rank + parity) * SLOT for rank in range(self.size)]
        return [torch.frombuffer(self._memory.slots[start : start + size], dtype=dtype) for start in starts]
