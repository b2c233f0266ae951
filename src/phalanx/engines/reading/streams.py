"""A stream that a process of its own reads while steps are computed: a step ahead, and what a socket holds besides.

Nobody depends on that process. If it ends, or what it reads raises, the caller's goes on by itself, from the step that
was drawn last: so what a stream raises is raised as ever.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.checkpoint.resume import ResumeState
from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.definition.streams import Drawn
from phalanx.definition.streams.again import Shown
from phalanx.definition.streams.supply import STATE, Dealer, Supply, supplied
from phalanx.engines.processes.environment import pack_recipe
from phalanx.engines.processes.handle import Output, WorkerHandle
from phalanx.engines.processes.serialization import unpack_bytes
from phalanx.engines.processes.starter import CAPABLE, WARM
from phalanx.engines.recovery.deadline import Stillness
from phalanx.errors import UsageError, WorkerError
from phalanx.seams import Engine
from phalanx.shared.memory import Memory, aligned
from phalanx.surroundings import interrupts

LOOK_SECONDS = 1.0
STOPPED_SECONDS = 2.0  # that it may be stopped (SIGSTOP) while it is waited for
MESSAGE_SECONDS = 10  # in which more of a message comes that has begun to
FAREWELL_MILLISECONDS = 1000  # in which a stream may close what it holds


def dealer(
    definition: Definition, engine: Engine, past: ResumeState, readers: int | None, shown: Shown, *, anyway: bool
) -> Dealer | None:
    """Where a run's samples come from, if its data is a stream; see ``supplied``.

    ``readers``: more than none, and a process reads ahead; None, where it is not said: none does, as what a stream
    reads may be the caller's own, which it goes on to change.
    """
    run_state = engine.run_state
    supply = supplied(definition, run_state, engine.reading, shown, anyway=anyway)
    if supply is None or not readers or not CAPABLE:
        return supply

    def again(state: Mapping[str, Any]) -> Supply:
        other = Supply(definition, engine.reading)
        other.go_on(state, anyway=anyway, shown=shown)
        return other

    step = run_state.steps
    ahead = Ahead(supply, again, StreamReader(definition, past.framework, supply.state(step), step), step)
    run_state.stream = lambda: {STATE: ahead.state(run_state.steps)}
    return ahead


class Ahead:
    """Deals a stream out as ``Supply`` does, from what another process reads.

    Parameters
    ----------
    supply : Dealer
        The stream in this process, where the run begins.
    again : callable
        Makes another one, at a state.
    reader : StreamReader
        Begins where ``supply`` is.
    step : int
        The first one.
    """

    def __init__(
        self, supply: Dealer, again: Callable[[Mapping[str, Any]], Dealer], reader: StreamReader, step: int
    ) -> None:
        self._supply: Dealer | None = supply  # in charge while nothing has come from the reader, and after its end
        self._again = again
        self._reader: StreamReader | None = reader
        self._drawn: Drawn | None = None
        self._step = -1
        self._before = self._after = supply.state(step)  # around what was drawn

    def draw(self, step: int) -> Drawn:
        """See ``Supply.draw``."""
        if self._reader is not None and not self._pending(step):
            found = self._reader.next()
            if found is None:
                self._read_here()
            else:
                self._let_go()
                self._before, self._step = self._after, step
                self._drawn, self._after = found
        if self._reader is None:
            assert self._supply is not None
            return self._supply.draw(step)
        assert self._drawn is not None
        return self._drawn

    def postpone(self, step: int) -> None:
        """See ``Supply.postpone``."""
        if self._supply is not None:
            self._supply.postpone(step)
        elif self._pending(step):
            self._step = step + 1

    def epochs(self, steps: int) -> int:
        """See ``Supply.epochs``."""
        if self._supply is not None:
            return self._supply.epochs(steps)
        assert self._drawn is not None
        return self._drawn.epoch + (self._drawn.last and not self._pending(steps))

    def state(self, steps: int) -> dict[str, Any]:
        """See ``Supply.state``."""
        if self._supply is not None:
            return self._supply.state(steps)
        return self._before if self._pending(steps) else self._after

    def close(self) -> None:
        """End the other process, and let go of the iterable."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        self._let_go()

    def _pending(self, step: int) -> bool:
        return self._drawn is not None and self._step >= step

    def _let_go(self) -> None:
        supply, self._supply = self._supply, None
        if supply is not None:
            supply.close()

    def _read_here(self) -> None:
        """Go on in this process."""
        reader, self._reader = self._reader, None
        assert reader is not None
        reader.close()
        if not isinstance(reader.error, WorkerError):  # which the stream will raise here, too
            why = "it was killed, or ended by itself" if reader.error is None else str(reader.error)
            what = "the stream is read in this process from here on, not in one of its own (same answer)"
            checks.warn(f"{what}: {why}")
        if self._supply is None:
            self._supply = self._again(self._after)


