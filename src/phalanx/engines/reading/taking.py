"""Taking what was read ahead, in a process that computes replicas."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from phalanx.definition.batches import Collated
from phalanx.definition.fields import Definition
from phalanx.engines.processes.serialization import unpack_bytes
from phalanx.plan import Indices
from phalanx.shared.inputs import Inputs
from phalanx.shared.memory import Memory, aligned


class Taking:
    """Stands between a share and what reads it.

    Parameters
    ----------
    memory : Memory
        What ``Inputs`` is laid over.
    definition : Definition
    close : callable
        Ends the readers, if they are this process's.
    """

    def __init__(self, memory: Memory, definition: Definition, close: Callable[[], None] = lambda: None) -> None:
        self._inputs = Inputs(memory, definition.replicas)
        self.close = close
        self._again = definition.phases is not None  # a step asks for its shares in each of them
        self._kept: tuple[int, dict[int, memoryview | None]] = (-1, {})  # step, what was taken for its replicas
        self._last: tuple[int, int, dict[int, Any]] = (-1, -1, {})  # step, replica, what is left of its samples

    def read(self, step: int, replica: int, share: Indices, read: Callable[[Indices], Any], samples: Indices) -> Any:
        """What ``read(samples)`` gives, for all samples of a share or a part of them."""
        known = self._last
        if known[:2] != (step, replica) or not all(int(index) in known[2] for index in samples):
            content = self._taken(step, replica)
            if content is None:
                return self._timed(replica, read, samples)
            found = unpack_bytes(content)
            if len(samples) == len(share):
                return found
            if isinstance(found, Collated):
                return self._timed(replica, read, samples)
            known = self._last = step, replica, dict(zip(map(int, share), found, strict=True))
        return [known[2].pop(int(index)) for index in samples]

    def _taken(self, step: int, replica: int) -> memoryview | None:
        """What a reader has put there, as bytes that nobody else has."""
        if not self._again:
            return self._inputs.take(step, replica)
        if self._kept[0] != step:
            self._kept = (step, {})
        kept = self._kept[1]
        if replica not in kept:
            kept[replica] = self._inputs.take(step, replica)
        content = kept[replica]
        return None if content is None else aligned(content)

    def _timed(self, replica: int, read: Callable[[Indices], Any], samples: Indices) -> Any:
        wall, processor = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return read(samples)
        finally:
            self._inputs.note_spent(replica, time.perf_counter_ns() - wall, time.thread_time_ns() - processor)
