"""The link between workers of one host in a run of several: its workers meet as always, then each meets the others'.

What differs is what "all" means: losses and weights of all R replicas, and the sum of all hosts' gradients. From there
on every host does the same, so that nothing else has to be told.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.contracts import Part, Vector
from phalanx.engines.link import ArenaLink, union
from phalanx.hosts.across import CHECK_STEPS, WORD, Across, Meeting
from phalanx.plan.placement import added


class HostLink(ArenaLink):
    """Implements ``contracts.Link``.

    Parameters
    ----------
    meeting : phalanx.hosts.across.Meeting
        Where the other hosts are.
    *arguments
        Those of ``ArenaLink``.
    """

    def __init__(self, meeting: Meeting, *arguments: Any) -> None:
        super().__init__(*arguments)
        framework, _, plan, placement, arena, *_ = arguments
        blanks = [self._slots.blank(index) for index in range(framework.sharing.count)]  # memory that is never touched
        across = Across(meeting, self._worker, placement.replicas, blanks)
        self._across = across
        self._owned = [index for index, owner in enumerate(plan.layout.owners) if owner == self._worker]
        self._step = 0
        carried = self._shard.luggage if self._worker == 0 else []
        self._luggage = carried or [[memoryview(bytearray())]] * placement.replicas  # pieces, and which of them changed
        self._block = range(placement.blocks[0].start, placement.blocks[-1].stop)
        self._groups = [
            [position for position, node in enumerate(self._nodes) if _first(node) in _covered(whole)]
            for whole in across.nodes
        ]
        self._within = functools.cache(functools.partial(added, placement.replicas, self._nodes))
        self._weights = [np.frombuffer(arena, np.int64, -(-size // WORD), start) for start, size in self._shard.weights]

    def enter(self, step: int) -> None:
        """The step that is next."""
        self._step = step

    def exchange(self, parts: Sequence[Part]) -> list[Part]:
        """See ``contracts.Link.exchange``."""
        mine = super().exchange(parts)[self._block.start : self._block.stop]
        due = self._weights if self._step % CHECK_STEPS == 0 else []
        checksum = int(np.array([words.sum() for words in due], np.int64).sum())  # modulo 2**64
        notes = [bytes(flags) for *_, flags in self._luggage[self._block.start : self._block.stop]]
        self._parts, self._masks, notes = self._across.exchange(self._step, checksum, mine, self._host_masks(), notes)
        for (*_, flags), note in zip(self._luggage, notes, strict=True):
            flags[:] = note
        changed = [list(itertools.compress(pieces, flags)) for *pieces, flags in self._luggage]
        self._across.spread(changed)
        return self._parts

    def mean(self, weight: float) -> Vector:
        """See ``contracts.Link.mean``."""
        vectors = self._vectors()
        sums = [
            self._slots.fold([vector if at in group else None for at, vector in enumerate(vectors)], self._within, 1.0)
            for group in self._groups
        ]
        total = self._across.total(sums, self._masks, self._owned)
        self._there = union(self._masks)
        return self._slots.fold([total], _alone, weight)

    def _host_masks(self) -> list[bytes]:
        """Which gradients each of this host's sums has: those that any of its workers' has."""
        flags = np.frombuffer(bytes(self._flags), np.uint8).reshape(-1, self._width)
        there = flags[:, 1:] * (flags[:, :1] > 0)
        return [there[group].max(0).tobytes() for group in self._groups]


def _first(node: tuple[int, int]) -> int:
    level, index = node
    return index << level


def _covered(node: tuple[int, int]) -> range:
    level, index = node
    return range(index << level, (index + 1) << level)


def _alone(there: tuple[int, ...]) -> Sequence[tuple[int, int]]:
    return ()