class StreamReader:
    """The process that reads, as the caller's sees it.

    Parameters
    ----------
    definition : Definition
        Its data is a stream.
    framework : str
    state : mapping
        Where to begin, as ``Supply.state`` gave it.
    step : int
        The first one.

    Attributes
    ----------
    error : Exception or None
        What it met, if it told anything.
    close : callable
        Ends it, once.

    Raises
    ------
    UsageError
        The stream cannot be sent there.
    """

    def __init__(self, definition: Definition, framework: str, state: Mapping[str, Any], step: int) -> None:
        self.error: Exception | None = None
        self._output = Output()
        memories = environment, parcel = Memory(0), Memory(0)
        try:
            pack_recipe(definition, framework, environment, parcel, {"stream": dict(state), "step": step})
            self._handle = WARM.handle(-1, [environment.fd, parcel.fd])
        except UsageError as error:
            _free(memories)
            raise UsageError(f"{error}; without readers=, a stream is read in this process") from error
        except BaseException:
            _free(memories)
            raise
        self._output.follow(self._handle.pipes)
        with socket.socket(fileno=os.dup(self._handle.channel.fileno())) as end:  # it may stop in a message, too
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MESSAGE_SECONDS, 0))
        self.close = weakref.finalize(self, _end, self._handle, self._output, memories)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._handle.pid

    def next(self) -> tuple[Drawn, dict[str, Any]] | None:
        """What was drawn for the next step, and the state after it; None if nothing comes any more."""
        handle, poller, stillness = self._handle, select.poll(), Stillness(self.pid)
        for fd in handle.watched:
            poller.register(fd, select.POLLIN)
        channel = handle.channel.fileno()
        while True:
            with interrupts.user_code():
                ready = {fd for fd, _ in poller.poll(1000 * LOOK_SECONDS)}
            for fd in self._output.carry(ready):
                poller.unregister(fd)
            if channel not in ready:
                if handle.pidfd in ready or (stillness.seconds() > STOPPED_SECONDS and stillness.stopped):
                    return None
                continue
            try:
                kind, *facts = handle.message()
            except (EOFError, OSError):
                return None
            if kind == "drawn":
                found: tuple[Drawn, dict[str, Any]] = unpack_bytes(aligned(facts[0]))
                return found
            if kind == "warning":
                self._output.warn(*facts)
            elif kind == "failed":
                self.error = facts[0]
                return None


def _end(handle: WorkerHandle, output: Output, memories: Sequence[Memory]) -> None:
    """End the process; an iterable that can be closed is, if that takes no longer than a second."""
    if not handle.ended:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle.channel.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # it may be writing
        if handle.pidfd is not None:
            gone = select.poll()
            gone.register(handle.pidfd, select.POLLIN)
            gone.poll(FAREWELL_MILLISECONDS)
        output.forget(handle.pipes)
        handle.end()
    _free(memories)


def _free(memories: Sequence[Memory]) -> None:
    for memory in memories:
        memory.close()
