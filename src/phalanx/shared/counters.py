"""How the processes of a run communicate: words in an arena that they read and write without locks.

Workers go from step to step by themselves: the parent grants a number of steps, or one task, and may grant again only
when every worker is idle. In between, the first worker alone decides, before the last barrier of a step, whether there
is a next one; so all of them agree. A worker that fails raises the trouble flag and goes idle; the others leave at
their next barrier. No weights or gradients are here, only how far every worker is, and the numbers of each step.

A word is 8 bytes, which processors read and write as a whole. No two writers share a cache line, as each would have to
fetch it from the other for every write. So the line of a word tells who may write it. For all others it is
read-only memory.
"""

from __future__ import annotations

import array
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from phalanx.errors import Trouble
from phalanx.plan.lifecycle import Progress, Stage
from phalanx.seams.records import Part, packed
from phalanx.shared.memory import order

RING: Final = 1024  # reports that the parent may be behind
REPORT: Final = 7  # length of named losses; loss, norm, lr, samples, started, ended; then loss, weight of each replica
OF_REPLICA: Final = 2  # numbers of each replica in a report
PART: Final = len(Part._fields)  # of a row; of named losses it has their length
NAMED: Final = Part._fields.index("named")
NOTE: Final = 1024  # bytes for named losses: 8 of them, with names of 62 characters


class PartRows:
    """A row of numbers for each replica of the present step; written by the worker that hosts the replica.

    The text of named losses is apart, in ``notes``: without such losses that memory is never touched.
    """

    def __init__(self, floats: memoryview[float], notes: memoryview) -> None:
        self._floats, self._notes = floats, notes

    def write(self, first: int, rows: Iterable[Sequence[Any]], settings: Sequence[float]) -> None:
        """Write a worker's replicas from row ``first`` on; each row ends in ``settings``: options' checksum and lr."""
        for replica, row in enumerate(rows, first):
            text = packed(row[NAMED]) if row[NAMED] else b""
            self._notes[replica * NOTE :][: len(text)] = text
            numbers = array.array("d", (*row[:NAMED], len(text), *settings))
            self._floats[replica * PART :][:PART] = memoryview(numbers)

    def read(self) -> Sequence[Sequence[Any]]:
        """The rows of all replicas; complete after a barrier."""
        values = self._floats.tolist()
        if any(values[NAMED::PART]):
            values[NAMED::PART] = [
                length and json.loads(bytes(self._notes[replica * NOTE :][: int(length)]))
                for replica, length in enumerate(values[NAMED::PART])
            ]
        return [values[position : position + PART] for position in range(0, len(values), PART)]


class Reports:
    """What the first worker writes of each step; the parent may be ``RING`` of them behind.

    Loss and weight of each replica follow the numbers of the step. Named losses are apart, in ``notes``.
    """

    def __init__(self, ring: memoryview[float], notes: memoryview) -> None:
        self._ring, self._notes = ring, notes
        self._width = len(ring) // RING

    def write(self, step: int, parts: Sequence[float], named: Mapping[str, float], *report: float) -> None:
        """Write what a step that is about to finish gave: loss, norm, lr, samples, started, ended; and each replica."""
        position = step % RING * self._width
        text = json.dumps(named).encode() if named else b""
        self._notes[step % RING * NOTE :][: len(text)] = text
        row = array.array("d", (len(text), *report, *parts))
        self._ring[position : position + len(row)] = memoryview(row)

    def correct_end(self, step: int, ended: float) -> None:
        """Write when the step really ended: its report was written just before that."""
        self._ring[step % RING * self._width + REPORT - 1] = ended

    def read(self, step: int) -> Sequence[Any]:
        """What was written of a step: loss, norm, lr, samples, started, ended, named losses."""
        order()  # whoever reads this has read before that the step is done
        position = step % RING * self._width
        length, *report = self._ring[position : position + REPORT].tolist()
        return [*report, json.loads(bytes(self._notes[step % RING * NOTE :][: int(length)])) if length else {}]

    def parts(self, step: int) -> tuple[float, ...]:
        """Loss and weight of each replica in a step whose report was read."""
        position = step % RING * self._width
        return tuple(self._ring[position + REPORT : position + self._width].tolist())


LINE: Final = 8  # words in a cache line
OF_PARENT, OF_FIRST, OF_ALL, OF_WORKERS = 0, 2 * LINE, 3 * LINE, 4 * LINE  # where lines of each kind of writer begin
PARENT: Final = -1  # the role of the caller's process; those of workers are their numbers
WRITERS: Final = ({PARENT}, {PARENT}, {PARENT, 0}, set[int]())  # of each line before those of workers; empty: any role

