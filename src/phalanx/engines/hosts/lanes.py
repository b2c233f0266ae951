"""The link between processes that each drive devices of their own: sums of gradients go through host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from phalanx.definition.data import Share
from phalanx.engines.hosts.rendezvous import Across, Rendezvous
from phalanx.engines.hosts.slices import Mask
from phalanx.engines.links import LaneLink
from phalanx.seams import Framework, Lanes
from phalanx.seams.records import Part, Vector

NOTHING = b"\0"  # a note of a replica without buffers


class TravellingLanes(Lanes, Protocol):
    """Lanes whose gradients and buffers other processes take part in."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer."""
        ...

    @property
    def blanks(self) -> list[Any]:
        """In host memory, an array as each parameter's gradient is, with any content."""
        ...

    def home(self, vector: Vector) -> Vector:
        """A vector in host memory."""
        ...

    def outward(self, left: Sequence[Any]) -> list[bytes | None]:
        """Buffers that a replica left, as bytes; None for those that it did not write."""
        ...

    def inward(self, pieces: Sequence[bytes | bytearray | None]) -> list[Any]:
        """The same as buffers again, of a replica that was computed elsewhere."""
        ...


class HostLaneLink:
    """Implements ``seams.Link``; holds the link over this process's devices.

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
        self._within = LaneLink(framework, lanes)
        self.hosted = self._within.hosted
        self._framework = framework
        self._lanes = lanes
        self._entries = len(lanes.blanks)
        replicas = lanes.placement.replicas
        self._across = Across(rendezvous, 0, replicas, lanes.blanks, range(self._entries))
        self._sums: list[Vector | None] = []
        self._masks: list[Mask] = []

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        """See ``seams.Link.begin``."""
        self._step = step
        self._within.begin(step, shares)

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        """See ``seams.Link.push``."""
        self._within.push(replica, samples, gradient, buffers)

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        """See ``seams.Link.all_gather``."""
        mine = self._within.all_gather(parts)
        losses = self._framework.arithmetic.read([part.loss for part in mine])
        options, lr = self._framework.told
        mine = [part._replace(loss=loss, options=options, lr=lr) for part, loss in zip(mine, losses, strict=True)]
        self._sums = self._within.sums()
        masks = [
            bytes(self._entries) if vector is None else bytes(entry is not None for entry in vector)
            for vector in self._sums
        ]
        written = {
            replica: self._lanes.outward(self._within.buffers[replica][1]) if replica in self._within.buffers else []
            for replica in sorted(self.hosted)
        }
        count = len(self._lanes.sizes)
        notes = [bytes(piece is not None for piece in found) or bytes(count) or NOTHING for found in written.values()]
        everybody, self._masks, told = self._across.tell(self._step, 0, mine, masks, notes)()
        self._take_buffers(everybody, [note if count else b"" for note in told], written)
        return everybody

    def mean(self, weight: float) -> Vector:
        """See ``seams.Link.mean``."""
        sums = self._across.sums
        sums.begin(self._masks)
        here = [None if vector is None else self._lanes.home(vector) for vector in self._sums]
        while (index := sums.due) is not None:
            sums.give([[None if vector is None else vector[index]] for vector in here], [()] * len(here))
        total = self._lanes.moved(sums.finish())
        return total if weight == 1 else self._framework.arithmetic.divide(total, weight)

    def norm(self, gradient: Vector) -> float:
        """See ``seams.Link.norm``: each process has the sum over all, and takes its norm by itself."""
        return self._within.norm(gradient)

    def all_true(self, opinion: bool) -> bool:
        """See ``seams.Link.all_true``: each process has the sum over all, and comes to the same opinion."""
        return opinion

    def commit(self, step: int, gradient: Vector | None) -> None:
        """See ``seams.Link.commit``."""
        self._within.commit(step, gradient)

    def _take_buffers(
        self, parts: Sequence[Part], notes: Sequence[bytes], written: dict[int, list[bytes | None]]
    ) -> None:
        """Have the buffers that replicas of other processes left, beside those of this one's."""
        sizes = self._lanes.sizes
        room = {
            replica: [bytearray(size) if flag else None for size, flag in zip(sizes, note, strict=True)]
            for replica, note in enumerate(notes)
        }
        for replica, found in written.items():
            room[replica] = [None if piece is None else bytearray(piece) for piece in found] or room[replica]
        self._across.spread(
            [[memoryview(piece) for piece in room[replica] if piece is not None] for replica in range(len(parts))]
        )
        for replica, part in enumerate(parts):
            if replica not in written and part.samples:
                self._within.buffers[replica] = (int(part.samples), self._lanes.inward(room[replica]))
