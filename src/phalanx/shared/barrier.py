"""The barriers of a step, as a worker comes to them: plain words that all read, without a lock that could be left."""

from __future__ import annotations

import os
import time

from phalanx.errors import Trouble
from phalanx.plan.lifecycle import Phase
from phalanx.shared.counters import Counters, WorkerCounters
from phalanx.shared.ordering import order

ROUNDS = 32  # bits for the barriers within a grant
SPIN_SECONDS = 0.0002
NAP_SECONDS, LONGEST_NAP_SECONDS = 0.00002, 0.0005


class Barrier:
    """Where a worker waits for the others: about 2 us if all come at once.

    Parameters
    ----------
    counters : Counters
    worker : int
        This one.

    Attributes
    ----------
    step : int
        The one that the worker is in.
    """

    def __init__(self, counters: Counters, worker: int) -> None:
        self.counters = counters
        self.worker = worker
        self.step = 0
        self._own = counters.workers[worker]
        self._others = [other for other in counters.workers if other is not self._own]
        self._round = 0
        self._since = 0.0

    def begin(self, grant: int) -> None:
        """A new grant: earlier arrivals no longer count."""
        self._round = max(self._own.arrived, grant << ROUNDS)  # a replacement goes on where the other ended
        self._since = time.perf_counter()

    def enter(self, step: int) -> None:
        """Be at the beginning of a step."""
        self.step = step
        self.at(Phase.SAVING)

    def at(self, phase: Phase) -> None:
        """Be so far in the step."""
        self._own.reach(self.step, phase)

    def wait(self, part: int) -> None:
        """Wait until all workers are here. ``part``: what of a step (COMPUTE, FOLD, UPDATE) ends with coming here.

        Raises
        ------
        Trouble
            A worker failed before it came here. One that came and failed later makes the next barrier raise, and not
            this one: the others may have gone on from it already, and all have to agree on how far they came.
        """
        arrived = time.perf_counter()
        self._round = mine = self._round + 1
        order()  # who sees that this worker came sees what it wrote before
        self._own.arrived = mine
        for other in self._others:
            if other.arrived < mine:
                self._wait_for(other, mine)
        order()  # what the others wrote before they came is read after this
        now = time.perf_counter()
        self._own.spend(part, arrived - self._since, now - arrived)
        self._since = now

    def _wait_for(self, other: WorkerCounters, mine: int) -> None:
        """Spin for a moment, as the other is about to come; then sleep, so that it gets the processor."""
        counters, nap = self.counters, NAP_SECONDS
        patience = time.perf_counter() + SPIN_SECONDS
        while other.arrived < mine:
            if counters.trouble:
                order()  # a worker that fails after it came has written that it came before it wrote that it failed
                if other.arrived >= mine:
                    return
                raise Trouble
            if time.perf_counter() < patience:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP_SECONDS)
