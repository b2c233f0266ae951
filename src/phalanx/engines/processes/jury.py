"""Who was wrong where an audit found a wrong value among workers, and what becomes of that worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.definition.batches import BatchShares
from phalanx.definition.fields import Definition
from phalanx.engines.auditing import revote, spelled
from phalanx.engines.processes.pool import WorkerPool
from phalanx.engines.recovery.failures import FailureLog
from phalanx.errors import CorruptionError, RunError
from phalanx.plan.audit import Audit, wrong
from phalanx.seams import Framework

MOST = 5  # wrong values in one step that end the run


class Jury:
    """Judges what an audit found.

    Parameters
    ----------
    audit : Audit
    definition : Definition
    framework : Framework
        The caller's own, which votes where the workers' votes are even.
    failures : FailureLog
    pool : WorkerPool
    """

    def __init__(
        self, audit: Audit, definition: Definition, framework: Framework, failures: FailureLog, pool: WorkerPool
    ) -> None:
        self._audit = audit
        self._definition = definition
        self._framework = framework
        self._failures = failures
        self._pool = pool
        self._found: list[int] = []  # steps in which something was wrong

    def judge(self, error: CorruptionError, again: Sequence[int], fetch: Callable[[], None]) -> None:
        """Note who was wrong, and end that worker, so that another takes its place; the step is to be done again.

        Parameters
        ----------
        error : CorruptionError
        again : sequence of int
            What each worker comes to now.
        fetch : callable
            Takes the state home into the caller's framework.

        Raises
        ------
        CorruptionError
            ``error`` itself, where that is to end the run.
        RunError
            It does not stop.
        """
        assert error.step is not None, "an audit is of a step"
        votes = dict(enumerate(again))
        blamed = wrong(error.votes, votes)
        if blamed is None:
            fetch()
            dealer = BatchShares(self._definition, self._framework.opened)
            with self._framework.environment:
                replica = error.replica or 0
                outsider = revote(self._framework, self._definition, dealer, error.step, replica, error.block)
            blamed = wrong(error.votes, votes, outsider)
        error.worker = blamed[0] if blamed else None
        self._failures.note("corruption", -1 if error.worker is None else error.worker, error.step, spelled(error))
        self._found.append(error.step)
        if self._audit.stop:
            raise error
        if self._found.count(error.step) >= MOST:
            raise RunError(
                f"audits of step {error.step} found wrong values {MOST} times in a row; test this machine's memory and "
                "processors, or, if the model does not compute the same twice, see what phalanx check says",
                step=error.step,
            ) from error
        for worker in blamed or ():
            self._pool.dismiss(worker)
