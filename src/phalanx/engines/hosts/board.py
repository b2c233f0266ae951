"""What workers of several hosts tell each other: a host's workers meet as always, then each meets its counterparts.

Only the meaning of "all" differs: losses and weights of all R replicas, and the sum of all hosts' gradients. From there
on every host does the same, so nothing else has to be exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from phalanx.engines.flat import Mask
from phalanx.engines.hosts.across import UNKNOWN, Across
from phalanx.engines.hosts.gloo import Gloo, Rendezvous
from phalanx.engines.processes.board import CHECK_STEPS, Shared, Station
from phalanx.plan.fold import covers, remaining
from phalanx.seams.records import Part
from phalanx.shared.posts import Posts


class Network(Shared):
    """Implements ``engines.link.Board`` between workers of one host that have counterparts on others.

    Parameters
    ----------
    station : Station
    posts : Posts
    rendezvous : Rendezvous
    gloo : Gloo
        The connection to them.

    Attributes
    ----------
    groups : list of list of int
        Which sums of this host's workers are added up to each of the host's.
    """

    def __init__(self, station: Station, posts: Posts, rendezvous: Rendezvous, gloo: Gloo) -> None:
        super().__init__(station, posts)
        placement = station.placement
        self._across = Across(rendezvous, gloo, placement.replicas, self.publications.entries)
        carried = station.shard.buffer_payload if station.worker == 0 else []
        # For each replica its pieces, and flags that say which of them changed.
        self._buffer_payload = carried or [[memoryview(bytearray())]] * placement.replicas
        self._block = range(placement.blocks[0].start, placement.blocks[-1].stop)
        tops = remaining(placement.replicas, rendezvous.blocks[rendezvous.rank])
        self.groups = [[at for at, node in enumerate(station.plan.nodes) if covers(top, node)] for top in tops]
        self._masks: list[Mask] = []
        self._checksum = 0
        self._norm = -1, UNKNOWN  # a step, and its gradient's norm here

    def begin(self) -> None:
        step = self._barrier.step
        self._checksum = self._station.shard.checksum(self._framework, step) if step % CHECK_STEPS == 0 else 0
        super().begin()

    def share(self, said: Sequence[bytes]) -> list[bytes]:
        """One worker of each host tells the others what this host says, and posts here what they said."""
        here, beyond = super().share(said), len(self._station.placement.blocks)
        if self._station.worker == 0:
            self._posts.put(beyond, self._across.exchange(here))
        self._barrier.wait()
        return self._posts.read(beyond, self._station.placement.replicas)

    def gather(self, parts: Sequence[Part]) -> list[Part]:
        mine = super().gather(parts)[self._block.start : self._block.stop]
        step = self._barrier.step
        norm = self._norm[1] if self._norm[0] == step - 1 else UNKNOWN
        notes = [bytes(flags) for *_, flags in self._buffer_payload[self._block.start : self._block.stop]]
        told = self._across.tell((step, self._checksum, norm), mine, self._host_masks(), notes)
        parts_of_all, self._masks, notes = told
        for (*_, flags), note in zip(self._buffer_payload, notes, strict=True):
            flags[:] = note
        self._across.spread([list(itertools.compress(pieces, flags)) for *pieces, flags in self._buffer_payload])
        return parts_of_all

    def masks(self) -> list[Mask]:
        return self._masks

    def note(self, norm: float) -> None:
        self._norm = self._barrier.step, bits_of(norm)

    def _host_masks(self) -> list[Mask]:
        """Which gradients each of this host's sums has: those that the sum of any of its workers has."""
        flags = np.frombuffer(self.publications.read(), np.uint8).reshape(-1, 1 + self.publications.entries)
        there = flags[:, 1:] * (flags[:, :1] > 0)
        return [there[group].max(0).tobytes() for group in self.groups]


def bits_of(norm: float) -> int:
    """A number for the bits of a norm, which is never ``UNKNOWN``; all that are no numbers are one."""
    return 1 + int(np.float64(norm if norm == norm else np.inf).view(np.int64))
