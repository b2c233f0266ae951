"""Operations that advance whenever anybody waits: generators that yield the ranks they wait for.

There is no thread. An operation begins when it is called, as far as it can; waiting for one advances all that are under
way in this process, so that two ranks may wait for two operations in different orders.
"""

# torch's stubs name parameters that it never names.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

import contextlib
import datetime
import math
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from phalanx.backend.memory import GroupMemory
from phalanx.errors import PeerError

Steps = Generator[Sequence[int], None, Any]  # yields the ranks that it waits for
SPIN_SECONDS = 0.0003
NAP_SECONDS, LONGEST_NAP_SECONDS = 0.00002, 0.0005

LOCK = threading.RLock()
QUEUES: list[Queue] = []  # of all groups, where something is under way
# torch 2.6 drops the Python part of a Work that a group hands to C++ (DDP's reducer, say), and then waits for ever for
# the rest. So a Work that nobody has waited for is kept here. 2.13 keeps it itself; versions between were not tried.
KEEPS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
UNAWAITED: set[dist.Work] = set()


@dataclass(eq=False)
class Operation:
    """Something under way.

    Attributes
    ----------
    steps : generator
    memory : GroupMemory
    name : str
        For errors.
    anyone : bool
        Whether one of the ranks that it waits for is enough.
    """

    steps: Steps
    memory: GroupMemory
    name: str
    anyone: bool = False
    queue: Queue | None = None
    done: bool = False
    error: BaseException | None = None
    awaited: Sequence[int] = ()

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


class Queue:
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
            operation.queue = self
            self.operations.append(operation)
            if len(self.operations) == 1:
                QUEUES.append(self)
                self.advance()

    def advance(self) -> None:
        """Advance the first operation, and each later one once those before it are done."""
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
        if self in QUEUES:
            QUEUES.remove(self)

    def fail(self, error: BaseException) -> None:
        """Fail all operations, now and later: after an error, ranks no longer agree on what comes next."""
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
        if self in QUEUES:
            QUEUES.remove(self)


def advance() -> None:
    """Let everything that is under way go on as far as possible."""
    with LOCK:
        for queue in QUEUES[:]:
            queue.advance()


def leave(memory: GroupMemory) -> None:
    """Fail the operations of a group that are under way."""
    with LOCK:
        for queue in QUEUES[:]:
            if queue.operations[0].memory is memory:
                queue.fail(PeerError(f"{queue.operations[0].name}: the group was destroyed before it was done"))


def uncompiled(kind: type) -> type:
    """Keep torch's compiler out of the methods of a class: C++ calls them in the middle of compiled code."""
    # As torch.compiler.disable, without loading the compiler (0.7 s). torch 2.6 has no such mark, and was not tried.
    with contextlib.suppress(AttributeError):
        frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                frames.set_code_exec_strategy(method.__code__, skip)
    return kind


@uncompiled
class Work(dist.Work):
    """A collective under way, as torch.distributed hands it out.

    Parameters
    ----------
    operation : Operation
    seconds : float
        How long to wait for others.
    outputs : list of torch.Tensor
    sources : list of int
        Where a message came from, once it is here.
    """

    def __init__(self, operation: Operation, seconds: float, outputs: Any, sources: list[int] | None = None) -> None:
        super().__init__()
        self._operation = operation
        self._seconds = seconds
        self._outputs = outputs
        self._sources = sources
        if KEEPS:
            UNAWAITED.add(self)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until it is done.

        Raises
        ------
        PeerError
            A rank that it waits for has ended, or did not come in time.
        """
        given = 0.0 if timeout is None else timeout.total_seconds()
        try:
            if not self._operation.done:
                _await(self._operation, given if given > 0 else self._seconds)
            if self._operation.error is not None:
                raise self._operation.error
        finally:
            UNAWAITED.discard(self)
        return True

    def get_future(self) -> Any:
        """Waits: nothing goes on in the background."""
        future = torch.futures.Future()
        future.set_result(self.result())
        return future

    def is_completed(self) -> bool:
        """Whether it is done; lets it go on as far as it can."""
        if not self._operation.done:
            advance()
            _check(self._operation, 0.0, math.inf)
        return self._operation.done

    def is_success(self) -> bool:
        """Whether it is done, and went well."""
        return self._operation.done and self._operation.error is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._operation.error

    def result(self) -> Any:
        """The tensors that were written."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Where a message came from."""
        self.wait()
        return self._sources[0] if self._sources else -1

    _source_rank = source_rank


def _await(operation: Operation, seconds: float) -> None:
    began, nap, moved = time.perf_counter(), NAP_SECONDS, -1
    while True:
        advance()
        if operation.done:
            return
        now = time.perf_counter()
        if operation.memory.moved != moved:
            began, nap, moved = now, NAP_SECONDS, operation.memory.moved
        waited = now - began
        if waited < SPIN_SECONDS:
            os.sched_yield()
            continue
        _check(operation, waited, seconds)
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP_SECONDS)


def _check(operation: Operation, waited: float, seconds: float) -> None:
    """Fail the queue of ``operation`` if a rank that its first operation waits for has ended, or is late."""
    with LOCK:
        if operation.done or operation.queue is None:
            return
        queue, first = operation.queue, operation.queue.operations[0]
        gone = first.memory.gone(first.awaited)
        if gone and (len(gone) == len(first.awaited) or not first.anyone):
            advance()  # the rank may have done its part before it ended
            if first.done or not set(gone) <= set(first.awaited):
                return
            why = f"rank {first.memory.names[gone[0]]} (process {first.memory.pids[gone[0]]}) has ended"
        elif waited > seconds:
            late = ", ".join(f"rank {first.memory.names[rank]}" for rank in first.awaited)
            why = f"{late} did not come within the timeout of {seconds:g} s"
        else:
            return
        queue.fail(PeerError(f"{first.name}: {why}; this group cannot go on, start all ranks again"))
