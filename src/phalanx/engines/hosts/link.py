"""The link between workers of one host in a run of several: its workers meet as always, then each meets the others'.

What differs is what "all" means: losses and weights of all R replicas, and the sum of all hosts' gradients. From there
on every host does the same, so that nothing else has to be told.

Communication overlaps computing: sums are sent before hosts have told each other which gradients there are, and where
each worker has one replica, and links are what takes long, those of the last layers while others are still being
computed. Each host takes it that there are the same gradients as in the last two steps, and weights of 1; where that
turns out to be wrong, all send again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from phalanx.definition.data import Share
from phalanx.engines.hosts.rendezvous import CHECK_STEPS, Across, Rendezvous
from phalanx.engines.hosts.slices import LEAST, Mask
from phalanx.engines.processes.link import ArenaLink, union
from phalanx.errors import Trouble, UsageError
from phalanx.plan.fold import Placement, added
from phalanx.seams.records import Part, Vector
from phalanx.shared.counters import BATCH, Barrier
from phalanx.shared.layout import Plan
from phalanx.shared.memory import order
from phalanx.shared.state import Shard

STEPS, IDLE, SHARE = 4, 4.0, 0.05  # to wait before judging; clock over processor time, and over the steps' time


class Patience:
    """With sums that are sent when all was computed; lost where waiting for them is idle, as links are slow.

    Where it is the processor that takes long (links as fast as memory, more workers than cores), sending while others
    compute slows these down by more than it saves.

    Attributes
    ----------
    lost : bool
        Whether to send as early as possible from now on.
    """

    def __init__(self) -> None:
        self.lost = False
        self._steps = 0
        self._total = self._waited = self._busy = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def wait(self) -> None:
        """All hosts have computed it; from here on it is waited for what they send."""
        self._since = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """It is there."""
        now = time.perf_counter()
        self._total += now - self._began
        self._waited += now - self._since[0]
        self._busy += time.process_time() - self._since[1]
        self._steps += 1
        if self._steps >= STEPS and self._waited > max(IDLE * self._busy, SHARE * self._total):
            self.lost = True


class HostLink:
    """Implements ``seams.Link``.

    Parameters
    ----------
    rendezvous : phalanx.engines.hosts.rendezvous.Rendezvous
        Where the other hosts are.
    within : ArenaLink
        The link between the workers of this host.
    shard : Shard
    plan : Plan
    placement : Placement
    barrier : Barrier
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        within: ArenaLink,
        shard: Shard,
        plan: Plan,
        placement: Placement,
        barrier: Barrier,
    ) -> None:
        self.hosted = within.hosted
        self._within = within
        self._publications = within.publications
        self._slots = within.slots
        self._worker = barrier.worker
        self._counters = barrier.counters
        blanks = self._slots.blanks()
        owned = [index for index, owner in enumerate(plan.layout.owners) if owner == self._worker]
        self._across = Across(rendezvous, self._worker, placement.replicas, blanks, owned)
        self._sums = self._across.sums
        carried = shard.buffer_payload if self._worker == 0 else []
        # Of each replica the pieces, and which of them changed.
        self._buffer_payload = carried or [[memoryview(bytearray())]] * placement.replicas
        self._block = range(placement.blocks[0].start, placement.blocks[-1].stop)
        self._groups = [
            [position for position, node in enumerate(plan.nodes) if _first(node) in _covered(whole)]
            for whole in self._across.nodes
        ]
        self._order = functools.cache(functools.partial(added, placement.replicas, plan.nodes))
        self._shard = shard
        self._last: list[Mask] = []  # which gradients there were in the last even step
        self._usual: list[Mask] | None = None  # which there will be in the next, as far as that can be told in advance
        self._ahead: list[Mask] | None = None  # the same, if this step's sums are sent on the strength of it
        self._position = plan.publishers.index((self._worker, 0))
        self._listening = False
        self._patience = Patience()
        self._early: list[Vector] = []  # partial sums as they come, of all workers, where each has one replica
        if self._slots.state.direct and all(len(block) == 1 for block in placement.blocks):
            self._slots.state.watch(self._arrived)
            self._early = [self._slots.peer(worker, 0) for worker, _ in plan.publishers]

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        """See ``seams.Link.begin``."""
        self._within.begin(step, shares)
        self._patience.begin()
        self._step, self._even = step, len({len(share.samples) for share in shares}) == 1
        self._ahead = self._usual if self._even else None
        self._once, self._fresh = True, 0
        if self._sums.under_way and self._counters.kind == BATCH:
            raise UsageError(
                f"step {self._step} was left in the middle when some of its sums had been sent to other hosts; it can "
                "be done as planned only: go on with the run before you bring a batch, or start again from a snapshot"
            )
        if self._ahead is not None:
            if not self._sums.under_way:  # else it was left in the middle: what was sent is what it comes to again
                self._sums.begin(self._ahead)
            if self._early:
                self._early[self._position] = [None] * self._publications.entries
                self._listening = True

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        """See ``seams.Link.push``."""
        with self._unmarked():
            self._within.push(replica, samples, gradient, buffers)

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        """See ``seams.Link.all_gather``."""
        self._listening = False
        if self._early:
            self._early[self._position] = []  # of gradients that were told, the memory is not needed any more
        self._counters.workers[self._worker].opinion = self._once
        with self._unmarked():
            mine = self._within.all_gather(parts)[self._block.start : self._block.stop]
        once = all(worker.opinion for worker in self._counters.workers)
        due = self._shard.weights if self._step % CHECK_STEPS == 0 else []
        checksum = int(np.array([weights.sum() for weights in due], np.int64).sum())  # modulo 2**64
        notes = [bytes([once, *flags]) for *_, flags in self._buffer_payload[self._block.start : self._block.stop]]
        told = self._across.tell(self._step, checksum, mine, self._host_masks(), notes)
        if self._ahead is not None:
            self._give(self._within.vectors)
        everybody, self._masks, notes = told()
        self._patience.wait()
        self._within.parts = everybody
        for (*_, flags), note in zip(self._buffer_payload, notes, strict=True):
            flags[:] = note[1:]
        changed = [list(itertools.compress(pieces, flags)) for *pieces, flags in self._buffer_payload]
        self._across.spread(changed)
        self._judge(all(note[0] for note in notes))
        return everybody

    def mean(self, weight: float) -> Vector:
        """See ``seams.Link.mean``."""
        if self._ahead is None:
            self._sums.begin(self._masks)
            self._give(self._within.vectors)
        self._within.there = union(self._masks)
        total = self._sums.finish()
        if self._ahead is not None and not self._patience.lost:
            self._patience.end()
        return self._slots.fold([total], _alone, weight)

    def norm(self, gradient: Vector) -> float:
        """See ``seams.Link.norm``: each host has the sum over all, and takes its norm by itself."""
        return self._within.norm(gradient)

    def all_true(self, opinion: bool) -> bool:
        """See ``seams.Link.all_true``: each host has the sum over all, and comes to the same opinion."""
        return self._within.all_true(opinion)

    def commit(self, step: int, gradient: Vector | None) -> None:
        """See ``seams.Link.commit``."""
        if self._early:  # all have read the flags, and nobody is to take them for those of the next step
            self._publications.clear(self._position)
        self._within.commit(step, gradient)

    @contextlib.contextmanager
    def _unmarked(self) -> Iterator[None]:
        """Who leaves a step unmarks its gradients: it is done again, and nobody is to take them for those of then."""
        try:
            yield
        except Trouble:
            self._publications.clear(self._position)
            raise

    def _judge(self, once: bool) -> None:
        """Whether what was sent ahead stands, and what to take for granted in the next step; the same on all hosts."""
        plain = once and all(part.weight == 1 for part in self._within.parts)
        if self._ahead != self._masks or not plain:
            self._ahead = None
        if self._even:
            self._usual = self._masks if plain and self._masks == self._last else None
            self._last = self._masks

    def _arrived(self, index: int, gradient: Any) -> None:
        """A gradient is there, while others are still being computed; told twice, it was not what it seemed to be."""
        if self._listening:
            mine = self._early[self._position]
            self._once = self._once and mine[index] is None
            mine[index] = gradient
            order()
            self._publications.mark(self._position, index)
            self._fresh += gradient.nbytes
            if self._fresh >= LEAST and self._patience.lost:
                self._fresh = 0
                self._give(self._early, self._everywhere)

    def _everywhere(self, index: int) -> bool:
        """Whether all workers of this host have this gradient."""
        there = self._publications.everywhere(index)
        order()
        return there

    def _give(self, vectors: Sequence[Vector | None], ready: Callable[[int], bool] | None = None) -> None:
        """Give what is due of these partial sums, as far as it is ready."""
        while (index := self._sums.due) is not None and (ready is None or ready(index)):
            entries = [None if vector is None else vector[index] for vector in vectors]
            there = [entry is not None for entry in entries]
            groups = [[entry if at in group else None for at, entry in enumerate(entries)] for group in self._groups]
            orders = [self._order(tuple(at for at in group if there[at])) for group in self._groups]
            self._sums.give(groups, orders)

    def _host_masks(self) -> list[bytes]:
        """Which gradients each of this host's sums has: those that any of its workers' has."""
        flags = np.frombuffer(self._publications.read(), np.uint8).reshape(-1, 1 + self._publications.entries)
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
