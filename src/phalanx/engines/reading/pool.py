"""The readers of a run as the caller's process sees them: started, replaced, ended, from a thread of their own.

A reader that ends or hangs takes nothing with it: who computes reads by itself what it had begun.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from phalanx.definition import checks
from phalanx.definition.data import Samples
from phalanx.definition.fields import Definition
from phalanx.engines.processes.environment import pack_recipe
from phalanx.engines.processes.handle import Output, WorkerHandle
from phalanx.engines.processes.starter import WARM
from phalanx.engines.reading.taking import Taking
from phalanx.plan.placement import Placement
from phalanx.seams import Framework
from phalanx.shared.inputs import MOST, Inputs
from phalanx.shared.memory import Memory
from phalanx.surroundings import presence
from phalanx.surroundings.presence import usable_cores

LOOK_SECONDS = 0.1
AT_LEAST_SECONDS, AT_LEAST_SHARES = 1.0, 16  # that are measured before readers are started
WORTH = 0.2  # of the time of those who compute: reading that takes less is left to them
WAITS = 0.5  # of the wall time of reading, in which no processor works for it
MOST_MEASURED = 16  # readers that are started by measure
FUTILE = 5  # readers that ended one after another within a second


def reads(definition: Definition) -> bool:
    """Whether reading this data runs the user's code, so that there is something to do ahead."""
    return isinstance(definition.source, Samples) and definition.source.random


def worth(seconds: float, wall: float, processor: float, workers: int, cores: int) -> int:
    """How many readers pay.

    Parameters
    ----------
    seconds : float
        That those who compute took in all.
    wall, processor : float
        How many of these went into reading, and how many a processor worked for that.
    workers, cores : int
    """
    part = min(0.95, wall / seconds)
    if part < WORTH:
        return 0
    needed = math.ceil(workers * part / (1 - part))
    return max(0, min(needed, MOST_MEASURED if processor < WAITS * wall else cores - workers))


def ahead_here(definition: Definition, framework: Framework, count: int | None) -> Taking | None:
    """What this process takes shares from that readers of its own read; None where there are to be none.

    ``count``: how many; None, which is measured where workers compute: none.
    """
    if not count or not reads(definition):
        return None
    memories = [Memory(0) for _ in range(3)]
    environment, parcel, inputs = memories
    try:
        pack_recipe(definition, framework.name, environment, parcel, {})
        pool = ReaderPool(inputs, environment, parcel, definition.replicas, 1, count)
    except BaseException:
        for memory in memories:
            memory.close()
        raise

    def close() -> None:
        try:
            pool.close()
        finally:
            for memory in memories:
                memory.close()

    return Taking(inputs, definition, close)


def read_ahead(memories: Sequence[Memory], placement: Placement, count: int | None) -> Callable[[], None]:
    """Have readers work for the workers over these memories; what ends them."""
    if count == 0:
        return lambda: None
    environment, parcel, *_, inputs = memories
    return ReaderPool(inputs, environment, parcel, placement.replicas, placement.workers, count).close


class ReaderPool:
    """Readers over one memory.

    Parameters
    ----------
    inputs : Memory
    environment, parcel : Memory
        What readers inherit, as workers do.
    replicas, workers : int
        R; how many compute here.
    count : int or None
        How many readers; None: what the first steps say.
    """

    def __init__(
        self, inputs: Memory, environment: Memory, parcel: Memory, replicas: int, workers: int, count: int | None
    ) -> None:
        self._memories: Sequence[Memory] = (environment, parcel, inputs)
        self._inputs = Inputs(inputs, replicas)
        self._workers = workers
        self._handles: dict[int, WorkerHandle] = {}
        self._output = Output()
        self._failed, self._problem = 0, ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tend, args=(count,), name="phalanx-readers", daemon=True)
        presence.own(self)
        self._thread.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the readers that are alive."""
        return tuple(handle.pid for handle in list(self._handles.values()) if not handle.ended)

    def close(self) -> None:
        """End them."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        problem, self._problem = self._problem, ""
        if problem:
            checks.warn(f"nothing was read ahead in the end (same answer): {problem}")

    def leave(self) -> None:
        """See ``presence.Owned``."""
        self._over.set()

    def _tend(self, count: int | None) -> None:
        """What the thread does."""
        owner = os.getpid()
        try:
            count = self._measured() if count is None else count
            if count:
                self._inputs.readers = min(count, MOST)
                while not self._over.is_set() and self._failed < FUTILE:
                    self._fill()
                    self._listen()
                if self._failed >= FUTILE:
                    self._inputs.readers = 0
                    self._problem = "readers ended again and again"
        except Exception as error:  # no process can be started, say: nothing depends on readers
            self._inputs.readers = 0
            self._problem = str(error)
        finally:
            if os.getpid() == owner:
                for handle in self._handles.values():
                    handle.dismiss()
                    handle.end()

    def _measured(self) -> int:
        """How many readers pay, as the first steps were; 0 if the run ends before that is known, or none does."""
        began = time.monotonic()
        while not self._over.wait(LOOK_SECONDS):
            seconds = time.monotonic() - began
            wall, processor, shares = self._inputs.spent
            if seconds >= AT_LEAST_SECONDS and shares >= AT_LEAST_SHARES:
                return worth(seconds * self._workers, wall / 1e9, processor / 1e9, self._workers, usable_cores())
        return 0

    def _fill(self) -> None:
        """Start readers in the places that are empty."""
        for number in range(self._inputs.readers):
            handle = self._handles.get(number)
            if handle is None or handle.ended:
                handle = WARM.handle(-1 - number, [memory.fd for memory in self._memories])
                self._handles[number] = handle
                self._inputs.note_pid(number, handle.pid)
                self._output.follow(handle.pipes)

    def _listen(self) -> None:
        """Carry what readers print, and see who has ended or is to be ended."""
        poller = select.poll()
        living = [(number, handle) for number, handle in self._handles.items() if not handle.ended]
        for _, handle in living:
            for fd in handle.watched:
                poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(1000 * LOOK_SECONDS)}
        given_up = self._inputs.given_up()
        gone = set(self._output.carry(ready))
        for number, handle in living:
            dead = handle.pidfd in ready or bool(gone & set(handle.pipes))
            if handle.channel.fileno() in ready and not dead:
                messages, goes_on = handle.heard()
                dead = not goes_on or any(message[0] == "failed" for message in messages)
            if dead or number == given_up:
                self._clear(number, handle)

    def _clear(self, number: int, handle: WorkerHandle) -> None:
        self._failed = self._failed + 1 if time.monotonic() - handle.born < 1.0 else 0
        self._inputs.note_pid(number, 0)
        self._output.forget(handle.pipes)
        with contextlib.suppress(OSError):
            handle.end()
