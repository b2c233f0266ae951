"""How workers compare what two of them came to: numbers that each writes where all others can read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from phalanx.errors import CorruptionError, Trouble
from phalanx.plan.audit import What
from phalanx.shared.counters import Counters

TOLD = {What.GRADIENT: "replica {}", What.FOLD: "a slice of the fold of {}", What.UPDATE: "the update of {}"}


class Ballot(Protocol):
    """Where workers write what they came to, and read what others did."""

    def vote(self, what: What, value: int) -> None:
        """Say what this worker came to."""
        ...

    def votes(self, what: What) -> Sequence[int]:
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

    def vote(self, what: What, value: int) -> None:
        """See ``Ballot.vote``."""
        self._own.votes[what] = value

    def votes(self, what: What) -> Sequence[int]:
        """See ``Ballot.votes``."""
        return [int(worker.votes[what]) for worker in self._all]


class OwnBallot:
    """That of a worker that has no others."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(What, 0)

    def vote(self, what: What, value: int) -> None:
        """See ``Ballot.vote``."""
        self._values[what] = value

    def votes(self, what: What) -> Sequence[int]:
        """See ``Ballot.votes``."""
        return [self._values[what]]


def compare(ballot: Ballot, what: What, worker: int, who: tuple[int, int], second: int, **where: Any) -> None:
    """Compare what two workers, ``who``, came to; where one of them did it twice, ``second`` is its other value.

    Raises
    ------
    CorruptionError
        In the one that did it again, if they differ.
    Trouble
        In all others.
    """
    host, auditor = who
    votes = ballot.votes(what)
    other = second if host == auditor else votes[auditor]
    if votes[host] == other:
        return
    if worker != auditor:
        raise Trouble
    named = TOLD[what].format(where["replica"] if what is What.GRADIENT else f"parameter {where['piece'][0]}")
    raise CorruptionError(
        f"{named} of step {where['step']} came out as one thing in worker {host}, and as another when worker {auditor} "
        "computed it again; the step was not done",
        votes={host: votes[host], (-1 if host == auditor else auditor): other},
        what=what,
        **where,
    )
