"""The link between workers that each have a device: counters say how far they are, and an exchange adds gradients up.

Losses, weights, which gradients there are, and buffers go through the arena, as between other workers. Gradients go
from device to device, and every worker updates everything.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.definition.data import Share
from phalanx.engines.hosts.exchange import CHECK_STEPS, Rendezvous
from phalanx.engines.hosts.link import HostLink
from phalanx.engines.hosts.ranks import Exchange, Spread, Transport, connected, reached
from phalanx.engines.processes.link import ArenaLink
from phalanx.errors import RunError, Trouble
from phalanx.plan.fold import Fold
from phalanx.plan.lifecycle import Phase
from phalanx.seams import Framework
from phalanx.seams.records import Part, Vector
from phalanx.shared.counters import LEAVE
from phalanx.shared.memory import Memory
from phalanx.shared.state import CopiedShard


class RankLink(ArenaLink):
    """Implements ``seams.Link``.

    Parameters
    ----------
    device : str
        The name of this worker's.
    meeting : Memory
        Where the workers find each other.
    seconds : float
        How long to wait for another worker.
    framework, shard, plan, placement, arena, barrier
        As of ``ArenaLink``.
    """

    def __init__(
        self,
        device: str,
        meeting: Memory,
        seconds: float,
        *facts: Any,
    ) -> None:
        super().__init__(*facts)
        connect = functools.partial(connected, meeting.fd, self._worker, len(self.blocks), device, seconds)
        self._exchange_among(self.blocks, self._worker, device, connect)

    def _exchange_among(
        self, blocks: Sequence[range], rank: int, device: str, connect: Callable[..., Transport]
    ) -> None:
        assert isinstance(self._shard, CopiedShard), "its worker has the whole state"
        self._copies, contents = self._shard, self.slots.contents
        self._exchange = Exchange(contents.gradients, self._replicas, blocks, rank, device)
        self._spread = Spread(contents.buffers, blocks, rank, device)
        self._connect = connect
        self._transport: Transport | None = None
        self._generation = -1
        self.average: Callable[[int], None] | None = None  # called with the number of each update that was done

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        self._due = step % CHECK_STEPS == 0
        if self._due:
            weights = self._framework.export(step, copy=False, digest=False).params
            self._weights = self._framework.arithmetic.checksum(list(weights.values()))
        super().begin(step, shares)

    def _begin_fold(self) -> None:
        self._sums: Fold[Vector] = Fold(self._replicas, self._framework.arithmetic.add)

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        self._sums.push(replica, gradient)
        if samples:
            self._shard.leave(replica, buffers)
        self._count(self._done + 1)
        self._check(LEAVE)

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        """Waits for the device: the numbers of all replicas decide what is added up."""
        return super().all_gather(_read(self._framework, parts))

    def mean(self, weight: float) -> Vector:
        over = functools.partial(_divided, self._framework, weight)
        with self._exchange.watched():
            transport = self._joined()
            mean = self._exchange.total(transport, self._present(), self._mine, over)
            self._copies.came = self._spread.total(transport, self._copies.changed(), self._copies.mine)
        return mean

    def norm(self, gradient: Vector) -> float:
        if self._transport is not None:
            self._transport.settle()
        norm = self._framework.norm(gradient)
        told = float(zlib.crc32(f"{norm} {self._weights}".encode())) if self._due else norm
        self._counters.sums[self._worker] = told
        self._meet()
        came = list(map(repr, self._counters.sums.tolist()))
        if len(set(came)) > 1:
            what = "gradients or weights differ (these are checksums)" if self._due else "norms of the gradient differ"
            raise RunError(
                f"the workers' {what}: {', '.join(f'worker {worker}: {each}' for worker, each in enumerate(came))}; a "
                "device computes or copies wrongly, or its memory changed; nothing was updated. Go on without that "
                "device, from the newest snapshot up to which phalanx verify finds the same"
            )
        return norm

    def commit(self, step: int, gradient: Vector | None) -> None:
        # The first worker has written the step's report when it comes here. Survivors that have updated are not taken
        # back, so none may update before.
        self._barrier.wait()
        self._barrier.at(Phase.UPDATING)
        if gradient is not None:
            ran = [replica for replica, part in enumerate(self.parts) if part.samples]
            buffers = [(int(self.parts[replica].samples), self._shard.left(replica)) for replica in ran]
            self._framework.update(step, gradient, buffers)
        if self.average is not None:
            self.average(step)
        self._barrier.at(Phase.UPDATED)
        self._barrier.wait()

    def _publish(self) -> list[Vector | None]:
        """Say which gradients this worker's sums have; returns the sums."""
        mine = [partial.value for partial in self._sums.partials()]
        positions = [at for at, (worker, _) in enumerate(self.publications.publishers) if worker == self._worker]
        for number, (position, vector) in enumerate(zip(positions, mine, strict=True)):
            there = b"" if vector is None else bytes(entry is not None for entry in vector)
            self.publications.publish(position, None if vector is None else number, there)
        return mine

    def _present(self) -> list[bytes]:
        """Which gradients each node of all workers has."""
        entries = bytes(self.publications.entries)
        rows = self.publications.rows(self.publications.read())
        return [mask if number else entries for number, mask in rows]

    def _joined(self) -> Transport:
        """The connection to the other workers; made anew after any of them failed."""
        generation = self._counters.generation
        if self._transport is None or generation != self._generation:
            if self._transport is not None:
                self._transport.close()
            self._transport, self._generation = self._connect(generation, self._check), generation
        return self._transport

    def _check(self, pause: int = -1) -> None:
        """Leave the step if another worker failed, or if the caller wants that and nothing is under way."""
        if self._counters.trouble or self._counters.pause == pause:
            raise Trouble


class HostRankLink(RankLink, HostLink):
    """Implements ``seams.Link`` for the one worker with a device of each process in a torch.distributed world.

    Parameters
    ----------
    rendezvous : Rendezvous
        Where the other processes are.
    device : str
        The name of this worker's.
    framework, shard, plan, placement, arena, barrier
        As of ``ArenaLink``.
    """

    def __init__(self, rendezvous: Rendezvous, device: str, *facts: Any) -> None:
        HostLink.__init__(self, rendezvous, *facts)
        connect = functools.partial(reached, rendezvous, device, rendezvous.seconds)
        self._exchange_among(rendezvous.blocks, rendezvous.rank, device, connect)

    def _present(self) -> list[bytes]:
        return self._masks


def _read(framework: Framework, parts: Sequence[Part]) -> list[Part]:
    """The same parts with numbers for losses; one copy from the device."""
    named = [part.named or {} for part in parts]
    losses = [part.loss for part in parts] + [value for each in named for value, _ in each.values()]
    numbers = iter(framework.arithmetic.read(losses))
    parts = [part._replace(loss=next(numbers)) for part in parts]
    return [
        part._replace(named={name: (next(numbers), weight) for name, (_, weight) in each.items()}) if each else part
        for part, each in zip(parts, named, strict=True)
    ]


def _divided(framework: Framework, weight: float, mean: Any) -> Any:
    return mean if weight == 1 else framework.arithmetic.divide([mean], weight)[0]
