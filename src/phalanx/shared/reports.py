"""What workers tell of steps in shared memory: the parts of all replicas to each other, and reports to the parent."""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence
from typing import Final

from phalanx.shared.ordering import order

RING: Final = 1024  # reports that the parent may be behind
REPORT: Final = 6  # loss, norm, lr, samples, started, ended; loss and weight of each replica come behind
TOLD: Final = 2  # numbers of each replica in a report
PART: Final = 6  # loss, weight, returned, samples; options and lr of the worker


class Parts:
    """A row of numbers for each replica of the present step; written by the worker that hosts the replica."""

    def __init__(self, floats: memoryview[float]) -> None:
        self._floats = floats

    def write(self, first: int, rows: Iterable[Sequence[float]], told: Sequence[float]) -> None:
        """Write the rows of a worker's replicas, in a row from ``first`` on; each ends in what it ``told``."""
        position = first * PART
        for row in rows:
            for value in (*row[: -len(told)], *told):
                self._floats[position] = value
                position += 1

    def read(self) -> Sequence[Sequence[float]]:
        """The rows of all replicas; complete after a barrier."""
        values = self._floats.tolist()
        return [values[position : position + PART] for position in range(0, len(values), PART)]


class Reports:
    """What the first worker writes of each step; the parent may be ``RING`` of them behind.

    Loss and weight of each replica follow the numbers of the step.
    """

    def __init__(self, ring: memoryview[float]) -> None:
        self._ring = ring
        self._width = len(ring) // RING

    def write(self, step: int, parts: Sequence[float], *report: float) -> None:
        """Of a step that is about to be finished: loss, norm, lr, samples, started, ended; and of each replica."""
        position = step % RING * self._width
        row = array.array("d", (*report, *parts))
        self._ring[position : position + len(row)] = memoryview(row)

    def correct_end(self, step: int, ended: float) -> None:
        """When the step has really ended: what was written before could only be about to."""
        self._ring[step % RING * self._width + REPORT - 1] = ended

    def read(self, step: int) -> Sequence[float]:
        """What was written of a step: loss, norm, lr, samples, started, ended."""
        order()  # whoever reads this has read before that the step is done
        position = step % RING * self._width
        return self._ring[position : position + REPORT].tolist()

    def parts(self, step: int) -> tuple[float, ...]:
        """Loss and weight of each replica in a step whose report was read."""
        position = step % RING * self._width
        return tuple(self._ring[position + REPORT : position + self._width].tolist())
