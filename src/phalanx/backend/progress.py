"""Operations that advance whenever anybody waits: generators that yield the ranks they wait for.

There is no thread. An operation begins when it is called, as far as it can; waiting for one advances all that are under
way in this process, so that two ranks may wait for two operations in different orders.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from phalanx.backend.room import Room
from phalanx.errors import PeerError

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
    anyone : bool
        Whether one of the ranks that it waits for is enough.
    """

    def __init__(self, steps: Steps, room: Room, name: str, *, anyone: bool = False) -> None:
        self.steps = steps
        self.room = room
        self.name = name
        self.anyone = anyone
        self.line: Line | None = None
        self.done = False
        self.error: BaseException | None = None
        self.awaited: Sequence[int] = ()

    def advance(self) -> None:
        """Go on as far as possible without waiting; an interrupt passes through."""
        try:
            self.awaited = next(self.steps)
        except StopIteration:
            self.done = True
        except BaseException as error:
            self.done, self.error = True, error
            if not isinstance(error, Exception):
                raise


class Line:
    """Operations that must happen one after another.

    Attributes
    ----------
    broken : PeerError or None
        Why nothing can happen here any more.
    """

    def __init__(self) -> None:
        self.operations: deque[Operation] = deque()
        self.broken: PeerError | None = None

    def begin(self, operation: Operation) -> None:
        """Begin it, or let it wait for its turn."""
        with LOCK:
            if self.broken is not None:
                raise PeerError(
                    f"this group could not go on, start all ranks again; before, {self.broken}"
                ) from self.broken
            operation.line = self
            self.operations.append(operation)
            if len(self.operations) == 1:
                LINES.append(self)
                self.advance()

    def advance(self) -> None:
        """Let the first go on, and those behind it as far as it gives way."""
        while self.operations:
            first = self.operations[0]
            try:
                if not first.done:
                    first.advance()
            finally:
                if first.error is not None:
                    self.fail(first.error)
            if not first.done:
                return
            if self.operations:
                self.operations.popleft()
        if self in LINES:
            LINES.remove(self)

    def fail(self, error: BaseException) -> None:
        """After an error ranks no longer agree on what comes next: nothing does."""
        if isinstance(error, PeerError):
            self.broken = error
        else:
            self.broken = PeerError(
                f"{self.operations[0].name} broke off in the middle ({error!r}), so that ranks no longer agree on what "
                "comes next; start all ranks again"
            )
            self.broken.__cause__ = error
        for operation in self.operations:
            operation.steps.close()
            operation.done, operation.error = True, operation.error or self.broken
        self.operations.clear()
        if self in LINES:
            LINES.remove(self)


def advance() -> None:
    """Let everything that is under way go on as far as possible."""
    with LOCK:
        for line in LINES[:]:
            line.advance()


def poll(operation: Operation) -> bool:
    """Go on as far as possible; whether ``operation`` is done."""
    if not operation.done:
        advance()
        _check(operation, 0.0, math.inf)
    return operation.done


def leave(room: Room) -> None:
    """Give up what is under way in a room."""
    with LOCK:
        for line in LINES[:]:
            if line.operations[0].room is room:
                line.fail(PeerError(f"{line.operations[0].name}: the group was destroyed before it was done"))


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
    """Give up if a rank that is waited for is gone, or late: by ``operation`` or by what comes before it."""
    with LOCK:
        if operation.done or operation.line is None:
            return
        line, first = operation.line, operation.line.operations[0]
        gone = _gone(first)
        if gone:
            advance()  # it may have done its part before
            if first.done or not set(gone) <= set(first.awaited):
                return
            why = f"rank {first.room.names[gone[0]]} (process {first.room.pids[gone[0]]}) has ended"
        elif waited > seconds:
            why = f"{_spelled([first.room.names[rank] for rank in first.awaited])} did not come within {seconds:g} s"
        else:
            return
        line.fail(PeerError(f"{first.name}: {why}; this group cannot go on, start all ranks again"))


def _gone(operation: Operation) -> Sequence[int]:
    """Ranks without which it cannot be done, and that have ended."""
    gone = operation.room.gone(operation.awaited)
    return () if operation.anyone and len(gone) < len(operation.awaited) else gone


def _spelled(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
