"""The control block of an arena: counters that processes read and write without locks, one writer each.

Workers go from step to step by themselves: the parent grants a number of steps, or one task, and may grant again only
when every worker is idle. Between, the first worker alone decides, before the last barrier of a step, whether there is
a next one; so all of them agree. Whoever fails raises the trouble flag and goes idle; the others leave at their next
barrier.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final

from phalanx.errors import Trouble
from phalanx.plan.lifecycle import Phase, Progress

LINE: Final = 8  # words in a cache line: writers do not share one
GRANT, KIND, UNTIL, PAUSE, ASLEEP, AWAITED, EAGER, HOLD = range(8)  # written by the parent
AGREED, DONE, SNAPSHOT_DUE, SNAPSHOT_STEP = (
    LINE,
    LINE + 1,
    LINE + 2,
    LINE + 3,
)  # by the first worker, or by the parent while it is not
TROUBLE = 2 * LINE  # by anyone, only ever set; cleared by the parent
WORKERS = 3 * LINE
ARRIVED, IDLE, SLEEPING, PLACE, OPINION, COUNT, TOTAL, CHECKSUM = range(8)  # by each worker, in a line of its own

STEPS, BATCH, TASK = 1, 2, 3  # kinds of grants
LEAVE = 2  # as PAUSE: leave also a step that is being computed, between two replicas; 1: begin no other
COMPUTE, WAIT, FOLD, UPDATE = 0, 1, 2, 3  # phases of a step, timed
PHASES: Final = ("compute", "wait", "fold", "update")
POINTS: Final = len(Phase)

RING: Final = 1024  # reports that the parent may be behind
REPORT: Final = 6  # loss, norm, lr, samples, started, ended
ROW: Final = 4  # loss, weight, returned, samples

ROUNDS = 32  # bits for the meetings within a grant
SPIN_SECONDS = 0.0002
NAP_SECONDS, LONGEST_NAP_SECONDS = 0.00002, 0.0005
ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


def word_count(workers: int) -> int:
    """Words that a control block takes."""
    return WORKERS + workers * LINE


def float_count(workers: int, replicas: int) -> int:
    """Floats that rows, reports, times and beginnings take."""
    return ROW * replicas + REPORT * RING + len(PHASES) * workers + workers


class Control:
    """One process's view of the control block.

    Parameters
    ----------
    words, floats : memoryview
        int64 and float64 views, as long as ``word_count`` and ``float_count`` say.
    workers, replicas : int
    """

    def __init__(self, words: memoryview, floats: memoryview[float], workers: int, replicas: int) -> None:
        self.words = words
        self.workers = workers
        self.rows = floats[: ROW * replicas]
        self.reports = Reports(words, floats[ROW * replicas : ROW * replicas + REPORT * RING])
        self.times = floats[ROW * replicas + REPORT * RING : -workers]
        self.began = floats[-workers:]  # when each worker came to what it does now, on the clock of time.monotonic

    def place(self, worker: int, field: int) -> int:
        """Index of a worker's own word."""
        return WORKERS + worker * LINE + field

    def idle(self, worker: int) -> bool:
        """Whether a worker is done with the latest grant."""
        return self.words[self.place(worker, IDLE)] == self.words[GRANT]

    def all_idle(self, workers: Iterable[int] | None = None) -> bool:
        """Whether these workers (by default all) are done with the latest grant."""
        idle = all(map(self.idle, range(self.workers) if workers is None else workers))
        order()
        return idle

    def places(self) -> list[Progress]:
        """Where every worker is, or was when it ended."""
        order()
        found = (divmod(self.words[self.place(worker, PLACE)], POINTS) for worker in range(self.workers))
        return [Progress(step, Phase(phase)) for step, phase in found]

    def progress(self) -> bytes:
        """Everything that workers write as they go on; equal as long as nobody does."""
        return bytes(self.words[WORKERS:])

    def hindmost(self, workers: Iterable[int]) -> set[int]:
        """Those of these workers that others wait for, or that have still to finish what was granted."""
        busy = {number: self.words[self.place(number, ARRIVED)] for number in workers if not self.idle(number)}
        return {number for number, arrived in busy.items() if arrived == min(busy.values())}

    def phases(self) -> dict[str, list[float]]:
        """Seconds that each worker has spent in each phase of its steps."""
        times, count = self.times.tolist(), len(PHASES)
        return {name: [float(value) for value in times[at::count]] for at, name in enumerate(PHASES)}

    def finished(self) -> int:
        """Replicas that were finished so far, anywhere, again if they were lost."""
        return sum(self.words[self.place(worker, TOTAL)] for worker in range(self.workers))


