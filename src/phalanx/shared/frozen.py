"""Weights that no update writes, held once for all processes of a run.

They lie in a memory that nobody writes after the run's start, so it is also what a snapshot would hold of them. Each
process maps it for itself: what user code writes there stays with the writer.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import numpy as np

from phalanx.seams.sharing import Places
from phalanx.shared.layout import Layout
from phalanx.shared.memory import Memory

GROUP = 64 << 20  # bytes that are copied before what they were copied from is given back


class FrozenWeights:
    """Where the storages lie that were frozen when the run began.

    A weight may get a gradient later all the same. Its owner then copies it to its place in the arena before the
    update, and writes there which step that was; to a state of an earlier step it is what it was at the start.

    Parameters
    ----------
    layout : Layout
    arena : mmap.mmap
    memory : Memory
        Where they lie; nothing is mapped if nothing is frozen.
    """

    def __init__(self, layout: Layout, arena: mmap.mmap, memory: Memory) -> None:
        self._layout = layout
        self._arena = arena
        self._memory = memory
        self._base = memory.map(private=True) if layout.frozen else arena
        self._thawed = np.frombuffer(arena, np.int64, len(layout.contents.storages), layout.thawed)
        self._bound: dict[int, bool] = {}  # whether a storage was found in the arena, when last looked for

    def resting(self, number: int) -> bool:
        """Whether a storage is, in the newest state, as it was at the start."""
        return number in self._layout.frozen and not self._thawed[number]

    def moved(self, step: int) -> Places:
        """Where storages lie before ``step``, those that do not lie where they did at the last call."""
        moved: dict[int, tuple[mmap.mmap, int]] = {}
        for number, offset in self._layout.frozen.items():
            in_arena = 0 < self._thawed[number] <= step
            if self._bound.get(number) is not in_arena:
                self._bound[number] = in_arena
                moved[number] = (self._arena, self._layout.weights[number]) if in_arena else (self._base, offset)
        return moved

    def thaw(self, number: int, step: int) -> None:
        """Its owner is about to update a storage for the first time, in ``step``."""
        if self.resting(number):
            self._stretch(self._arena, self._layout.weights[number], number)[:] = self._stretch(
                self._base, self._layout.frozen[number], number
            )
            self._thawed[number] = step + 1

    def rewind(self, number: int, step: int) -> None:
        """Its owner goes back to the state before ``step``: what was thawed after that is frozen again."""
        if self._thawed[number] > step:
            self._thawed[number] = 0

    def fill(self, weights: Callable[[int], np.ndarray]) -> Iterator[Places]:
        """Copy all storages from ``weights(number)``; yields, group by group, where those lie that were copied."""
        places: dict[int, tuple[mmap.mmap, int]] = {}
        size = 0
        shared = self._memory.map() if self._layout.frozen else self._arena
        for number, offset in self._layout.frozen.items():
            self._stretch(shared, offset, number)[:] = weights(number)
            places[number] = self._base, offset
            size += self._layout.contents.storages[number]
            if size >= GROUP:
                yield places
                places, size = {}, 0
        if places:
            yield places

    def _stretch(self, memory: mmap.mmap, offset: int, number: int) -> np.ndarray:
        return np.frombuffer(memory, np.uint8, self._layout.contents.storages[number], offset)
