"""Deals a stream out in batches, and says where that is, so that a later run can go on there.

A sample is read once. It waits in the shuffle buffer, if there is one, and then among those that are ready; the samples
of a step are kept until that step is done. Samples that wait are written down by their numbers alone: a run that goes
on reads them again, from the last mark that lies before all of them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from phalanx.definition.fields import Definition
from phalanx.definition.plain import Each, check_like, taking_over
from phalanx.definition.streams import Drawn, Stream
from phalanx.definition.streams.again import Item, Place, Shown, read_again
from phalanx.definition.streams.reading import NOTHING, Mark, Reading
from phalanx.errors import SnapshotError, UsageError, WorkerError
from phalanx.plan import buffer_slot

STATE = "data.stream"  # its name among the states of callbacks, which are called as classes are
LIKE = {"epoch": int, "before": int, "given": int, "read": int}
WAITING = {"ready": Each(int), "slots": Each(int), "hash": str, "mark": [int, str, object]}  # where some were read


def supplied(
    definition: Definition,
    run_state: Any,
    surroundings: AbstractContextManager[Any],
    shown: Shown,
    *,
    anyway: bool = False,
) -> Supply | None:
    """Where a run's samples come from, if its data is a stream; goes on where an earlier run was.

    Parameters
    ----------
    definition : Definition
    run_state : RunState
        Gets to know how to tell where the stream is.
    surroundings, anyway, shown
        As ``Supply`` and its ``go_on`` take them.
    """
    if definition.stream is None:
        return None
    supply = Supply(definition, surroundings)
    state = run_state.callbacks.pop(STATE, None)
    if state is not None or (run_state.resumed_from is not None and not anyway):
        supply.go_on(state or {}, anyway=anyway, shown=shown)
        if supply.dealt > run_state.samples and not definition.drop_last:  # which leaves some out
            raise SnapshotError(f"{STATE} in the snapshot has dealt {supply.dealt} samples, of {run_state.samples}")
    run_state.stream = lambda: {STATE: supply.state(run_state.steps)}
    return supply


class Dealer(Protocol):
    """Deals a stream out in batches, step after step, and says where that is."""

    def draw(self, step: int) -> Drawn:
        """The samples of a step; the same ones until it is done, and steps beyond it are asked for."""
        ...

    def postpone(self, step: int) -> None:
        """The caller brings a batch for this step, so that what was drawn for it is of the one after."""
        ...

    def epochs(self, steps: int) -> int:
        """How many epochs are over after so many steps."""
        ...

    def state(self, steps: int) -> dict[str, Any]:
        """Where the stream is after so many steps, in plain values."""
        ...

    def close(self) -> None:
        """Let go of the iterable."""
        ...


class Supply:
    """Reads a stream for a run, in this process.

    Parameters
    ----------
    definition : Definition
        Its data is a stream.
    surroundings : context manager
        Inside, generators and threads are the run's.
    """

    def __init__(self, definition: Definition, surroundings: AbstractContextManager[Any]) -> None:
        assert isinstance(definition.data, Stream)
        self._definition, self._stream, self._surroundings = definition, definition.data, surroundings
        self._reading: Reading | None = None
        self._epoch = 0
        self._before = 0  # samples read in earlier epochs
        self._given = 0  # samples that left the buffer, in all epochs
        self._buffer: list[Item] = []
        self._ready: deque[Item] = deque()
        self._drawn: Drawn | None = None
        self._drawn_items: list[Item] = []
        self._step = -1  # of what was drawn
        self._over = False  # whether the epoch ends with what was drawn
        self._marks: deque[Mark] = deque([Mark(0, NOTHING, None)])

    def draw(self, step: int) -> Drawn:
        """The samples of a step; the same ones until it is done, and steps beyond it are asked for.

        Raises
        ------
        WorkerError
            The iterable raised.
        UsageError
            An epoch has too few samples.
        """
        if not self._pending(step):
            self._drawn, self._drawn_items = None, []
            with self._surroundings:
                try:
                    self._drawn = self._next()
                except WorkerError as error:
                    error.step = step
                    raise
        self._step = step
        assert self._drawn is not None
        return self._drawn

    def postpone(self, step: int) -> None:
        """The caller brings a batch for this step, so that what was drawn for it is of the one after."""
        if self._pending(step):
            self._step = step + 1

    def epochs(self, steps: int) -> int:
        """How many epochs are over after so many steps."""
        ended = self._drawn is not None and self._drawn.last and not self._pending(steps)
        return self._epoch + ended

    def state(self, steps: int) -> dict[str, Any]:
        """Where the stream is after so many steps, in plain values."""
        waiting = self._drawn_items if self._pending(steps) else []
        if self._reading is None or (not waiting and self._drawn is not None and self._drawn.last):
            return {"epoch": self.epochs(steps), "before": self._total, "given": self._given, "read": 0}
        ready = [number for number, *_ in [*waiting, *self._ready]]
        slots = [number for number, *_ in self._buffer]
        mark = self._mark_before(min([*ready, *slots, max(0, self._reading.number - 1)]))
        return {
            "epoch": self._epoch, "before": self._before, "given": self._given, "read": self._reading.number,
            "ready": ready, "slots": slots, "hash": self._reading.hash,
            "mark": [mark.number, mark.hash, mark.state],
        }  # fmt: skip

    @taking_over("the place in the stream")
    def go_on(self, state: Mapping[str, Any], *, anyway: bool, shown: Shown) -> None:
        """Be where an earlier run was; what waits is read again.

        Parameters
        ----------
        state : mapping
            As ``state`` gave it.
        anyway : bool
            Whether samples that are not those of the earlier run only warn.
        shown : callable
            Shows how far reading is: ``shown(numbers, title)``.

        Raises
        ------
        UsageError
            The stream gives other samples, or has fewer epochs.
        SnapshotError
            This is no such state.
        """
        check_like(state, {**LIKE, **(WAITING if state and state.get("read") else {})}, STATE)
        self._epoch, self._before, read = state["epoch"], state["before"], state["read"]
        ready, slots = state.get("ready", []), state.get("slots", [])
        waiting, marks = {*ready, *slots}, [Mark(0, NOTHING, None)]
        if state["given"] != self._before + read - len(slots) or not all(0 <= number < read for number in waiting):
            raise ValueError(f"{STATE} has {sorted(waiting)} waiting, of {read} samples that were read")
        if read and state["mark"][0]:
            marks.insert(0, Mark(*state["mark"]))
        epochs = self._definition.epochs
        if epochs is not None and self._epoch > epochs:
            raise UsageError(f"epochs is {epochs}, but the run that is resumed has done {self._epoch}; raise epochs")
        if read:
            place = Place(self._definition, self._stream, self._epoch, self._before, read, state["hash"])
            with self._surroundings:
                self._reading, mark, items = read_again(place, marks, waiting, anyway=anyway, shown=shown)
            self._marks = deque([mark])
            self._ready.extend(items[number] for number in ready if number in items)
            self._buffer = [items[number] for number in slots if number in items]
            self._over = self._reading.ended and not items  # fewer samples than there were
        self._given = self._total - len(self._buffer)

    def close(self) -> None:
        """Let go of the iterable."""
        if self._reading is not None:
            with self._surroundings:
                self._reading.close()
            self._reading = None

    @property
    def dealt(self) -> int:
        """How many samples were, in all epochs."""
        return self._given - len(self._ready)

    @property
    def _total(self) -> int:
        return self._before + (0 if self._reading is None else self._reading.number)

    def _pending(self, step: int) -> bool:
        """Whether what was drawn is of a step that is not done."""
        return self._drawn is not None and self._step >= step

    def _next(self) -> Drawn:
        definition = self._definition
        size, least = definition.global_batch, definition.global_batch if definition.drop_last else 1
        if self._reading is None or self._over:
            self._begin()
        self._over = False
        assert self._reading is not None
        self._mark()
        self._fill(size + least)
        if len(self._ready) < least:
            raise self._too_few(least)
        items = [self._ready.popleft() for _ in range(min(size, len(self._ready)))]
        told = hashlib.sha256(b"".join(bytes.fromhex(item[2]) for item in items)).hexdigest()
        self._drawn_items = items
        numbers, samples = tuple(item[0] for item in items), [item[1] for item in items]
        self._over = len(self._ready) < least
        return Drawn(self._epoch, numbers, samples, told, self._over)

    def _begin(self) -> None:
        """Begin an epoch: the first, or the one after that which is over."""
        previous = None
        if self._reading is not None:
            previous = self._reading.iterable
            self._epoch, self._before = self._epoch + 1, self._total
            self._reading.close()
        self._buffer, self._marks = [], deque([Mark(0, NOTHING, None)])
        self._ready.clear()
        self._reading = Reading(self._definition, self._stream, self._epoch, self._before)
        if self._reading.iterator is previous:
            raise UsageError(
                f"make_iterable returned the same {type(previous).__name__} again for epoch {self._epoch}; each epoch "
                "reads an iterable from its beginning, so make a new one in each call"
            )

    def _mark(self) -> None:
        """Note where the iterable is, now and then, and forget what lies before a mark that is early enough."""
        reading = self._reading
        assert reading is not None
        apart = max(self._definition.global_batch, self._stream.shuffle_buffer)
        if reading.number - self._marks[-1].number < apart:
            return
        mark = reading.mark()
        if mark is not None:
            self._marks.append(mark)
            needed = min([number for number, *_ in [*self._ready, *self._buffer]], default=reading.number)
            while len(self._marks) > 1 and self._marks[1].number <= min(needed, reading.number - 1):
                self._marks.popleft()

    def _mark_before(self, number: int) -> Mark:
        return next(mark for mark in reversed(self._marks) if mark.number <= number)

    def _too_few(self, least: int) -> UsageError:
        assert self._reading is not None
        if least == 1:
            return UsageError(
                f"the stream has no samples in epoch {self._epoch}: what make_iterable returned yielded nothing; it is "
                "called once per epoch, and must return an iterable that begins anew"
            )
        return UsageError(
            f"drop_last is True and a batch has {least} samples, but epoch {self._epoch} of the stream has "
            f"{self._reading.number}: every batch would be dropped; lower batch_size, or set drop_last=False"
        )

    def _fill(self, count: int) -> None:
        """Read until so many samples are ready, or the epoch has no more."""
        reading, seed = self._reading, self._definition.seed
        assert reading is not None
        most = self._stream.shuffle_buffer
        while len(self._ready) < count:
            while not reading.ended and len(self._buffer) < max(1, most):
                sample = reading.next()
                if not reading.ended:
                    self._buffer.append((reading.number - 1, sample, reading.hash))
            if not self._buffer:
                return
            slot = buffer_slot(seed, self._given, len(self._buffer))
            self._buffer[slot], self._buffer[-1] = self._buffer[-1], self._buffer[slot]
            self._ready.append(self._buffer.pop())
            self._given += 1