class Reports:
    """What the first worker reports of steps; the caller's process may be ``RING`` of them behind."""

    def __init__(self, words: memoryview, ring: memoryview[float]) -> None:
        self._words = words
        self._ring = ring

    def write(self, step: int, *report: float) -> None:
        """Of a step that is about to be finished: loss, norm, lr, samples, started, ended."""
        place = step % RING * REPORT
        for value in report:
            self._ring[place] = value
            place += 1

    def finish(self, step: int, ended: float) -> None:
        """The step is finished: its report may be read."""
        self._ring[step % RING * REPORT + REPORT - 1] = ended
        order()
        self._words[DONE] = max(self._words[DONE], step + 1)

    def read(self, step: int) -> Sequence[float]:
        """What was written of a step: loss, norm, lr, samples, started, ended."""
        order()
        start = step % RING * REPORT
        return self._ring[start : start + REPORT].tolist()


class Barrier:
    """A worker's meetings with the others: about 2 us if all come at once.

    Parameters
    ----------
    control : Control
    worker : int
        This one.
    """

    def __init__(self, control: Control, worker: int) -> None:
        self.control = control
        self.worker = worker
        self._words = control.words
        self._times = control.times
        self._mine = control.place(worker, ARRIVED)
        self._place = control.place(worker, PLACE)
        self._step = 0
        self._others = [control.place(other, ARRIVED) for other in range(control.workers) if other != worker]
        self._clock = len(PHASES) * worker
        self._round = 0
        self._since = 0.0

    def begin(self, grant: int) -> None:
        """A new grant: earlier arrivals no longer count."""
        self._round = max(self._words[self._mine], grant << ROUNDS)  # a replacement goes on where the other ended
        self._since = time.perf_counter()

    def enter(self, step: int) -> None:
        """Be at the beginning of a step."""
        self._step = step
        self.at(Phase.SAVING)

    def at(self, phase: Phase) -> None:
        """Be so far in the step."""
        self.begin_part()
        self._words[self._place] = self._step * POINTS + phase

    def begin_part(self) -> None:
        """Whatever this worker does now, it begins now."""
        self.control.began[self.worker] = time.monotonic()

    def meet(self, before: int, after: int) -> None:
        """Wait until all workers are here. ``before`` and ``after`` name the phases that it divides.

        Raises
        ------
        Trouble
            A worker failed before it came here. One that came, and failed later, stops the next barrier, not this one:
            the others may have gone on from it already.
        """
        words = self._words
        arrived = time.perf_counter()
        self._round = mine = self._round + 1
        order()
        words[self._mine] = mine
        for other in self._others:
            if words[other] < mine:
                self._wait(other, mine)
        order()
        now = time.perf_counter()
        self._times[self._clock + before] += arrived - self._since
        self._times[self._clock + WAIT] += now - arrived
        self._since = now

    def _wait(self, other: int, mine: int) -> None:
        """Spin for a moment, as the others are about to come; then sleep, so that they get the processor."""
        words, nap = self._words, NAP_SECONDS
        patience = time.perf_counter() + SPIN_SECONDS
        while words[other] < mine:
            if words[TROUBLE]:
                if words[other] >= mine:  # it came, and failed after that
                    return
                raise Trouble
            if time.perf_counter() < patience:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP_SECONDS)


FENCE: Final = threading.Lock()


def order() -> None:
    """What was written before is seen before what is written after, and read before what is read after.

    x86 processors do that by themselves.
    """
    if not ORDERED:
        through_kernel()


def fence() -> None:
    """What was written before is seen before what is read after: an atomic instruction, or the kernel."""
    if ORDERED:
        with FENCE:
            pass
    else:
        through_kernel()


def through_kernel() -> None:
    """Order memory by a round trip through a pipe of our own, where plain words are not ordered by the processor."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b".")
        os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)
