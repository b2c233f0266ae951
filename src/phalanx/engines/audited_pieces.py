"""The fold of a slice and the update of a parameter, done once more by a worker that does not own the parameter.

For the fold, each worker leaves a slice of its replicas' gradients before they are added to anything; the auditor adds
them up in the fold's order. For the update, the auditor copies the parameter and what the optimizer keeps of it before
anything is written, and updates copies of those with the mean gradient that the owner leaves. All that stays in the
arena, so that others can do the update from it, too.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from phalanx.definition.batches import BatchShares
from phalanx.definition.fields import Definition
from phalanx.engines.auditing import AuditedLink, summed, summed_fold, vote
from phalanx.engines.ballots import Ballot, WorkerBallot, compare
from phalanx.engines.processes.link import ArenaLink
from phalanx.plan.audit import Audit, What
from phalanx.seams import Arithmetic, Framework
from phalanx.seams.sharing import Vector
from phalanx.shared.arena import Plan
from phalanx.shared.audit_room import ELEMENTS, AuditRoom
from phalanx.shared.barrier import Barrier
from phalanx.shared.state import Shard
from phalanx.step import propose


class ArenaPieces:
    """Implements ``auditing.Pieces`` for workers that share an arena.

    Parameters
    ----------
    audit : Audit
    arithmetic : Arithmetic
    shard : Shard
    room : AuditRoom
    ballot : Ballot
    link : ArenaLink
        For a barrier.
    worker : int
    owners : sequence of int
        The worker that owns each parameter.
    """

    def __init__(
        self,
        audit: Audit,
        arithmetic: Arithmetic,
        shard: Shard,
        room: AuditRoom,
        ballot: Ballot,
        link: ArenaLink,
        worker: int,
        owners: Sequence[int],
    ) -> None:
        self._audit = audit
        self._arithmetic = arithmetic
        self._shard = shard
        self._room = room
        self._ballot = ballot
        self._link = link
        self._worker = worker
        self._owners = owners

    def aim(self, step: int) -> None:
        """See ``auditing.Pieces.aim``."""
        self._step = step
        self._piece = self._audit.piece(step, self._room.sizes, ELEMENTS)
        self._owner = self._owners[self._piece.parameter]
        self._auditor = self._audit.auditor(step, self._owner, len(self._ballot.votes(What.FOLD)))
        self._latest: tuple[int, Any] = (-1, None)
        self._second = 0

    def push(self, replica: int, gradient: Vector | None) -> None:
        """See ``auditing.Pieces.push``: what was added to the left neighbour's already is that very entry."""
        entry = None if gradient is None else gradient[self._piece.parameter]
        before, held = self._latest
        if entry is not None and entry is held:
            self._room.leave(before, *self._piece, entry)
            self._room.leave(replica, *self._piece, None)
        else:
            self._room.leave(replica, *self._piece, entry)
            self._latest = replica, entry

    def spare(self) -> None:
        """See ``auditing.Pieces.spare``."""
        self._shard.slots.state.aim(None)

    def folded(self, gradient: Vector, weight: float) -> None:
        """See ``auditing.Pieces.folded``."""
        parameter, start = self._piece
        if self._worker == self._owner:
            entry = gradient[parameter]
            self._ballot.vote(What.FOLD, slice_sum(self._room, parameter, start, entry))
            self._room.leave_mean(parameter, entry)
        if self._worker == self._auditor:
            self._second = summed_fold(self._arithmetic, self._room.left(*self._piece), weight)
            if self._worker != self._owner:
                self._ballot.vote(What.FOLD, self._second)
            self._shard.parts.keep(parameter, self._room)

    def compare_folds(self, norm: float) -> None:
        """See ``auditing.Pieces.compare_folds``."""
        if self._worker == self._auditor:
            self._room.norm = norm
        self._compare(What.FOLD)

    def updated(self) -> None:
        """See ``auditing.Pieces.updated``: where it is rehearsed, at the price of a barrier."""
        if not self._shard.parts.rehearses:
            return
        parameter = self._piece.parameter
        if self._worker == self._owner:
            self._ballot.vote(What.UPDATE, summed(self._shard.parts.now(parameter)))
        if self._worker == self._auditor:
            self._second = summed(self._shard.parts.after(parameter, self._room))
            if self._worker != self._owner:
                self._ballot.vote(What.UPDATE, self._second)
        self._link.all_true(True)
        self._compare(What.UPDATE)

    def _compare(self, what: What) -> None:
        who = self._owner, self._auditor
        compare(self._ballot, what, self._worker, who, self._second, step=self._step, piece=self._piece)


def audited_link(
    within: ArenaLink,
    audit: Audit,
    framework: Framework,
    definition: Definition,
    shard: Shard,
    plan: Plan,
    arena: mmap.mmap,
    barrier: Barrier,
) -> AuditedLink:
    """The link of a worker that is audited, and audits others."""
    worker, ballot = barrier.worker, WorkerBallot(barrier.counters, barrier.worker)
    facts = shard, plan.audit_room(arena), ballot, within, worker, plan.layout.owners
    return AuditedLink(
        within,
        audit,
        framework,
        definition,
        ballot,
        worker=worker,
        blocks=within.blocks,
        pieces=ArenaPieces(audit, framework.arithmetic, *facts),
    )


def slice_sum(room: AuditRoom, parameter: int, start: int, entry: Any) -> int:
    """A checksum over a slice of a gradient; None: there is none."""
    return summed([None if entry is None else room.cut(parameter, start, entry)])


def revote(
    framework: Framework,
    definition: Definition,
    dealer: BatchShares,
    link: Any,
    shard: Shard,
    room: AuditRoom | None,
    step: int,
    **question: Any,
) -> int:
    """What a part of the next step comes to here; an update, from what its auditor has left in ``room``.

    ``question``: what, and the replica with the block of its host, or the piece; and the batch, if one was brought.
    """
    what, batch = question["what"], question["batch"]
    if what == What.UPDATE:
        assert room is not None, "only workers that are audited are asked"
        return summed(shard.parts.after(question["piece"][0], room))
    shares = dealer.planned(step) if batch is None else dealer.brought(batch)
    try:
        if what == What.GRADIENT:
            return vote(framework, definition, step, shares, question["replica"], question["block"])
        link.begin(step, shares)
        proposal = propose(framework, link, definition, step, shares)
        parameter, start = question["piece"]
        entry = proposal.gradient[parameter]
        return summed([None if entry is None else shard.parts.cut(entry, start, start + ELEMENTS)])
    finally:
        framework.rewind()
