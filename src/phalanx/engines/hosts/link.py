"""Links in a run of several hosts: a host's workers meet as always, then each meets its counterparts on the others.

Only the meaning of "all" differs: losses and weights of all R replicas, and the sum of all hosts' gradients. From there
on every host does the same, so nothing else has to be exchanged.
"""

from __future__ import annotations

import functools
import itertools
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from phalanx.definition.data import Share
from phalanx.engines.hosts.exchange import CHECK_STEPS, Across, Mask, Rendezvous, Summands
from phalanx.engines.links import LaneLink
from phalanx.engines.processes.link import ArenaLink, union
from phalanx.plan.fold import Placement, added, covers
from phalanx.seams import Framework, Lanes
from phalanx.seams.records import Part, Vector
from phalanx.shared.counters import Barrier
from phalanx.shared.layout import Plan
from phalanx.shared.state import Shard

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

    def __init__(
        self,
        rendezvous: Rendezvous,
        framework: Framework,
        shard: Shard,
        plan: Plan,
        placement: Placement,
        arena: mmap.mmap,
        barrier: Barrier,
    ) -> None:
        super().__init__(framework, shard, plan, placement, arena, barrier)
        owned = [index for index, owner in enumerate(plan.layout.owners) if owner == barrier.worker]
        self._across = Across(rendezvous, barrier.worker, placement.replicas, self.slots.blanks(), owned)
        carried = shard.buffer_payload if barrier.worker == 0 else []
        # For each replica its pieces, and flags that say which of them changed.
        self._buffer_payload = carried or [[memoryview(bytearray())]] * placement.replicas
        self._block = range(placement.blocks[0].start, placement.blocks[-1].stop)
        self._groups = [
            [position for position, node in enumerate(plan.nodes) if covers(top, node)] for top in self._across.nodes
        ]
        self._order_within = functools.cache(functools.partial(added, placement.replicas, plan.nodes))
        self._masks: list[Mask] = []

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        super().begin(step, shares)
        self._step = step

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        mine = super().all_gather(parts)[self._block.start : self._block.stop]
        due = self._shard.weights if self._step % CHECK_STEPS == 0 else []
        checksum = int(np.array([weights.sum() for weights in due], np.int64).sum())  # modulo 2**64
        notes = [bytes(flags) for *_, flags in self._buffer_payload[self._block.start : self._block.stop]]
        self.parts, self._masks, notes = self._across.tell(self._step, checksum, mine, self._host_masks(), notes)
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
            return list(zip(groups, map(self._order_within, there), strict=True))

        self.there = union(self._masks)
        return self.slots.fold([self._across.total(self._masks, summands)], _alone, weight)

    def _host_masks(self) -> list[Mask]:
        """Which gradients each of this host's sums has: those that the sum of any of its workers has."""
        flags = np.frombuffer(self.publications.read(), np.uint8).reshape(-1, 1 + self.publications.entries)
        there = flags[:, 1:] * (flags[:, :1] > 0)
        return [there[group].max(0).tobytes() for group in self._groups]


class TravellingLanes(Lanes, Protocol):
    """Lanes whose gradients and buffers travel to other processes and back."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer."""
        ...

    @property
    def blanks(self) -> list[Any]:
        """Arrays in host memory, shaped as the parameters' gradients, with any content."""
        ...

    def home(self, vector: Vector) -> Vector:
        """The vector in host memory."""
        ...

    def outward(self, left: Sequence[Any]) -> list[bytes | None]:
        """Buffers that a replica left, as bytes; None for those that it did not write."""
        ...

    def inward(self, pieces: Sequence[bytes | bytearray | None]) -> list[Any]:
        """Such bytes as buffers again, of a replica that was computed elsewhere."""
        ...


class HostLaneLink(LaneLink):
    """Implements ``seams.Link`` between processes with devices of their own. Gradients are summed in host memory.

    Each process adds up its block of replicas on its devices; what remains is exchanged as workers of hosts do it, so
    that every process has the whole sum, and updates all parameters on the devices that own them there.

    Parameters
    ----------
    framework : Framework
    lanes : TravellingLanes
        Its devices.
    rendezvous : Rendezvous
    """

    def __init__(self, framework: Framework, lanes: TravellingLanes, rendezvous: Rendezvous) -> None:
        super().__init__(framework, lanes)
        self._travelling = lanes
        self._entries = len(lanes.blanks)
        replicas = lanes.placement.replicas
        self._across = Across(rendezvous, 0, replicas, lanes.blanks, range(self._entries))
        self._sums: list[Vector | None] = []
        self._masks: list[Mask] = []

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        super().begin(step, shares)
        self._step = step

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        mine = super().all_gather(parts)
        losses = self._framework.arithmetic.read([part.loss for part in mine])
        options, lr = self._framework.told
        mine = [part._replace(loss=loss, options=options, lr=lr) for part, loss in zip(mine, losses, strict=True)]
        self._sums = self.sums()
        masks = [
            bytes(self._entries) if vector is None else bytes(entry is not None for entry in vector)
            for vector in self._sums
        ]
        written = {
            replica: self._travelling.outward(self.buffers[replica][1]) if replica in self.buffers else []
            for replica in sorted(self.hosted)
        }
        count = len(self._travelling.sizes)
        notes = [bytes(piece is not None for piece in pieces) or bytes(count) or NOTHING for pieces in written.values()]
        everybody, self._masks, all_notes = self._across.tell(self._step, 0, mine, masks, notes)
        self._take_buffers(everybody, [note if count else b"" for note in all_notes], written)
        return everybody

    def mean(self, weight: float) -> Vector:
        here = [None if vector is None else self._travelling.home(vector) for vector in self._sums]

        def summands(index: int) -> list[Summands]:
            return [([None if vector is None else vector[index]], ()) for vector in here]

        total = self._travelling.moved(self._across.total(self._masks, summands))
        return total if weight == 1 else self._framework.arithmetic.divide(total, weight)

    def _take_buffers(
        self, parts: Sequence[Part], notes: Sequence[bytes], written: dict[int, list[bytes | None]]
    ) -> None:
        """Receive the buffers of other processes' replicas, beside those of this process."""
        sizes = self._travelling.sizes
        room = {
            replica: [bytearray(size) if flag else None for size, flag in zip(sizes, note, strict=True)]
            for replica, note in enumerate(notes)
        }
        for replica, pieces in written.items():
            room[replica] = [None if piece is None else bytearray(piece) for piece in pieces] or room[replica]
        self._across.spread(
            [[memoryview(piece) for piece in room[replica] if piece is not None] for replica in range(len(parts))]
        )
        for replica, part in enumerate(parts):
            if replica not in written and part.samples:
                self.buffers[replica] = (int(part.samples), self._travelling.inward(room[replica]))


def _alone(there: tuple[int, ...]) -> Sequence[tuple[int, int]]:
    return ()
