"""The readers of a run as the caller's process sees them: started, replaced, ended, from a thread of their own.

A reader that ends or hangs takes nothing with it: who computes reads by itself what it had begun. One that reads shares
is replaced. One that reads a stream is not: from where it was, the caller's process reads on.
"""

from __future__ import annotations

import functools
import math
import select
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.definition import checks
from phalanx.definition.data import Drawn, Samples
from phalanx.definition.fields import Definition
from phalanx.definition.streams import Dealer, Shown, Supply, supplied
from phalanx.engines.processes.environment import pack_recipe
from phalanx.engines.processes.handle import Output, WorkerHandle
from phalanx.engines.processes.serialization import unpack_bytes
from phalanx.engines.processes.starter import CAPABLE, WARM
from phalanx.engines.reading import STREAM_STEPS, Taking
from phalanx.engines.recovery.deadline import Stillness
from phalanx.errors import RunError, UsageError, WorkerError
from phalanx.plan.fold import Placement
from phalanx.seams import Engine, Framework
from phalanx.shared.inputs import GONE, MOST, Inputs
from phalanx.shared.memory import Memory
from phalanx.surroundings import interrupts
from phalanx.surroundings.presence import usable_cores

LOOK_SECONDS = 0.1
AT_LEAST_SECONDS, AT_LEAST_SHARES = 1.0, 16  # that are measured before readers are started
WORTH = 0.2  # of the time of those who compute: reading that takes less is left to them
WAITS = 0.5  # of the wall time of reading, in which no processor works for it
MOST_MEASURED = 16  # readers that are started by measure
FUTILE = 5  # readers that ended one after another within a second
STOPPED_SECONDS = 2.0  # that a reader may be stopped (SIGSTOP)
STILL_SECONDS = 60.0  # that one may take no processor time; who reads a stream may wait as long as it likes
FAREWELL_MILLISECONDS = 1000  # in which a stream may close what it holds


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
    readers = _own(definition, framework.name, {}, count)
    taking = Taking(readers.inputs)
    taking.close = weakref.finalize(taking, readers.close)
    return taking


def read_ahead(memories: Sequence[Memory], placement: Placement, count: int | None) -> Callable[[], None]:
    """Have readers work for the workers over these memories; what ends them."""
    if count == 0:
        return lambda: None
    environment, parcel, *_, memory = memories
    inputs = Inputs(memory, placement.replicas)
    return Readers((environment, parcel, memory), inputs, count, workers=placement.workers).close


def dealer(
    definition: Definition, engine: Engine, framework: str, readers: int | None, shown: Shown, *, anyway: bool
) -> Dealer:
    """Where a run's samples come from, as its data is a stream; see ``supplied``.

    ``readers``: more than none, and a process reads ahead; None, where it is not said: none does, as what a stream
    reads may be the caller's own, which it goes on to change.
    """
    found = supplied(definition, engine.run_state, engine.reading, shown, anyway=anyway)
    if readers and CAPABLE:
        supply = found.source
        assert isinstance(supply, Supply)
        left = None if definition.steps is None else definition.steps - engine.run_state.steps
        facts = {"stream": supply.state(), "left": (left, definition.epochs)}
        found.source = Ahead(supply, _own(definition, framework, facts, 1), shown, anyway=anyway)
    return found


def _own(definition: Definition, framework: str, facts: Mapping[str, Any], count: int) -> Readers:
    """Readers of this process."""
    memories = environment, parcel, memory = Memory(0), Memory(0), Memory(0)
    stream = definition.stream is not None
    try:
        pack_recipe(definition, framework, environment, parcel, facts)
        inputs = Inputs(memory, 1, STREAM_STEPS) if stream else Inputs(memory, definition.replicas)
        return Readers(memories, inputs, count, own=True, stream=stream)
    except BaseException as error:
        for each in memories:
            each.close()
        if stream and isinstance(error, UsageError):
            raise UsageError(f"{error}; without readers=, a stream is read in this process") from error
        raise


