"""Operations that advance whenever anybody waits: generators that yield the ranks they wait for.

There is no thread. An operation begins when it is called, as far as it can; waiting for one advances all that are under
way in this process, so that two ranks may wait for two operations in different orders.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from phalanx.backend.room import PeerError, Room

Steps = Generator[Sequence[int], None, Any]  # yields the ranks that it waits for
SPIN_SECONDS = 0.0003
NAP_SECONDS, LONGEST_NAP_SECONDS = 0.00002, 0.0005

LOCK = threading.RLock()
LINES: list[Line] = []  # of all groups, where something is under way


class Operation:
    """Something under way.

    Parameters
    ----------
    steps : generator
    room : Room
    name : str
        For errors.
    """

    def __init__(self, steps: Steps, room: Room, name: str) -> None:
        self.steps = steps
        self.room = room
        self.name = name
        self.done = False
        self.error: BaseException | None = None
        self.awaited: Sequence[int] = ()

    def advance(self) -> None:
        """Go on as far as possible without waiting."""
        try:
            self.awaited = next(self.steps)
        except StopIteration:
            self.done = True
        except BaseException as error:
            self.done, self.error = True, error


class Line:
    """Operations that must happen one after another.

    Attributes
    ----------
    broken : BaseException or None
        Why nothing can happen here any more.
    """

    def __init__(self) -> None:
        self.operations: deque[Operation] = deque()
        self.broken: BaseException | None = None

    def begin(self, operation: Operation) -> None:
        """Begin it, or let it wait for its turn."""
        with LOCK:
            if self.broken is not None:
                raise self.broken
            if not self.operations:
                operation.advance()
                if operation.done:
                    self._fail(operation)
                    return
                LINES.append(self)
            self.operations.append(operation)

    def advance(self) -> None:
        """Let the first go on, and those behind it as far as it gives way."""
        while self.operations:
            first = self.operations[0]
            if not first.done:
                first.advance()
            if not first.done:
                return
            self.operations.popleft()
            self._fail(first)
        LINES.remove(self)

    def _fail(self, operation: Operation) -> None:
        """After an error ranks no longer agree on what comes next: nothing does."""
        if isinstance(operation.error, PeerError):
            self.broken = operation.error
            for other in self.operations:
                other.done, other.error = True, operation.error


def advance() -> None:
    """Let everything that is under way go on as far as possible."""
    with LOCK:
        for line in LINES[:]:
            line.advance()


def finish(operation: Operation, seconds: float) -> None:
    """Wait until an operation is done.

    Raises
    ------
    PeerError
        A rank that it waits for has ended, or did not come in time.
    """
    if not operation.done:
        _await(operation, seconds)
    if operation.error is not None:
        raise operation.error


def _await(operation: Operation, seconds: float) -> None:
    began, nap, moved = time.perf_counter(), NAP_SECONDS, -1
    while True:
        advance()
        if operation.done:
            return
        now = time.perf_counter()
        if operation.room.moved != moved:
            began, nap, moved = now, NAP_SECONDS, operation.room.moved
        waited = now - began
        if waited < SPIN_SECONDS:
            os.sched_yield()
            continue
        _check(operation, waited, seconds)
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP_SECONDS)


def _check(operation: Operation, waited: float, seconds: float) -> None:
    """Give up if a rank that is waited for is gone, or late."""
    with LOCK:
        room, awaited = operation.room, operation.awaited
        gone = room.gone(awaited)
        if gone is not None:
            advance()  # it may have done its part before
            if operation.done or gone not in operation.awaited:
                return
            why = f"rank {gone} (process {room.pids[gone]}) has ended"
        elif waited > seconds:
            why = f"{_spelled(awaited)} did not come within {seconds:g} s"
        else:
            return
        _give_up(operation, PeerError(f"{operation.name}: {why}; this group cannot go on, start all ranks again"))


def _give_up(operation: Operation, error: PeerError) -> None:
    operation.steps.close()
    operation.done, operation.error = True, error
    advance()


def _spelled(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
