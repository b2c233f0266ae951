"""Weights that no update writes, held once for all processes of a run.

They lie in a memory that nobody writes after the run's start, so it is also what a snapshot would hold of them. Each
process maps it for itself: what user code writes there stays with the writer.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.seams import Sharing
from phalanx.shared.heap import give_back
from phalanx.shared.layout import Layout
from phalanx.shared.memory import Memory

GROUP = 64 << 20  # bytes that are copied before what they were copied from is given back


class FrozenWeights:
    """The storages that were frozen when the run began, as one process sees them.

    A weight may get a gradient later all the same. Its owner then copies it to its place in the arena before the
    update, and writes there which step that was: in the state of an earlier step it is what it was at the start.

    Parameters
    ----------
    sharing : Sharing
    layout : Layout
    arena : mmap.mmap
    memory : Memory
        Where they lie; not mapped if nothing is frozen.
    owned : sequence of int
        The parameters that this process updates.
    """

    def __init__(
        self, sharing: Sharing, layout: Layout, arena: mmap.mmap, memory: Memory, owned: Sequence[int] = ()
    ) -> None:
        self._sharing = sharing
        self._layout = layout
        self._arena = arena
        self._memory = memory
        self._base = memory.map(private=True) if layout.frozen else arena
        self._owned = [index for index in owned if layout.contents.storage_of[index] in layout.frozen]
        self._thawed = np.frombuffer(arena, np.int64, len(layout.contents.storages), layout.thawed)
        self._own: set[int] | None = None  # storages that are mapped from the arena in this process

    def resting(self, number: int) -> bool:
        """Whether a storage is, in the newest state, as it was at the start."""
        return number in self._layout.frozen and not self._thawed[number]

    def enter(self, step: int) -> None:
        """Have each storage where it lies before ``step``; what this process thawed after that is frozen again."""
        if not self._layout.frozen:
            return
        flags = self._thawed.tolist()
        for index in self._owned:
            number = self._layout.contents.storage_of[index]
            if flags[number] > step:
                self._thawed[number] = 0
        own = {number for number, thawed in enumerate(flags) if 0 < thawed <= step}
        if own != self._own:
            moved = set(self._layout.frozen) if self._own is None else own ^ self._own
            self._own = own
            self._sharing.move(self._layout, {number: self.place(number) for number in moved})

    def thaw(self, step: int, gradient: Sequence[Any]) -> None:
        """An update with this gradient follows, in ``step``: give what it writes for the first time a place."""
        for index in self._owned:
            number = self._layout.contents.storage_of[index]
            if gradient[index] is not None and not self._thawed[number]:
                home, base = self._layout.weights[number], self._layout.frozen[number]
                self._stretch(self._arena, home, number)[:] = self._stretch(self._base, base, number)
                self._thawed[number] = step + 1
        self.enter(step + 1)

    def fill(self, weights: list[Any]) -> None:
        """Begin: move this process's own storages to where all will find them; takes their bytes out of ``weights``."""
        shared = self._memory.map() if self._layout.frozen else self._arena
        self._own, places = set(), dict[int, tuple[mmap.mmap, int]]()
        left = list(self._layout.frozen)
        while left:
            number = left.pop()
            self._stretch(shared, self._layout.frozen[number], number)[:] = weights[number]
            weights[number], places[number] = None, self.place(number)
            if not left or sum(self._layout.contents.storages[each] for each in places) >= GROUP:
                self._sharing.move(self._layout, places)
                places.clear()
                give_back()

    def renew(self, weights: Sequence[np.ndarray]) -> None:
        """Forget what this process wrote there, or put elsewhere: nobody computed with it. ``weights``: its own."""
        if self._layout.frozen and hasattr(mmap, "MADV_DONTNEED"):
            self._base.madvise(mmap.MADV_DONTNEED)
        here = {number: self._stretch(self._base, at, number) for number, at in self._layout.frozen.items()}
        away = [number for number, place in here.items() if weights[number].ctypes.data != place.ctypes.data]
        if away:
            self._sharing.move(self._layout, {number: self.place(number) for number in away})

    def place(self, number: int) -> tuple[mmap.mmap, int]:
        """Where a storage lies in this process; each begins a page, or at a multiple of 64 bytes."""
        resting = number in self._layout.frozen and number not in (self._own or ())
        return (self._base, self._layout.frozen[number]) if resting else (self._arena, self._layout.weights[number])

    def _stretch(self, memory: mmap.mmap, offset: int, number: int) -> np.ndarray:
        return np.frombuffer(memory, np.uint8, self._layout.contents.storages[number], offset)
