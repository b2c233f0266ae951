"""The link between workers that each have a device: counters say how far they are, and an exchange adds gradients up.

Losses, weights, which gradients there are, and buffers go through the arena, as between other workers. Gradients go
from device to device, and every worker updates everything.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.definition.data import Share
from phalanx.engines.hosts.early import Early, sums_with
from phalanx.engines.hosts.exchange import CHECK_STEPS, Rendezvous
from phalanx.engines.hosts.link import HostLink
from phalanx.engines.hosts.ranks import Exchange, Spread, levels
from phalanx.engines.hosts.transport import Transport, connected, reached
from phalanx.engines.processes.link import ArenaLink
from phalanx.errors import RunError
from phalanx.plan import share_weights
from phalanx.plan.fold import Fold
from phalanx.plan.lifecycle import Stage
from phalanx.seams.records import Part, Vector, losses_of, with_losses
from phalanx.shared.counters import LEAVE
from phalanx.shared.memory import Memory
from phalanx.shared.state import CopiedShard

KINDS = 8  # of steps, by the sizes of shares, whose gradients are remembered
MISTAKES = 3  # steps in which others came than were foreseen, until gradients are sent when all are there
MISTAKEN = b"\2"  # in place of 1: there is a gradient, and what was sent of it early is not right


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
        self, blocks: Sequence[range], rank: int, device: str, connect: Callable[..., Transport], hosts: int = 1
    ) -> None:
        assert isinstance(self._shard, CopiedShard), "its worker has the whole state"
        self._copies, contents = self._shard, self.slots.contents
        among = levels(self._replicas, blocks, rank, hosts)
        self._exchange = Exchange(contents.gradients, self._replicas, among, device)
        self._spread = Spread(contents.buffers, blocks, rank, device)
        self._connect = connect
        self._transport: Transport | None = None
        self._generation = -1
        self.average: Callable[[int], None] | None = None  # called with the number of each update that was done
        self._early: Early | None = None
        self._pending: list[tuple[int, Vector | None]] = []  # from the last replica on, if gradients are sent early
        # Of the last two steps with shares of the same sizes: which gradients there were, and which this worker's last
        # replica had.
        self._seen: dict[tuple[int, ...], list[tuple[list[bytes], set[int]]]] = {}
        self._mistaken = 0  # steps in which others came than were foreseen

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        self._due = step % CHECK_STEPS == 0
        if self._due:
            weights = self._framework.export(step, copy=False, digest=False).params
            self._weights = self._framework.arithmetic.checksum([*weights.values(), *self._copies.local.starts])
        ran = [replica for replica in self.hosted if len(shares[replica].samples)]
        self._last = ran[-1] if ran else -1
        self._sizes = tuple([len(share.samples) for share in shares])
        self._weight = share_weights(self._sizes)[self._last]  # unless the loss returns one
        self._foresee()
        super().begin(step, shares)
        self._pushed(self.hosted[0] - 1)

    def _begin_fold(self) -> None:
        self._sums: Fold[Vector] = Fold(self._replicas, self._framework.arithmetic.add)

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        if self._early is not None and replica >= self._last >= 0:
            self._framework.sharing.listen(None)
            self._pending.append((replica, gradient))
        else:
            self._sums.push(replica, gradient)
            self._pushed(replica)
        if replica == self._last:
            self._has = {index for index, entry in enumerate(gradient or ()) if entry is not None}
        if samples:
            self._shard.leave(replica, buffers)
        else:
            self._copies.mine.pop(replica, None)
        self._count(self._done + 1)
        self._check(LEAVE)

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        """Weights decide what is added up. Losses stay on the device until the norm is there."""
        if self._early is not None:
            if self._last < 0:
                sums = [partial.value for partial in self._sums.partials()]
                self._early.expect([([] if value is None else [value], False) for value in sums])
            right = self._last < 0 or parts[self._last - self.hosted[0]].weight == self._weight
            with self._exchange.watched():
                self._early.flush(right=right)
        self._computed = parts
        return super().all_gather(with_losses(parts, itertools.repeat(0.0)))

    def mean(self, weight: float) -> Vector:
        def over(mean: Any) -> Any:
            return mean if weight == 1 else self._framework.arithmetic.divide([mean], weight)[0]

        with self._exchange.watched():
            transport, masks = self._joined(), self._present()
            self._masks_of_step = [mask.replace(MISTAKEN, b"\1") for mask in masks]
            mean = self._sent_early(masks, over)
            if mean is None:
                mean = self._exchange.total(transport, self._masks_of_step, self._mine, over)
            losses = losses_of(_named_alike(self._computed, self.parts[0]))
            changed, mine = self._copies.changed(), self._copies.mine
            self._copies.came, self._losses = self._spread.total(transport, changed, mine, losses)
        return mean

    def norm(self, gradient: Vector, parts: list[Part]) -> tuple[float, list[Part]]:
        begun = self._framework.norm(gradient, self._losses, self._left())
        waiter = None if self._transport is None else self._transport.waiter
        with self._exchange.watched():
            norm, *losses = begun() if waiter is None else begun(waiter)
        self._compare(norm)
        return norm, with_losses(_named_alike(parts, parts[0]), losses)

    def _compare(self, norm: float) -> None:
        """Meet the other workers, and see that all have the same gradient."""
        published = float(zlib.crc32(f"{norm} {self._weights}".encode())) if self._due else norm
        self._counters.sums[self._worker] = published
        self._meet()
        came = list(map(repr, self._counters.sums.tolist()))
        if len(set(came)) > 1:
            what = "gradients or weights differ (these are checksums)" if self._due else "norms of the gradient differ"
            raise RunError(
                f"the workers' {what}: {', '.join(f'worker {worker}: {each}' for worker, each in enumerate(came))}; a "
                "device computes or copies wrongly, or its memory changed; nothing was updated. Go on without that "
                "device, from the newest snapshot up to which phalanx verify finds the same"
            )

    def commit(self, step: int, gradient: Vector | None) -> None:
        # The first worker has written the step's report when it comes here. Survivors that have updated are not taken
        # back, so none may update before.
        self._barrier.wait()
        self._barrier.at(Stage.UPDATING)
        if gradient is not None:
            self._framework.update(step, gradient, self._left())
        if self.average is not None:
            self.average(step)
        self._barrier.at(Stage.UPDATED)
        self._barrier.wait()
        # Now that nobody does this step again all workers note the same.
        if len(self._seen) < KINDS or self._sizes in self._seen:
            self._seen[self._sizes] = [*self._seen.get(self._sizes, [])[-1:], (self._masks_of_step, self._has)]

    def _foresee(self) -> None:
        """Prepare to send gradients early, if the last two such steps had the same ones; all workers decide alike."""
        if self._early is not None:
            self._framework.sharing.listen(None)
        self._early, self._pending, self._has = None, [], set()
        if self._counters.generation != self._generation:  # a new worker knows nothing of the steps before
            self._seen, self._mistaken = {}, 0
        seen = self._seen.get(self._sizes, [])
        if self.overlaps and len(seen) == 2 and seen[0][0] == seen[1][0] and self._mistaken < MISTAKES:
            self._early = Early(self._exchange, self._joined(), *seen[-1], self._weight)

    def _pushed(self, replica: int) -> None:
        """Listen to the gradients of the next replica if it is the last."""
        if self._early is not None and 0 <= self._last == replica + 1:
            after = [later for later in self.hosted if later > self._last]
            self._early.expect(sums_with(self._replicas, self._sums.partials(), self._last, after))
            self._framework.sharing.listen(self._early.arrived)

    def _sent_early(self, masks: Sequence[bytes], over: Callable[[Any], Any]) -> Vector | None:
        """The mean of what was sent early; None if nothing was, or it was not what there is."""
        early, self._early = self._early, None
        if early is None:
            return None
        early.finish()
        if early.masks == masks:
            self._pending = []  # what was sent is not held any longer
            self._begin_fold()
            return early.total(over)
        self._mistaken += 1
        self._mine = self._mine or self._folded()
        return None

    def _folded(self) -> list[Vector | None]:
        """Add what was kept back; returns this worker's sums, of all its replicas."""
        pending, self._pending = self._pending, []
        for replica, gradient in pending:
            self._sums.push(replica, gradient)
        return [partial.value for partial in self._sums.partials()]

    def _publish(self) -> list[Vector | None]:
        """Say which gradients this worker's sums have, or that others came than were foreseen; returns the sums."""
        right = self._early is not None and self._early.right
        mine = [] if right else self._folded()
        rows = (
            self._early.there
            if self._early and right
            else [None if vector is None else bytes(entry is not None for entry in vector) for vector in mine]
        )
        if self._early and not right:
            rows = [row and row.replace(b"\1", MISTAKEN) for row in rows]
        for number, (position, row) in enumerate(zip(self.publications.own, rows, strict=True)):
            self.publications.publish(position, None if row is None else number, row or b"")
        return mine

    def _present(self) -> list[bytes]:
        """Which gradients each node of all workers has."""
        entries = bytes(self.publications.entries)
        rows = self.publications.rows(self.publications.read())
        return [mask if number else entries for number, mask in rows]

    def leave(self) -> None:
        if self._transport is not None and self._transport.beside is not None:
            self._transport.close()
            self._transport = None

    def _joined(self) -> Transport:
        """The connection to the other workers; made anew after any of them failed."""
        generation = self._counters.generation
        if self._transport is None or generation != self._generation:
            if self._transport is not None:
                self._transport.close()
            self._transport, self._generation = self._connect(generation, self._check), generation
        return self._transport


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
        connect = functools.partial(reached, rendezvous, device)
        self._exchange_among(rendezvous.blocks, rendezvous.rank, device, connect, rendezvous.hosts)

    def norm(self, gradient: Vector, parts: list[Part]) -> tuple[float, list[Part]]:
        norm, parts = RankLink.norm(self, gradient, parts)
        self._note(norm)
        return norm, parts

    def _checksum(self) -> int:
        return self._weights  # computed on the device, of which one number for each tensor was read

    def _present(self) -> list[bytes]:
        return self._masks


def _named_alike(parts: Sequence[Part], first: Part) -> list[Part]:
    """The same parts, with the names of the first replica's losses where a replica had no samples."""
    absent = dict.fromkeys(first.named or (), (0.0, 0.0))
    return [part if part.named else part._replace(named=absent) for part in parts]
