"""Audited steps: a replica is computed once more, by another worker, before the step is committed.

What both came to is compared as a checksum over loss, weight, gradient and buffers, so that nothing more than a number
travels. It is there before the workers meet after computing, so that an audit needs no barrier of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from phalanx.definition.batches import BatchShares
from phalanx.definition.data import Share, content
from phalanx.definition.fields import Definition
from phalanx.errors import CorruptionError, Trouble
from phalanx.plan.audit import Audit
from phalanx.plan.shares import share_weights
from phalanx.seams import Part, Steppable
from phalanx.seams.sharing import Vector
from phalanx.shared.counters import Counters
from phalanx.step import begin, compute, weighed


class Ballot(Protocol):
    """Where workers write what they came to, and read what others did."""

    def vote(self, value: int) -> None:
        """Say what this worker came to."""
        ...

    def votes(self) -> Sequence[int]:
        """What each worker came to; complete after a barrier."""
        ...


class WorkerBallot:
    """That of workers that share memory.

    Parameters
    ----------
    counters : Counters
    worker : int
    """

    def __init__(self, counters: Counters, worker: int) -> None:
        self._own = counters.workers[worker]
        self._all = counters.workers

    def vote(self, value: int) -> None:
        """See ``Ballot.vote``."""
        self._own.vote = value

    def votes(self) -> Sequence[int]:
        """See ``Ballot.votes``."""
        return [worker.vote for worker in self._all]


class OwnBallot:
    """That of a worker that has no others."""

    def __init__(self) -> None:
        self._value = 0

    def vote(self, value: int) -> None:
        """See ``Ballot.vote``."""
        self._value = value

    def votes(self) -> Sequence[int]:
        """See ``Ballot.votes``."""
        return [self._value]


class AuditedLink:
    """Implements ``seams.Link`` by another, and audits some of the steps that go through it.

    Parameters
    ----------
    within : Link
        It also has ``begin``, and ``enter`` where workers have others.
    audit : Audit
    framework : Steppable
    definition : Definition
    ballot : Ballot
    worker : int
        This one.
    blocks : sequence of sequence of int
        The replicas of each worker.
    spare : callable
        Sees to it that what is computed next is put where it may be.
    """

    def __init__(
        self,
        within: Any,
        audit: Audit,
        framework: Steppable,
        definition: Definition,
        ballot: Ballot,
        worker: int,
        blocks: Sequence[Sequence[int]],
        spare: Callable[[], None] = lambda: None,
    ) -> None:
        self._within = within
        self._audit = audit
        self._framework = framework
        self._definition = definition
        self._ballot = ballot
        self._worker = worker
        self._blocks = blocks
        self._spare = spare
        self._replica: int | None = None
        self._pushed = 0
        self.hosted: Sequence[int] = within.hosted
        self.begin: Callable[..., None] = within.begin

    @property
    def stops(self) -> bool:
        """Whether a wrong value ends the run."""
        return self._audit.stop

    def enter(self, step: int) -> None:
        """The step that is next."""
        self._within.enter(step)

    def aim(self, step: int, shares: Sequence[Share] | None) -> None:
        """The step that begins has these shares; None: it is not audited, whichever it is."""
        self._replica = None
        if shares is not None and self._audit.due(step):
            ran = [replica for replica, share in enumerate(shares) if len(share.samples)]
            self._step, self._shares = step, shares
            self._replica = self._audit.replica(step, ran)
            self._host = next(worker for worker, block in enumerate(self._blocks) if self._replica in block)
            self._auditor = self._audit.auditor(step, self._host, len(self._blocks))

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        """See ``seams.Link.push``."""
        if replica == self._replica:
            self._pushed = summed(gradient, buffers)
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
            self._ballot.vote(_with(self._pushed, loss, own.weight))
        if self._worker == self._auditor:
            self._spare()
            facts = self._framework, self._definition, self._step, self._shares
            second = vote(*facts, self._replica, self._blocks[self._host])
            if self._worker != self._host:
                self._ballot.vote(second)
        told = self._within.all_gather(parts)
        votes = self._ballot.votes()
        other = second if self._host == self._auditor else votes[self._auditor]
        if votes[self._host] != other:
            if self._worker != self._auditor:
                raise Trouble
            raise self._corrupted({self._host: votes[self._host], self._auditor: other})
        return told

    def mean(self, weight: float) -> Vector:
        """See ``seams.Link.mean``."""
        return self._within.mean(weight)

    def norm(self, gradient: Vector) -> float:
        """See ``seams.Link.norm``."""
        return self._within.norm(gradient)

    def all_true(self, opinion: bool) -> bool:
        """See ``seams.Link.all_true``."""
        return self._within.all_true(opinion)

    def commit(self, step: int, gradient: Vector | None) -> None:
        """See ``seams.Link.commit``."""
        self._within.commit(step, gradient)

    def _corrupted(self, votes: Mapping[int, int]) -> CorruptionError:
        assert self._replica is not None, "nothing else is compared"
        return CorruptionError(
            f"replica {self._replica} of step {self._step} came out as one thing in worker {self._host}, and as "
            f"another when worker {self._auditor} computed it again; the step was not done",
            step=self._step,
            replica=self._replica,
            samples=self._shares[self._replica].samples,
            votes=votes,
            block=self._blocks[self._host],
        )


def vote(
    framework: Steppable,
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
    computed = [compute(computing, step, one, shares[one]) for one in replicas][-1]
    part = weighed(computed.loss, computed.weight, known, len(share.samples), definition.replicas)
    gradient = computed.gradient if part.weight else None
    if gradient is not None and part.weight != 1:
        gradient = framework.arithmetic.scale(gradient, part.weight)
    (loss,) = framework.arithmetic.read([part.loss])
    return _with(summed(gradient, computed.buffers), loss, part.weight)


def summed(gradient: Vector | None, buffers: Sequence[Any]) -> int:
    """A checksum over what a replica left; it changes with any one bit."""
    total = 0
    for entry in [*(gradient or []), *buffers]:
        total = zlib.crc32(b"-" if entry is None else content(entry)[2], total)
    return total


def _with(total: int, loss: float, weight: float) -> int:
    return zlib.crc32(f"{loss!r} {weight!r}".encode(), total)


def revote(
    framework: Steppable, definition: Definition, dealer: BatchShares, step: int, replica: int, block: Sequence[int]
) -> int:
    """What a replica of the next step, a planned one, comes to here; the state stays as it is."""
    try:
        return vote(framework, definition, step, dealer.planned(step), replica, block)
    finally:
        framework.rewind()


def spelled(error: CorruptionError) -> str:
    """What is noted of it."""
    who = "nobody could tell whose value was wrong" if error.worker is None else f"worker {error.worker} was wrong"
    return f"replica {error.replica} was computed twice and came out differently: {who}; the step was done again"
