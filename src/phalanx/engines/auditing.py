"""Audited steps: what a worker does of them is computed once more, by another worker, before the step is committed.

In each audited step a replica is computed again; and, where workers share an arena, a slice of the fold is added up
again, and one parameter updated again (``audited_pieces``). What two workers came to is compared as a checksum, so that
nothing more than a number travels. Those of replicas and folds are there before barriers that workers come to anyway.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from phalanx.definition.data import Share, content
from phalanx.definition.fields import Definition
from phalanx.engines.ballots import Ballot, compare
from phalanx.errors import CorruptionError
from phalanx.plan.audit import Audit, What
from phalanx.plan.fold import fold_values
from phalanx.plan.shares import share_weights
from phalanx.seams import Arithmetic, Framework, Part
from phalanx.seams.sharing import Vector
from phalanx.step import begin, compute, weighed


class Pieces(Protocol):
    """What else is audited of a step; see ``audited_pieces``."""

    def aim(self, step: int) -> None:
        """The step is audited."""
        ...

    def push(self, replica: int, gradient: Vector | None) -> None:
        """A replica's gradient, before it is added to others."""
        ...

    def spare(self) -> None:
        """See to it that what is computed next is put where it may be."""
        ...

    def folded(self, gradient: Vector, weight: float) -> None:
        """The mean gradient, as far as this worker owns it."""
        ...

    def compare_folds(self, norm: float) -> None:
        """All have folded; ``norm``: of the whole mean gradient."""
        ...

    def updated(self) -> None:
        """What this worker owns is updated; returns when all have come so far."""
        ...


class AuditedLink:
    """Implements ``seams.Link`` by another, and audits some of the steps that go through it.

    Parameters
    ----------
    within : Link
        It also has ``begin``, and ``enter`` where workers have others.
    audit : Audit
    framework : Framework
    definition : Definition
    ballot : Ballot
    worker : int
        This one.
    blocks : sequence of sequence of int
        The replicas of each worker.
    pieces : Pieces, optional
    """

    def __init__(
        self,
        within: Any,
        audit: Audit,
        framework: Framework,
        definition: Definition,
        ballot: Ballot,
        *,
        worker: int,
        blocks: Sequence[Sequence[int]],
        pieces: Pieces | None = None,
    ) -> None:
        self._within = within
        self._audit = audit
        self._framework = framework
        self._definition = definition
        self._ballot = ballot
        self._worker = worker
        self._blocks = blocks
        self._every = pieces
        self._pieces: Pieces | None = None  # of this step
        self._replica: int | None = None
        self._pushed = 0
        self.hosted: Sequence[int] = within.hosted
        self.begin: Callable[..., None] = within.begin

    @property
    def stops(self) -> bool:
        """Whether a wrong value ends the run."""
        return self._audit.stop

    def aim(self, step: int, shares: Sequence[Share] | None) -> None:
        """The step that begins has these shares; None: it is not audited, whichever it is."""
        self._replica = self._pieces = None
        if shares is not None and self._audit.due(step):
            ran = [replica for replica, share in enumerate(shares) if len(share.samples)]
            self._step, self._shares = step, shares
            self._replica = self._audit.replica(step, ran)
            self._host = next(worker for worker, block in enumerate(self._blocks) if self._replica in block)
            self._auditor = self._audit.auditor(step, self._host, len(self._blocks))
            self._pieces = self._every
            if self._pieces is not None:
                self._pieces.aim(step)

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        """See ``seams.Link.push``."""
        if replica == self._replica:
            self._pushed = summed(gradient, buffers)
        if self._pieces is not None:
            self._pieces.push(replica, gradient)
        self._within.push(replica, samples, gradient, buffers)

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        """See ``seams.Link.all_gather``.

        Raises
        ------
        CorruptionError
            Host and auditor came to something else; the auditor says so, and all others leave the step.
        """
        if self._replica is None:
            return self._within.all_gather(parts)
        second = 0
        if self._worker == self._host:
            own = dict(zip(self.hosted, parts, strict=True))[self._replica]
            (loss,) = self._framework.arithmetic.read([own.loss])
            self._ballot.vote(What.GRADIENT, _with(self._pushed, loss, own.weight))
        if self._worker == self._auditor:
            if self._pieces is not None:
                self._pieces.spare()
            facts = self._framework, self._definition, self._step, self._shares
            second = vote(*facts, self._replica, self._blocks[self._host])
            if self._worker != self._host:
                self._ballot.vote(What.GRADIENT, second)
        told = self._within.all_gather(parts)
        compare(
            self._ballot,
            What.GRADIENT,
            self._worker,
            (self._host, self._auditor),
            second,
            step=self._step,
            replica=self._replica,
            samples=self._shares[self._replica].samples,
            block=self._blocks[self._host],
        )
        return told

    def mean(self, weight: float) -> Vector:
        """See ``seams.Link.mean``."""
        gradient = self._within.mean(weight)
        if self._pieces is not None:
            self._pieces.folded(gradient, weight)
        return gradient

    def norm(self, gradient: Vector) -> float:
        """See ``seams.Link.norm``."""
        norm = self._within.norm(gradient)
        if self._pieces is not None:
            self._pieces.compare_folds(norm)
        return norm

    def all_true(self, opinion: bool) -> bool:
        """See ``seams.Link.all_true``."""
        return self._within.all_true(opinion)

    def commit(self, step: int, gradient: Vector | None) -> None:
        """See ``seams.Link.commit``."""
        if self._pieces is None or gradient is None:
            self._within.commit(step, gradient)
        else:
            self._within.commit(step, gradient, self._pieces.updated)