STEPS, BATCH, TASK = 1, 2, 3  # kinds of grants: planned steps, a step on a batch that the caller brought, a task
GO_ON, BEGIN_NO_STEP, LEAVE = 0, 1, 2  # pauses; LEAVE: also a step that is being computed, between two replicas
STAGES: Final = len(Stage)
PROGRESS: Final = 3  # the word that says how far a worker is: step and stage in one, so that they are read together


def word_count(workers: int) -> int:
    """Words that the counters of a run take."""
    return OF_WORKERS + workers * LINE


def float_count(workers: int, replicas: int) -> int:
    """Floats that parts of replicas, reports, and checksums of workers take; then texts of replicas and reports."""
    return PART * replicas + (REPORT + OF_REPLICA * replicas) * RING + workers + NOTE // 8 * (replicas + RING)


def word(index: int, doc: str) -> Any:
    """The word at ``index`` of an object's ``_words``; a plain property, as these are read within barriers."""
    line, column = divmod(index, LINE)

    def read(self: Any) -> int:
        return self._words[index]

    def write(self: Any, value: int) -> None:
        self._lines[line][column] = value

    return property(read, write, doc=doc)


class WorkerCounters:
    """The words of one worker. Only that worker writes them, and they stay when it has ended."""

    arrived = word(0, "How many barriers it has come to; the grant is in the upper bits.")
    finished = word(1, "The latest grant that it is done with: it is idle if that is the latest of all.")
    sleeping = word(2, "Whether it has to be woken to see a grant.")
    opinion = word(4, "What it thinks of a question that all are asked, from one barrier to the next.")
    replicas = word(5, "How many of its replicas it has computed in this step.")
    total = word(6, "How many replicas, or chunks of an evaluation, its place has computed in all.")
    checksum = word(7, "Of the part of the snapshot in memory that it wrote.")

    def __init__(self, words: Any) -> None:
        self._words, self._lines = words, [words]

    def reach(self, step: int, stage: Stage) -> None:
        """Note that the worker comes to a stage of a step."""
        self._words[PROGRESS] = step * STAGES + stage

    @property
    def progress(self) -> Progress:
        """Where it is, or was when it ended."""
        step, stage = divmod(self._words[PROGRESS], STAGES)
        return Progress(step, Stage(stage))


