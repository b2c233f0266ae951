"""Links in a run of several hosts: a host's workers meet as always, then each meets its counterparts on the others.

Only the meaning of "all" differs: losses and weights of all R replicas, and the sum of all hosts' gradients. From there
on every host does the same, so nothing else has to be exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.engines.hosts.exchange import CHECK_STEPS, UNKNOWN, Across, Mask, Rendezvous, Summands
from phalanx.engines.processes.link import ArenaLink, union
from phalanx.plan.fold import covers
from phalanx.seams.records import Part, Vector

NOTHING = b"\0"  # a note of a replica without buffers


class HostLink(ArenaLink):
    """Implements ``seams.Link`` between workers of one host that have counterparts on others.

    Parameters
    ----------
    rendezvous : Rendezvous
        Where the other hosts are.
    framework, shard, plan, placement, arena, barrier
        As of ``ArenaLink``.
    """

    def __init__(self, rendezvous: Rendezvous, *facts: Any) -> None:
        super().__init__(*facts)
        _, shard, plan, placement, _, barrier = facts
        owned = [index for index, owner in enumerate(plan.layout.owners) if owner == barrier.worker]
        blanks = self.slots.blanks()
        self._across = Across(rendezvous, barrier.worker, placement.replicas, blanks, owned, self._check)
        carried = shard.buffer_payload if barrier.worker == 0 else []
        # For each replica its pieces, and flags that say which of them changed.
        self._buffer_payload = carried or [[memoryview(bytearray())]] * placement.replicas
        self._block = range(placement.blocks[0].start, placement.blocks[-1].stop)
        self._groups = [
            [position for position, node in enumerate(plan.nodes) if covers(top, node)] for top in self._across.nodes
        ]
        self._masks: list[Mask] = []
        self._norm = -1, UNKNOWN  # a step, and its gradient's norm here

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        mine = super().all_gather(parts)[self._block.start : self._block.stop]
        step = self._barrier.step
        checksum = self._checksum() if step % CHECK_STEPS == 0 else 0
        norm = self._norm[1] if self._norm[0] == step - 1 else UNKNOWN
        notes = [bytes(flags) for *_, flags in self._buffer_payload[self._block.start : self._block.stop]]
        self.parts, self._masks, notes = self._across.tell((step, checksum, norm), mine, self._host_masks(), notes)
        for (*_, flags), note in zip(self._buffer_payload, notes, strict=True):
            flags[:] = note
        self._across.spread([list(itertools.compress(pieces, flags)) for *pieces, flags in self._buffer_payload])
        return self.parts

    def mean(self, weight: float) -> Vector:
        vectors, _ = self._gathered()

        def summands(index: int) -> list[Summands]:
            entries = [None if vector is None else vector[index] for vector in vectors]
            groups = [[entry if at in group else None for at, entry in enumerate(entries)] for group in self._groups]
            there = [tuple(at for at in group if entries[at] is not None) for group in self._groups]
            return list(zip(groups, map(self._order, there), strict=True))

        self.there = union(self._masks)
        return self.slots.fold([self._across.total(self._masks, summands)], lambda _: (), weight)

    def norm(self, gradient: Vector, parts: list[Part]) -> tuple[float, list[Part]]:
        norm, parts = super().norm(gradient, parts)
        self._note(norm)
        return norm, parts

    def _note(self, norm: float) -> None:
        """Have the other hosts compare it in the next step."""
        self._norm = self._barrier.step, bits_of(norm)

    def _checksum(self) -> int:
        """Of the weights that this worker and its counterparts own."""
        return int(np.array([weights.sum() for weights in self._shard.weights], np.int64).sum())  # modulo 2**64

    def _host_masks(self) -> list[Mask]:
        """Which gradients each of this host's sums has: those that the sum of any of its workers has."""
        flags = np.frombuffer(self.publications.read(), np.uint8).reshape(-1, 1 + self.publications.entries)
        there = flags[:, 1:] * (flags[:, :1] > 0)
        return [there[group].max(0).tobytes() for group in self._groups]


def bits_of(norm: float) -> int:
    """A number for the bits of a norm, which is never ``UNKNOWN``; all that are no numbers are one."""
    return 1 + int(np.float64(norm if norm == norm else np.inf).view(np.int64))
