"""What workers that share an arena tell each other: parts, which partial sums there are, and how far each one is."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.errors import RunError, Trouble
from phalanx.plan.fold import Placement
from phalanx.plan.lifecycle import Stage
from phalanx.seams import Framework
from phalanx.seams.records import Part
from phalanx.shared.counters import LEAVE, Barrier
from phalanx.shared.layout import ArenaPlan
from phalanx.shared.posts import Posts
from phalanx.shared.state import Shard

CHECK_STEPS = 100  # how often workers and hosts that have the same weights compare checksums of them


@dataclass(frozen=True)
class Station:
    """Where one of several workers stands.

    Attributes
    ----------
    framework : Framework
    shard : Shard
        Its part of the state.
    plan : ArenaPlan
    placement : Placement
    arena : mmap.mmap
    barrier : Barrier
        Where it waits for the others of this host.
    """

    framework: Framework
    shard: Shard
    plan: ArenaPlan
    placement: Placement
    arena: mmap.mmap
    barrier: Barrier

    @property
    def worker(self) -> int:
        """Its number on this host."""
        return self.barrier.worker

    @property
    def hosted(self) -> range:
        """The replicas computed here."""
        return self.placement.blocks[self.worker]

    def check(self) -> None:
        """Leave the step if another worker failed."""
        if self.barrier.counters.trouble:
            raise Trouble

    def blanks(self) -> list[Any]:
        """An array shaped as each parameter's gradient, in memory of its own that is never touched."""
        specs = self.plan.layout.contents.gradients
        arrays = self.framework.sharing.arrays
        return [arrays.view(mmap.mmap(-1, max(1, spec.nbytes)), 0, spec) for spec in specs]

    def left(self, parts: Sequence[Part]) -> list[tuple[int, list[Any]]]:
        """The samples of each replica that has any, and what it left in buffers; ``parts``: those of all R."""
        return [(int(part.samples), self.shard.left(replica)) for replica, part in enumerate(parts) if part.samples]


class Publications:
    """Flags that say which partial sums are published: a row for each sum, written by the worker that has it.

    Parameters
    ----------
    flags : memoryview
        For each sum, which of its worker's vectors it is (counted from 1; 0: there is none), and one flag per entry.
    publishers : sequence of int
        Which worker has each of them.
    worker : int
        This one.

    Attributes
    ----------
    own : list of int
        The positions of its sums.
    """

    def __init__(self, flags: memoryview, publishers: Sequence[int], worker: int) -> None:
        self.publishers = publishers
        self.own = [position for position, publisher in enumerate(publishers) if publisher == worker]
        self._flags = flags
        self._width = len(flags) // len(publishers)
        self.entries = self._width - 1

    def publish(self, position: int, number: int | None, there: bytes) -> None:
        """The sum at ``position`` is its worker's ``number``-th vector, with the entries that are ``there``."""
        start = position * self._width
        self._flags[start] = 0 if number is None else number + 1
        if number is not None:
            self._flags[start + 1 : start + self._width] = there

    def read(self) -> bytes:
        """The flags as they are."""
        return bytes(self._flags)

    def rows(self, flags: bytes) -> list[tuple[int, bytes]]:
        """Of flags that were read: the number of each sum's vector, from 1 (0: none), and which entries are there."""
        starts = range(0, len(flags), self._width)
        return [(flags[start], flags[start + 1 : start + self._width]) for start in starts]


class Shared:
    """Implements ``engines.link.Board`` in the arena.

    Parameters
    ----------
    station : Station
    posts : Posts

    Attributes
    ----------
    publications : Publications
    """

    def __init__(self, station: Station, posts: Posts) -> None:
        self.publications = Publications(station.plan.flags(station.arena), station.plan.publishers, station.worker)
        self._station, self._framework = station, station.framework
        self._barrier, self._counters = station.barrier, station.barrier.counters
        self._own = self._counters.workers[station.worker]
        self._first = station.hosted.start
        self._posts = posts
        # Whoever has a device leaves at the next replica if another worker fails; others at the next barrier.
        self._hasty = station.placement.copies
        self._done = 0

    def begin(self) -> None:
        self._own.replicas = self._done = 0
        self._barrier.at(Stage.COMPUTING)

    def pushed(self) -> None:
        self._own.replicas = self._done = self._done + 1
        self._own.total += 1
        if self._counters.pause == LEAVE or (self._hasty and self._counters.trouble):
            raise Trouble

    def share(self, said: Sequence[bytes]) -> list[bytes]:
        # A replacement joins a grant at the barrier that the dead worker had not reached (`Barrier.begin`). From here
        # on the others have passed one that it would wait at, so nobody may join any more: hence the stage.
        self._posts.put(self._station.worker, said)
        self._barrier.at(Stage.COMPUTED)
        self._barrier.wait()
        self._own.replicas = self._done = 0
        blocks = self._station.placement.blocks
        return [text for worker, block in enumerate(blocks) for text in self._posts.read(worker, len(block))]

    def gather(self, parts: Sequence[Part]) -> list[Part]:
        self._counters.parts.write(self._first, parts, self._framework.options_checksum)
        self._barrier.at(Stage.COMPUTED)
        self._barrier.wait()
        self._barrier.at(Stage.FOLDING)
        return [Part._make(row) for row in self._counters.parts.read()]

    def masks(self) -> list[bytes]:
        """Which gradients each sum of all workers has."""
        entries = bytes(self.publications.entries)
        rows = self.publications.rows(self.publications.read())
        return [mask if number else entries for number, mask in rows]

    def meet(self) -> None:
        """Wait for the others once the mean, or this worker's part of it, is there."""
        self._barrier.at(Stage.FOLDED)
        self._barrier.wait()

    def all_true(self, opinion: bool) -> bool:
        self._own.opinion = opinion
        self._barrier.wait()
        return all(worker.opinion for worker in self._counters.workers)

    def compare(self, value: float, what: str) -> None:
        """``meet``, and see that all workers have the same value.

        Raises
        ------
        RunError
            They have not; ``what`` names it.
        """
        self._counters.sums[self._station.worker] = value
        self.meet()
        came = list(map(repr, self._counters.sums.tolist()))
        if len(set(came)) > 1:
            raise RunError(
                f"the workers' {what}: {', '.join(f'worker {worker}: {each}' for worker, each in enumerate(came))}; a "
                "device computes or copies wrongly, or its memory changed; nothing was updated. Go on without that "
                "device, from the newest snapshot up to which phalanx verify finds the same"
            )

    def note(self, norm: float) -> None:
        """Tell other hosts, if there are some, the norm of this step with the next one."""

    def updating(self, *, together: bool = False) -> None:
        """The update begins; ``together``: once all workers are here."""
        if together:
            self._barrier.wait()
        self._barrier.at(Stage.UPDATING)

    def updated(self) -> None:
        """Wait until all workers have updated."""
        self._barrier.at(Stage.UPDATED)
        self._barrier.wait()

    @property
    def generation(self) -> int:
        """How often workers have been replaced; connections of an earlier one are closed."""
        return self._counters.generation
