"""The readers of a run as the caller's process sees them: started, replaced, ended, from a thread of their own.

Nothing is lost when a reader dies. The process that computes reads what the reader had begun, and ends a reader that
hangs. Another reader replaces it.
"""

from __future__ import annotations

import functools
import select
import threading
import time
from collections.abc import Sequence

from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.engines.processes.handle import Output, WorkerHandle
from phalanx.engines.processes.serialization import pack_recipe
from phalanx.engines.processes.starter import WARM
from phalanx.engines.reading import Taken
from phalanx.errors import RunError
from phalanx.seams import Framework
from phalanx.shared.inputs import GONE, Inputs
from phalanx.shared.memory import Memory

READER = "phalanx.engines.reading"
LOOK_SECONDS = 0.1
FUTILE = 5  # readers in a row that could not go on, or died within a second


def ahead_here(definition: Definition, framework: Framework, count: int) -> Readers | None:
    """``count`` readers of what this process computes; None where reading runs no user code."""
    if definition.source is None or not definition.source.random:
        return None
    memories = environment, recipe_memory, memory = Memory(0), Memory(0), Memory(0)
    try:
        WARM.prepare(definition)
        pack_recipe(definition, framework.name, environment, recipe_memory, {})
        return Readers(memories, Inputs(memory, definition.replicas), count, own=True)
    except BaseException:
        for each in memories:
            each.close()
        raise


class Readers:
    """Readers over one memory, and the thread that tends them.

    Parameters
    ----------
    memories : sequence of Memory
        What readers inherit: the environment and the recipe, as workers do, and the memory of ``inputs``.
    inputs : Inputs
    count : int
        How many readers.
    own : bool
        Whether ``close`` closes the memories.

    Attributes
    ----------
    taken : callable
        ``taken(step, replica, reader)`` reads a share that one of them may have read.
    error : Exception or None
        The error of a reader that could not go on, or that kept a reader from starting.
    """

    def __init__(self, memories: Sequence[Memory], inputs: Inputs, count: int, *, own: bool = False) -> None:
        self.inputs = inputs
        self.taken = functools.partial(Taken, inputs)
        self.error: Exception | None = None
        self._memories, self._own = memories, own
        self._inherited = [memory.fd for memory in memories]
        self._alive: dict[int, WorkerHandle] = {}
        self._done = set[int]()  # those that have read everything
        self._output = Output()
        self._failed = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tend, args=(count,), name="phalanx-readers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the readers."""
        self._over.set()
        if self._thread is not threading.current_thread():  # garbage may be collected there
            self._thread.join()
        for memory in self._memories if self._own else ():
            memory.close()
        if not self.inputs.readers and self.error is not None:
            checks.warn(f"nothing was read ahead in the end (same answer): {self.error}")

    def _tend(self, count: int) -> None:
        """Keep readers running until ``close``; the thread runs this."""
        try:
            self.inputs.readers = count
            while self.inputs.readers and not self._over.is_set():
                self._fill()
                self._listen()
                if self._failed >= FUTILE:  # several may die between two looks
                    raise self.error or RunError("readers ended again and again")
        except Exception as error:  # no process can be started, say: nothing depends on readers
            self.error, self.inputs.readers = error, 0
        finally:
            self._end()

    def _fill(self) -> None:
        """Start the readers that are missing."""
        for number in set(range(self.inputs.readers)) - self._alive.keys() - self._done:
            handle = self._alive[number] = WorkerHandle(number, self._inherited, READER)
            self.inputs.note_pid(number, handle.pid)
            self._output.follow(handle.pipes)

    def _listen(self) -> None:
        """Carry what readers print and take their messages; clear away those that have ended."""
        poller = select.poll()
        for fd in [fd for handle in self._alive.values() for fd in handle.watched]:
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(1000 * LOOK_SECONDS)}
        gone = set(self._output.carry(ready))
        for number, handle in list(self._alive.items()):
            broken, dead = False, handle.pidfd in ready or bool(gone & set(handle.pipes))
            if handle.channel.fileno() in ready:
                messages, goes_on = handle.heard()
                dead = dead or not goes_on
                for kind, *facts in messages:
                    if kind == "done":
                        self._done.add(number)
                    else:
                        self.error, broken, dead = facts[0], True, True
            if dead:
                self._clear(number, handle, broken=broken)

    def _clear(self, number: int, handle: WorkerHandle, *, broken: bool) -> None:
        self._output.forget(handle.pipes)
        handle.end()
        if number not in self._done:
            # On a loaded machine one that cannot begin may take long to say so, each time.
            self._failed = self._failed + 1 if broken or time.monotonic() - handle.born < 1.0 else 0
        del self._alive[number]
        self.inputs.note_pid(number, GONE)

    def _end(self) -> None:
        """End all readers."""
        for handle in self._alive.values():
            self._output.forget(handle.pipes)
            handle.end()
