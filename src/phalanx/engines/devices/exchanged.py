"""Sums between workers that each have a device: counters say how far they are, and an exchange adds gradients up.

Losses, weights, which gradients there are, and buffers go by the board, as between other workers. Gradients go from
device to device, and every worker updates everything.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.definition.data import Share
from phalanx.engines.devices.buckets import in_buckets
from phalanx.engines.devices.early import Early, sums_with
from phalanx.engines.devices.spread import Spread
from phalanx.engines.devices.transport import Transport
from phalanx.engines.flat import Flat, Homes
from phalanx.engines.processes.board import CHECK_STEPS, Shared, Station
from phalanx.frameworks.torch.accelerators import watched
from phalanx.frameworks.torch.arithmetic import copy_all
from phalanx.plan.fold import Fold
from phalanx.plan.levels import levels
from phalanx.plan.shares import share_weights
from phalanx.seams.records import Part, Vector, losses_of, with_losses
from phalanx.shared.state import CopiedShard
from phalanx.step import first_ran

KINDS = 8  # of steps, by the sizes of shares, whose gradients are remembered
MISTAKES = 3  # steps in which others came than were foreseen, until gradients are sent when all are there
MISTAKEN = b"\2"  # in place of 1: there is a gradient, and what was sent of it early is not right


class Exchanged:
    """Implements ``engines.link.Sums``.

    Parameters
    ----------
    station : Station
    board : Shared
    device : str
        The name of this worker's.
    blocks : sequence of range
        The replicas of each worker that has a device, on all hosts.
    rank : int
        This one's position there.
    connect : callable
        ``connect(generation, check)`` meets the others; ``check`` raises if one of them is gone.
    hosts : int
        On how many these workers are; equally many on each, one after another.
    """

    def __init__(
        self,
        station: Station,
        board: Shared,
        device: str,
        blocks: Sequence[range],
        rank: int,
        connect: Callable[[int, Callable[[], None]], Transport],
        hosts: int = 1,
    ) -> None:
        assert isinstance(station.shard, CopiedShard), "its worker has the whole state"
        self._station, self._board, self._shard = station, board, station.shard
        self._framework, self._hosted = station.framework, station.hosted
        self._replicas, contents = station.placement.replicas, station.plan.layout.contents
        among = levels(self._replicas, blocks, rank, (1,) if hosts == 1 else (hosts, 1))
        self._flat = Flat(contents.gradients, self._replicas, among, in_buckets, device)
        self._watched = functools.partial(watched, [torch.device(device)])
        self._spread = Spread(contents.buffers, blocks, rank, device)
        self._connect = connect
        self._transport: Transport | None = None
        self._generation = -1
        self._weights = 0  # their checksum, in steps in which workers compare it
        self._early: Early | None = None
        self._pending: list[tuple[int, Vector | None]] = []  # from the last replica on, if gradients are sent early
        # Of the last two steps with shares of the same sizes: which gradients there were, and which this worker's last
        # replica had.
        self._seen: dict[tuple[int, ...], list[tuple[list[bytes], set[int]]]] = {}
        self._mistaken = 0  # steps in which others came than were foreseen

    def begin(self, step: int, shares: Sequence[Share], *, early: bool) -> None:
        self._due = step % CHECK_STEPS == 0 and self._station.placement.workers > 1
        if self._due:
            self._weights = self._shard.checksum(self._framework, step)
        ran = [replica for replica in self._hosted if len(shares[replica].samples)]
        self._last = ran[-1] if ran else -1
        self._sizes = tuple([len(share.samples) for share in shares])
        self._weight = share_weights(self._sizes)[self._last]  # unless the loss returns one
        self._foresee(early)
        self._begin_fold()
        self._pushed(self._hosted[0] - 1)

    def _begin_fold(self) -> None:
        self._sums: Fold[Vector] = Fold(self._replicas, self._framework.arithmetic.add)

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        if self._early is not None and replica >= self._last >= 0:
            self._framework.sharing.listen(None)
            self._pending.append((replica, gradient))
            if replica == self._last and gradient is not None:
                self._early.compare(gradient)
        else:
            self._sums.push(replica, gradient)
            self._pushed(replica)
        if replica == self._last:
            self._has = {index for index, entry in enumerate(gradient or ()) if entry is not None}
        if samples:
            self._shard.leave(replica, buffers)
        else:
            self._shard.mine.pop(replica, None)

    def close(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Weights decide what is added up. Losses stay on the device until the norm is there."""
        if self._early is not None:
            if self._last < 0:
                sums = [partial.value for partial in self._sums.partials()]
                self._early.expect([([] if value is None else [value], False) for value in sums])
            right = self._last < 0 or parts[self._last - self._hosted[0]].weight == self._weight
            with self._watched():
                self._early.flush(right=right)
        self._computed = parts
        self._publish()
        return with_losses(parts, itertools.repeat(0.0))

    def mean(self, weight: float, parts: Sequence[Part]) -> Vector:
        def over(mean: Any) -> Any:
            return mean if weight == 1 else self._framework.arithmetic.divide([mean], weight)[0]

        with self._watched():
            transport, masks = self._joined(), self._board.masks()
            self._masks_of_step = [mask.replace(MISTAKEN, b"\1") for mask in masks]
            mean = self._sent_early(masks, over)
            if mean is None:
                carriers, behind = transport.levels, transport.beside is not None
                mean = self._flat.total(carriers, self._masks_of_step, self._fill, over, behind=behind)
            losses = losses_of(_named_alike(self._computed, first_ran(parts)))
            changed, mine = self._shard.changed(), self._shard.mine
            self._shard.came, self._losses = self._spread.total(transport, changed, mine, losses)
        self._left = self._station.left(parts)
        return mean

    def norm(self, gradient: Vector, parts: list[Part]) -> tuple[float, list[Part]]:
        begun = self._framework.norm(gradient, self._losses, self._left)
        waiter = None if self._transport is None else self._transport.waiter
        with self._watched():
            norm, *losses = begun() if waiter is None else begun(waiter)
        if self._due:
            checksum = float(zlib.crc32(f"{norm} {self._weights}".encode()))
            self._board.compare(checksum, "gradients or weights differ (these are checksums)")
        else:
            self._board.compare(norm, "norms of the gradient differ")
        self._board.note(norm)
        return norm, with_losses(_named_alike(parts, first_ran(parts)), losses)

    def commit(self, step: int, gradient: Vector | None, parts: Sequence[Part]) -> None:
        # The first worker has written the step's report when it comes here. Survivors that have updated are not taken
        # back, so none may update before.
        self._board.updating(together=True)
        if gradient is not None:
            self._framework.update(step, gradient, self._left)
        if averages := self._framework.sharing.averages:
            averages.step(step)
        self._board.updated()
        # Now that nobody does this step again all workers note the same.
        if len(self._seen) < KINDS or self._sizes in self._seen:
            self._seen[self._sizes] = [*self._seen.get(self._sizes, [])[-1:], (self._masks_of_step, self._has)]

    def leave(self) -> None:
        if self._transport is not None and self._transport.beside is not None:
            self._transport.close()
            self._transport = None

    def _fill(self, indices: Sequence[int], homes: Homes) -> None:
        """Put this worker's sums where they are sent from."""
        copy_all(
            (home, vector[index])
            for index in indices
            for home, vector in zip(homes(index), self._mine, strict=True)
            if vector is not None and vector[index] is not None
        )

    def _foresee(self, early: bool) -> None:
        """Prepare to send gradients early, if the last two such steps had the same ones; all workers decide alike."""
        if self._early is not None:
            self._framework.sharing.listen(None)
        self._early, self._pending, self._has = None, [], set()
        if self._board.generation != self._generation:  # a new worker knows nothing of the steps before
            self._seen, self._mistaken = {}, 0
        seen = self._seen.get(self._sizes, [])
        if early and len(seen) == 2 and seen[0][0] == seen[1][0] and self._mistaken < MISTAKES:
            self._early = Early(self._flat, self._joined(), *seen[-1], self._weight)

    def _pushed(self, replica: int) -> None:
        """Listen to the gradients of the next replica if it is the last."""
        if self._early is not None and 0 <= self._last == replica + 1:
            after = [later for later in self._hosted if later > self._last]
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

    def _publish(self) -> None:
        """Say which gradients this worker's sums have, or that others came than were foreseen."""
        right = self._early is not None and self._early.right
        self._mine = [] if right else self._folded()
        rows = (
            self._early.there
            if self._early and right
            else [None if vector is None else bytes(entry is not None for entry in vector) for vector in self._mine]
        )
        if self._early and not right:
            rows = [row and row.replace(b"\1", MISTAKEN) for row in rows]
        publications = self._board.publications
        for number, (position, row) in enumerate(zip(publications.own, rows, strict=True)):
            publications.publish(position, None if row is None else number, row or b"")

    def _joined(self) -> Transport:
        """The connection to the other workers; made anew after any of them failed."""
        generation = self._board.generation
        if self._transport is None or generation != self._generation:
            if self._transport is not None:
                self._transport.close()
            self._transport, self._generation = self._connect(generation, self._station.check), generation
        return self._transport


def _named_alike(parts: Sequence[Part], first: Part) -> list[Part]:
    """The same parts, with the names of the losses of the first that had some, where a replica had no samples."""
    absent = dict.fromkeys(first.named or (), (0.0, 0.0))
    return [part if part.named else part._replace(named=absent) for part in parts]