class Counters:
    """One process's view of the counters of a run.

    Parameters
    ----------
    words, floats : memoryview
        int64 and float64 views, as long as ``word_count`` and ``float_count`` say.
    workers, replicas : int
    role : int, optional
        Of this process: ``PARENT`` or the number of a worker. What others write is read-only.

    Attributes
    ----------
    workers : list of WorkerCounters
        The words of each.
    parts : PartRows
        Of the replicas in the present step.
    reports : Reports
        Of finished steps; written by the first worker.
    sums : memoryview of float
        For each worker a checksum of what it computed in an audited step; 32 bits, which a float holds exactly.
    """

    grant = word(OF_PARENT, "Written by the parent: how often it has granted something.")
    kind = word(OF_PARENT + 1, "Written by the parent, before it grants: STEPS, BATCH or TASK.")
    horizon = word(OF_PARENT + 2, "Written by the parent, at any time: before which step planned ones end.")
    pause = word(OF_PARENT + 3, "Written by the parent, at any time: GO_ON, BEGIN_NO_STEP or LEAVE.")
    generation = word(
        OF_PARENT + 4, "Written by the parent, while all are idle: how often workers are to connect anew."
    )
    asleep = word(OF_PARENT + LINE, "Written by the parent: whether it has to be woken to see anything.")
    awaited = word(OF_PARENT + LINE + 1, "Written by the parent: how many finished steps are worth waking it for.")
    eager = word(OF_PARENT + LINE + 2, "Written by the parent: each step before this one is followed by a snapshot.")
    held = word(OF_PARENT + LINE + 3, "Written by the parent: how many read the snapshot, which stays meanwhile.")
    confirmed = word(OF_PARENT + LINE + 4, "Written by the parent: steps that are done though nobody reported that.")
    agreed = word(OF_FIRST, "Written by the first worker, before the last barrier of a step: which one ends the grant.")
    reported = word(OF_FIRST + 1, "Written by the first worker: how many steps it has reported as done.")
    snapshot_due = word(
        OF_FIRST + 2,
        "Written by the first worker; by the parent while all are idle. Before which step all save: the newest "
        "snapshot that was announced, whether or not it is whole.",
    )
    snapshot_step = word(
        OF_FIRST + 3,
        "Written by the first worker, when all have met since they saved; by the parent while all are idle. The step "
        "before which the newest snapshot that is known to be whole was taken; negative: there is none.",
    )
    apart = word(OF_FIRST + 4, "Written by the first worker: whether it keeps state that a replacement would lack.")
    trouble = word(OF_ALL, "Set to 1 by anybody: leave what was granted. Set to 0 by the parent, before it grants.")

    def __init__(
        self, words: memoryview[int], floats: memoryview[float], workers: int, replicas: int, role: int | None = None
    ) -> None:
        writers = [*WRITERS, *({worker} for worker in range(workers))]
        views = [words[line * LINE :][:LINE] for line in range(len(writers))]
        self._lines = [
            view if role is None or role in known or not known else view.toreadonly()
            for view, known in zip(views, writers, strict=True)
        ]
        self._words = words
        rows = PART * replicas
        ring = rows + (REPORT + OF_REPLICA * replicas) * RING
        notes = floats[ring + workers :].cast("B")
        self.parts = PartRows(floats[:rows], notes)
        self.reports = Reports(floats[rows:ring], notes[replicas * NOTE :])
        self.sums = floats[ring : ring + workers]
        self.workers = [WorkerCounters(line) for line in self._lines[len(WRITERS) :]]

    @property
    def done(self) -> int:
        """How many steps are done."""
        return max(self.reported, self.confirmed)

    def finish(self, step: int, ended: float) -> None:
        """By the first worker: the step is done, and its report may be read."""
        self.reports.correct_end(step, ended)
        order()  # who sees the count sees the report
        self.reported = max(self.reported, step + 1)  # a step that was lost is done again, and was reported before

    def idle(self, worker: int) -> bool:
        """Whether a worker is done with the latest grant."""
        return self.workers[worker].finished == self.grant

    def all_idle(self, workers: Iterable[int] | None = None) -> bool:
        """Whether these workers (by default all) are done with the latest grant."""
        idle = all(map(self.idle, range(len(self.workers)) if workers is None else workers))
        order()  # what they wrote before is read after this
        return idle

    def progress(self) -> list[Progress]:
        """Where every worker is, or was when it ended."""
        order()
        return [worker.progress for worker in self.workers]

    def activity(self) -> bytes:
        """Everything that workers write as they go on; equal as long as no worker does."""
        return self._words[OF_WORKERS:].tobytes()

    def hindmost(self, workers: Iterable[int]) -> set[int]:
        """Those of these workers that others wait for, or that have still to finish what was granted."""
        busy = {number: self.workers[number].arrived for number in workers if not self.idle(number)}
        return {number for number, arrived in busy.items() if arrived == min(busy.values())}


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

    def begin(self, grant: int) -> None:
        """A new grant: earlier arrivals no longer count."""
        # Workers may leave a broken grant at different barriers, so their counts differ then. With the grant in the
        # upper bits all begin the next one at the same number. With counts that only go up they would meet at
        # different barriers, and the last one would wait for ever. `max` is for a replacement that joins a grant. The
        # dead worker's count is still in its line, and the next barrier is the one at which the others wait for it.
        # That needs a death before the exchange of gradients, which `joinable` sees to. Not covered: 2**32 barriers
        # in one grant, or 2**31 grants in one run. Nothing looks for that.
        self._round = max(self._own.arrived, grant << ROUNDS)  # a replacement goes on where the other ended

    def enter(self, step: int) -> None:
        """Come to the beginning of a step."""
        self.step = step
        self.at(Stage.SAVING)

    def at(self, stage: Stage) -> None:
        """Come to a stage of the step."""
        self._own.reach(self.step, stage)

    def wait(self) -> None:
        """Wait until all workers are here.

        Raises
        ------
        Trouble
            A worker failed before it came here. One that came and failed later makes the next barrier raise, and not
            this one: the others may have gone on from it already, and all have to agree on how far they came.
        """
        self._round = mine = self._round + 1
        order()  # who sees that this worker came sees what it wrote before
        self._own.arrived = mine
        for other in self._others:
            if other.arrived < mine:
                self._wait_for(other, mine)
        order()  # what the others wrote before they came is read after this

    def _wait_for(self, other: WorkerCounters, mine: int) -> None:
        """Spin for a moment, as the other is about to come; then sleep, so that it gets the processor."""
        counters, nap = self.counters, NAP_SECONDS
        patience = time.perf_counter() + SPIN_SECONDS
        while other.arrived < mine:
            # If a worker set the flag, all agree: it did not come here, or all have come and pass. The caller may set
            # it, too (`Supervisor.steady`, `WorkerPool.break_off`), and then workers may part here. Whoever waits
            # leaves. Whoever comes last finds that all have come, and passes. Nothing here repairs that. At the
            # barrier before the update, one worker may write its part and others not. `judge` calls that torn. At the
            # last barrier of a step, not all know that the step is done. `stands` says RESUMING then, and all are
            # told. Both were missed once, when a run was broken off. Not covered: a worker that neither comes nor
            # fails. Only the caller's deadline ends that wait.
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
