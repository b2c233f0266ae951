"""The arena of a run: one stretch of shared memory with counters, flags, and the framework's state in it.

Its plan follows from the model and the placement alone, so that every process computes the same one.
"""

from __future__ import annotations

import mmap

from phalanx.plan.fold import Placement, remaining
from phalanx.seams import Sharing
from phalanx.shared.counters import Counters, float_count, word_count
from phalanx.shared.layout import Contents
from phalanx.shared.memory import Carver

WORD = 8


class Plan:
    """Where everything lies, for one placement of one model.

    Parameters
    ----------
    sharing : Sharing
    placement : Placement
    known : Contents, optional
        Of the caller's process, which found out what the state consists of.

    Attributes
    ----------
    layout : Any
        The framework's part.
    nodes : list of (level, index)
        All partial sums that workers publish, in replica order.
    publishers : list of (worker, number)
        Who publishes each of them.
    size : int
        Bytes of the arena; most of it is never touched.
    """

    def __init__(self, sharing: Sharing, placement: Placement, known: Contents | None = None) -> None:
        carver = Carver()
        self._placement = placement
        self._words = carver.take(WORD * word_count(placement.workers))
        self._floats = carver.take(WORD * float_count(placement.workers, placement.replicas))
        self.nodes: list[tuple[int, int]] = []
        self.publishers: list[tuple[int, int]] = []
        for worker in placement.order:
            found = remaining(placement.replicas, placement.blocks[worker])
            self.nodes += found
            self.publishers += [(worker, number) for number in range(len(found))]
        self.layout = sharing.lay_out(placement, carver.take, known)
        self._flag_bytes = (1 + len(self.layout.owners)) * len(self.nodes)
        self._flags = carver.take(self._flag_bytes)
        self.size = carver.size

    def counters(self, arena: mmap.mmap) -> Counters:
        """The counters in a mapped arena."""
        workers, replicas = self._placement.workers, self._placement.replicas
        words = memoryview(arena)[self._words :][: WORD * word_count(workers)].cast("q")
        floats = memoryview(arena)[self._floats :][: WORD * float_count(workers, replicas)].cast("d")
        return Counters(words, floats, workers, replicas)

    def flags(self, arena: mmap.mmap) -> memoryview:
        """Per partial sum: which vector of its publisher holds it (0: none, else counted from 1), and its entries."""
        return memoryview(arena)[self._flags :][: self._flag_bytes]