def vote(
    framework: Framework,
    definition: Definition,
    step: int,
    shares: Sequence[Share],
    replica: int,
    block: Sequence[int],
) -> int:
    """What a replica comes to when it is computed once more here, as a worker that hosts ``block`` does it.

    A framework may add an odd replica's gradient to the one before while it is computed.
    """
    share = shares[replica]
    known = share_weights([len(one.samples) for one in shares])[replica]
    pair = replica % 2 and replica - 1 in block and len(shares[replica - 1].samples)
    replicas = [replica - 1, replica] if pair else [replica]
    computing = begin(framework, definition, step, replicas, shares)
    computed = [compute(computing, definition.rounds.at(step), one, shares[one]) for one in replicas][-1]
    part = weighed(computed.loss, computed.weight, known, len(share.samples), definition.replicas)
    gradient = computed.gradient if part.weight else None
    if gradient is not None and part.weight != 1:
        gradient = framework.arithmetic.scale(gradient, part.weight)
    (loss,) = framework.arithmetic.read([part.loss])
    return _with(summed(gradient, computed.buffers), loss, part.weight)


def summed(gradient: Iterable[Any] | None, buffers: Sequence[Any] = ()) -> int:
    """A checksum over what a replica left; it changes with any one bit."""
    total = 0
    for entry in [*(gradient or []), *buffers]:
        total = zlib.crc32(b"-" if entry is None else content(entry)[2], total)
    return total


def summed_fold(arithmetic: Arithmetic, slices: Sequence[Any], weight: float) -> int:
    """A checksum over a slice of the mean gradient, folded here from those of all replicas."""
    total = fold_values([None if one is None else [one] for one in slices], arithmetic.add)
    if total is not None and weight != 1:
        total = arithmetic.divide(total, weight)
    return summed(total or [None])


def _with(total: int, loss: float, weight: float) -> int:
    return zlib.crc32(f"{loss!r} {weight!r}".encode(), total)


def spelled(error: CorruptionError) -> str:
    """What is noted of it."""
    who = "nobody could tell whose value was wrong" if error.worker is None else f"worker {error.worker} was wrong"
    what: Mapping[What, str] = {
        What.GRADIENT: f"replica {error.replica} was computed",
        What.FOLD: f"a slice of parameter {error.piece[0]} was folded",
        What.UPDATE: f"parameter {error.piece[0]} was updated",
    }
    return f"{what[What(error.what)]} twice and came out differently: {who}; the step was done again"
