"""Rounds: every rank shows something in its slot, and reads what others show there.

A rank that comes to round n has read all it wanted of round n-1, so once all have come to n, the slots of n-1 are free
for n+1: each rank has two slots, and one meeting per round is enough. Plain counters carry it, one writer each.

There is no thread: a collective is done when its call returns. Whoever waits looks whether the others are alive.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from phalanx.backend.memory import SLOT, GroupMemory
from phalanx.errors import PeerError
from phalanx.shared.ordering import order

KEPT_VIEWS = 64
SPIN_SECONDS = 0.0003
NAP_SECONDS, LONGEST_NAP_SECONDS = 0.00002, 0.0005
SIZE = 26  # the bit of a signature from which on it holds a number of bytes
MOST = (1 << 37) - 1  # bytes that fit there
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
DTYPES = (
    torch.uint8, torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
KINDS = (
    "barrier", "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
)  # fmt: skip


@functools.lru_cache
def signature(kind: str, dtype: torch.dtype = torch.uint8, op: int = 0, root: int = 0) -> int:
    """What a rank does in a round, as far as all must do the same, as one word; the size is put in from bit SIZE on."""
    return KINDS.index(kind) | DTYPES.index(dtype) << 4 | op << 10 | root << 14


def spelled(word: int) -> str:
    """A signature for people."""
    kind, dtype, root, size = KINDS[word & 15], DTYPES[word >> 4 & 63], word >> 14 & 4095, word >> SIZE
    if kind == "barrier":
        return kind
    op = f" {OPERATIONS[word >> 10 & 15]}" if "reduce" in kind else ""
    return f"{kind}{op} of {size // dtype.itemsize} x {dtype}" + (f" with root {root}" if kind in ROOTED else "")


@dataclass(frozen=True)
class Shown:
    """Slots of all ranks, as tensors of one dtype and length, for even and for odd rounds."""

    even: list[torch.Tensor]
    odd: list[torch.Tensor]


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
        self._views: dict[tuple[torch.dtype, int], Shown] = {}
        self._lock = threading.RLock()
        self._name, self._seconds = "", 0.0
        self.broken: PeerError | None = None

    @contextlib.contextmanager
    def collective(self, name: str, seconds: float) -> Iterator[None]:
        """What happens inside is one collective, which waits so long for others. After an error nothing else happens.

        Raises
        ------
        PeerError
            Something was broken off before, so ranks no longer agree on what comes next.
        """
        with self._lock:
            if self.broken is not None:
                raise PeerError(
                    f"this group could not go on, start all ranks again; before, {self.broken}"
                ) from self.broken
            self._name, self._seconds = name, seconds
            try:
                yield
            except PeerError as error:
                self.broken = error
                raise
            except BaseException as error:
                self.broken = PeerError(f"{name} broke off in the middle ({error!r})")
                raise

    def come(self, signature: int) -> None:
        """Come to the next round. What was shown two rounds ago may then be written over.

        Raises
        ------
        PeerError
            Somebody did something else in the latest round.
        """
        if self._unseen and self._round:
            self.see(self.others)
        self._round, self._tag, self._unseen = self._round + 1, signature, len(self.others)

    def slots(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """The slots of this round, ``count`` elements of each: our own to be written before ``show``."""
        shown = self._views.get((dtype, count))
        if shown is None:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # else they could not be written outside that mode
                shown = self._views[dtype, count] = Shown(self._made(dtype, count, 0), self._made(dtype, count, 1))
        return shown.odd if self._round & 1 else shown.even

    def show(self) -> None:
        """Our slot is written, or need not be."""
        self._memory.arrive(self._round, self._tag)

    def see(self, ranks: Sequence[int]) -> None:
        """Wait until these ranks show theirs.

        Raises
        ------
        PeerError
            One of them does something else, or does not come in time. Or any rank that is not there yet has ended.
        """
        memory, number = self._memory, self._round
        for rank in ranks:
            self._unseen -= 1
            if memory.arrived(rank) < number:
                self._wait(rank)
            order()  # the counter was read before the tag and the slot are
            tag = memory.tag(rank, number)
            if tag != self._tag:
                raise PeerError(
                    f"rank {memory.names[rank]} does {spelled(tag)} while rank {memory.names[self.rank]} does "
                    f"{spelled(self._tag)}; all ranks of a group must call the same collectives in the same order, "
                    "with equal sizes"
                )

    def _wait(self, rank: int) -> None:
        """Until a rank has come to this round."""
        began, nap = time.perf_counter(), NAP_SECONDS
        while self._memory.arrived(rank) < self._round:
            waited = time.perf_counter() - began
            if waited < SPIN_SECONDS:
                os.sched_yield()
                continue
            self._check_others(waited)
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_SECONDS)

    def _check_others(self, waited: float) -> None:
        """Give up if a rank that is not there yet has ended, or is late."""
        memory = self._memory
        ended = memory.gone(self.others)
        missing = [other for other in self.others if memory.arrived(other) < self._round]
        gone = [other for other in ended if other in missing]  # who came before it ended did its part
        if gone:
            why = f"rank {memory.names[gone[0]]} (process {memory.pids[gone[0]]}) has ended"
        elif memory.closed:
            why = "the group was destroyed before it was done"
        elif waited > self._seconds:
            late = ", ".join(f"rank {memory.names[other]}" for other in missing)
            why = f"{late} did not come within the timeout of {self._seconds:g} s"
        else:
            return
        raise PeerError(f"{self._name}: {why}; this group cannot go on, start all ranks again")

    def _made(self, dtype: torch.dtype, count: int, parity: int) -> list[torch.Tensor]:
        size = count * dtype.itemsize
        starts = [(2 * rank + parity) * SLOT for rank in range(self.size)]
        return [torch.frombuffer(self._memory.slots[start : start + size], dtype=dtype) for start in starts]
