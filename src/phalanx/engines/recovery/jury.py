"""Who was wrong where an audit found a wrong value among workers, and what becomes of that worker."""

from __future__ import annotations

from typing import Any

from phalanx.definition.fields import Definition
from phalanx.engines.auditing import spelled
from phalanx.engines.processes.messages import CORRUPT, SUSPECT
from phalanx.engines.processes.pool import WorkerPool
from phalanx.engines.recovery.failures import FailureLog
from phalanx.engines.verdict import MOST, Court, Open, decided, endless, question_of
from phalanx.errors import CorruptionError
from phalanx.plan.audit import Audit, What, wrong


class Jury:
    """Judges what an audit found.

    Parameters
    ----------
    audit : Audit
    definition : Definition
    failures : FailureLog
    pool : WorkerPool
    open_court : callable
        Starts workers that go on from the state that the caller's framework has.
    """

    def __init__(
        self, audit: Audit, definition: Definition, failures: FailureLog, pool: WorkerPool, open_court: Open
    ) -> None:
        self._audit = audit
        self._definition = definition
        self._failures = failures
        self._pool = pool
        self._open = open_court
        self._found: list[int] = []  # steps in which something was wrong

    def judge(self, court: Court, error: CorruptionError, batch: Any) -> None:
        """Note who was wrong, and end that worker, so that another takes its place; the step is to be done again.

        All workers compute a replica again, and the most votes tell; an update those that are there when both workers
        that came to something else were replaced. Where votes are even, and of folds, a fresh process decides, which
        has the state from before the step.

        Parameters
        ----------
        court : Court
        error : CorruptionError
        batch : Any
            That the caller brought for the step; None for planned ones.

        Raises
        ------
        CorruptionError
            ``error`` itself, where that is to end the run.
        RunError
            It does not stop.
        """
        assert error.step is not None, "an audit is of a step"
        blamed = self._blamed(court, error, batch)
        error.worker = blamed[0] if blamed else None
        self._failures.note("corruption", -1 if error.worker is None else error.worker, error.step, spelled(error))
        self._found.append(error.step)
        if self._audit.stop:
            raise error
        if self._found.count(error.step) >= MOST:
            raise endless(error) from error
        for worker in blamed if error.what != What.UPDATE else ():
            self._pool.dismiss(worker, CORRUPT)

    def _blamed(self, court: Court, error: CorruptionError, batch: Any) -> list[int]:
        """The workers that were wrong; none where nobody can tell."""
        if error.what == What.UPDATE:  # earlier steps are done again now, and by neither of the two
            for worker in error.votes:
                self._pool.dismiss(max(worker, 0), SUSPECT)
        votes = court.ask("vote", question_of(error, batch)) if error.what != What.FOLD else []
        if wrong(error.votes, dict(enumerate(votes))) is None:
            court.fetch()
        return decided(error, dict(enumerate(votes)), self._open, self._definition, court.run_state, batch)