class Readers:
    """Readers over one memory, and the thread that tends them.

    Parameters
    ----------
    memories : sequence of Memory
        What readers inherit: the environment and the parcel, as workers do, and the memory of ``inputs``.
    inputs : Inputs
    count : int or None
        How many readers; None: what the first steps say.
    workers : int
        How many compute here.
    own : bool
        Whether the memories are closed with this.
    stream : bool
        Whether it is a stream that is read.

    Attributes
    ----------
    error : Exception or None
        What a reader told that could not go on, or what kept one from starting.
    """

    def __init__(
        self, memories: Sequence[Memory], inputs: Inputs, count: int | None, *, workers: int = 1, own: bool = False,
        stream: bool = False,
    ) -> None:  # fmt: skip
        self.inputs = inputs
        self.error: Exception | None = None
        self._memories, self._workers, self._own, self._stream = memories, workers, own, stream
        self._alive: dict[int, tuple[WorkerHandle, Stillness]] = {}
        self._done = set[int]()  # those that have read everything, or that nobody can replace
        self._output = Output()
        self._failed = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tend, args=(count,), name="phalanx-readers", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the readers that are alive."""
        return tuple(handle.pid for handle, _ in list(self._alive.values()))

    def close(self) -> None:
        """End them."""
        self._over.set()
        if self._thread is not threading.current_thread():  # where garbage is collected in it
            self._thread.join()
        for memory in self._memories if self._own else ():
            memory.close()
        if not (self._stream or self.inputs.readers or self.error is None):
            checks.warn(f"nothing was read ahead in the end (same answer): {self.error}")

    def _tend(self, count: int | None) -> None:
        """What the thread does."""
        try:
            self.inputs.readers = min(self._measured() if count is None else count, MOST)
            while self.inputs.readers and not self._over.is_set():
                self._fill()
                self._listen()
                if self._failed == FUTILE:
                    raise self.error or RunError("readers ended again and again")
        except Exception as error:  # no process can be started, say: nothing depends on readers
            self.error, self.inputs.readers = error, 0
        finally:
            self._end()

    def _measured(self) -> int:
        """How many readers pay, as the first steps were; 0 if the run ends before that is known, or none does."""
        began = time.monotonic()
        while not self._over.wait(LOOK_SECONDS):
            seconds = time.monotonic() - began
            wall, processor, shares = self.inputs.spent
            if seconds >= AT_LEAST_SECONDS and shares >= AT_LEAST_SHARES:
                return worth(seconds * self._workers, wall / 1e9, processor / 1e9, self._workers, usable_cores())
        return 0

    def _fill(self) -> None:
        """Start readers in the places that are empty."""
        for number in set(range(self.inputs.readers)) - self._alive.keys() - self._done:
            handle = WARM.handle(-1 - number, [memory.fd for memory in self._memories])
            self._alive[number] = handle, Stillness(handle.pid)
            self.inputs.note_pid(number, handle.pid)
            self._output.follow(handle.pipes)

    def _listen(self) -> None:
        """Carry what readers print, and see who has ended or is to be ended."""
        poller = select.poll()
        for fd in [fd for handle, _ in self._alive.values() for fd in handle.watched]:
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(1000 * LOOK_SECONDS)}
        gone = set(self._output.carry(ready))
        for number, (handle, stillness) in list(self._alive.items()):
            dead = handle.pidfd in ready or bool(gone & set(handle.pipes))
            if handle.channel.fileno() in ready:
                messages, goes_on = handle.heard()
                dead = dead or not goes_on
                for kind, *facts in messages:
                    if kind == "done":
                        self._done.add(number)
                    else:
                        self.error = facts[0]
            still, patience = stillness.seconds(), math.inf if self._stream else STILL_SECONDS
            if dead or still > (STOPPED_SECONDS if stillness.stopped else patience):
                self._clear(number, handle)

    def _clear(self, number: int, handle: WorkerHandle) -> None:
        self._output.forget(handle.pipes)
        handle.end()
        if self._stream:
            self._done.add(number)
        elif number not in self._done:
            self._failed = self._failed + 1 if time.monotonic() - handle.born < 1.0 else 0
        del self._alive[number]
        self.inputs.note_pid(number, GONE)

    def _end(self) -> None:
        """End all; an iterable that can be closed is, if that takes no longer than a second."""
        gone = select.poll()
        for handle, _ in self._alive.values():
            handle.dismiss()
            if self._stream and handle.pidfd is not None:
                gone.register(handle.pidfd, select.POLLIN)
                gone.poll(FAREWELL_MILLISECONDS)
            self._output.forget(handle.pipes)
            handle.end()


class Ahead:
    """Draws what another process reads of a stream; where that ends, this one goes on by itself.

    Parameters
    ----------
    supply : Supply
        The stream in this process, where the run begins.
    readers : Readers
        The one that begins there, too.
    shown, anyway
        As ``Supply.go_on`` takes them.
    """

    def __init__(self, supply: Supply, readers: Readers, shown: Shown, *, anyway: bool) -> None:
        self._supply, self._readers = supply, readers
        self._go_on = functools.partial(supply.go_on, shown=shown, anyway=anyway)
        self._here = True  # whether the supply is where the run is: before the reader's first batch, and after its end
        self._taken = 0
        self._before = self._after = supply.state()  # around what was drawn
        self._close = weakref.finalize(self, readers.close)

    @property
    def epoch(self) -> int:
        """See ``Supply.epoch``."""
        return self._supply.epoch if self._here else self._after["epoch"]

    def next(self) -> Drawn:
        """See ``Supply.next``."""
        if self._close.alive:
            with interrupts.user_code():
                content = self._readers.inputs.take(self._taken, 0, wait=True)
            if content is not None:
                drawn, state, told = unpack_bytes(content)
                self._before, self._after, self._taken = self._after, state, self._taken + 1
                if self._here:
                    self._supply.close()
                    self._here = False
                for message in told:
                    warnings.warn_explicit(*message)
                return drawn
            self._read_here()
        return self._supply.next()

    def state(self, *, undone: bool) -> dict[str, Any]:
        """See ``Supply.state``."""
        if self._here:
            return self._supply.state(undone=undone)
        return self._before if undone else self._after

    def close(self) -> None:
        """End the other process, and let go of the iterable."""
        self._close()
        self._supply.close()

    def _read_here(self) -> None:
        self._close()
        error = self._readers.error
        if not isinstance(error, WorkerError):  # which the stream will raise here, too
            why = "it was killed, or ended by itself" if error is None else str(error)
            what = "the stream is read in this process from here on, not in one of its own (same answer)"
            checks.warn(f"{what}: {why}")
        if not self._here:
            self._go_on(self._after)
            self._here = True
