"""Deals out a stream in batches, and keeps its position, so that a later run can go on there.

A ``Supply`` knows which step has which batch. Where the batches come from is its dealer's: ``Whole`` has one reader and
cuts what it reads into shares, ``shards.Sharded`` has logical readers for each replica. The samples of a step are kept
until that step is done.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from phalanx.definition.batches import Drawn
from phalanx.definition.fields import Definition
from phalanx.definition.passes import LIKE, Item, Line, Opened, Opener, Pass, Readings, Shown, check_epoch, refuse
from phalanx.definition.plain import check_like, taking_over
from phalanx.definition.shards import Dealing, Sharded
from phalanx.errors import SnapshotError, UsageError, WorkerError

STATE = "data.stream"  # its name among the states of callbacks, which have names of classes
PLACE = {"epoch": int, "before": int, "given": int, "read": int}


class Dealer(Protocol):
    """Where a supply's batches come from.

    Attributes
    ----------
    epoch : int
        That of the next batch, or of the last one.
    """

    epoch: int

    def next(self) -> Drawn | Dealing:
        """The next batch. On several hosts each process reads its part of it, and hears of the others'."""
        ...

    def state(self, waiting: Drawn | Dealing | None) -> dict[str, Any]:
        """The position in plain values; ``waiting``: a batch that was dealt, of a step that is not done."""
        ...

    def go_on(self, state: Mapping[str, Any], shown: Shown, *, anyway: bool) -> int:
        """Begin at an earlier run's position; returns how many samples that run had dealt."""
        ...

    def close(self) -> None:
        """Let go of what is read."""
        ...


class Supply:
    """Deals out a stream in batches, and knows which step has which.

    Parameters
    ----------
    dealer : Dealer
    surroundings : context manager
        Inside, generators and threads are the run's. Re-entrant.
    ended : callable
        Called when nothing is read any more.
    """

    def __init__(
        self, dealer: Dealer, surroundings: AbstractContextManager[Any], ended: Callable[[], object] = bool
    ) -> None:
        self._dealer, self._surroundings, self._ended = dealer, surroundings, ended
        self._batch: Drawn | Dealing | None = None  # what was drawn last
        self._step = -1  # the step that has it

    def draw(self, step: int) -> Drawn | Dealing:
        """The samples of a step: the same ones until it is done and a later step is asked for.

        Raises
        ------
        WorkerError
            The iterable raised.
        UsageError
            An epoch has too few samples.
        """
        batch = self._batch
        if batch is None or self._step < step:
            self._batch = None
            try:
                with self._surroundings:
                    batch = self._batch = self._dealer.next()
            except WorkerError as error:
                error.step = step
                raise
        self._step = step
        return batch

    @property
    def drawn(self) -> Drawn | None:
        """The batch that was drawn last, as all processes know it."""
        return self._batch.drawn if isinstance(self._batch, Dealing) else self._batch

    def postpone(self, step: int) -> None:
        """The caller brings a batch for this step, so the batch that was drawn for it goes to the next one."""
        if self._pending(step):
            self._step = step + 1

    def epochs(self, steps: int) -> int:
        """How many epochs are over after so many steps."""
        drawn = self.drawn
        return self._dealer.epoch + (drawn is not None and drawn.last and not self._pending(steps))

    def state(self, steps: int) -> dict[str, Any]:
        """The stream's position after so many steps, in plain values."""
        return self._dealer.state(self._batch if self._pending(steps) else None)

    @taking_over("the place in the stream")
    def go_on(self, state: Mapping[str, Any], shown: Shown, *, anyway: bool = False) -> int:
        """Begin at an earlier run's position, reading again the samples that wait; returns how many that run had dealt.

        Parameters
        ----------
        state : mapping
            As ``state`` gave it.
        shown : callable
        anyway : bool
            Whether to warn, not raise, if the samples are not those of the earlier run.

        Raises
        ------
        UsageError
            The stream gives other samples, or has fewer epochs.
        SnapshotError
            ``state`` is not that of a stream.
        """
        with self._surroundings:
            return self._dealer.go_on(state, shown, anyway=anyway)

    def close(self) -> None:
        """Let go of the iterable."""
        with self._surroundings:
            self._dealer.close()
        self._ended()

    def _pending(self, step: int) -> bool:
        """Whether the batch that was drawn is of a step that is not done."""
        return self._batch is not None and self._step >= step


class Whole:
    """Deals what one reader reads, batch after batch. Implements ``Dealer``.

    Parameters
    ----------
    definition : Definition
    opened : callable
    """

    def __init__(self, definition: Definition, opened: Opened) -> None:
        self._definition, self._opened = definition, opened
        self._line: Line | None = None
        self.epoch = 0
        self._before = 0  # samples read in earlier epochs
        self._given = 0  # samples that left the buffer in them
        self._over = False  # whether the epoch ends with what was drawn
        self._drawn: list[Item] = []

    def next(self) -> Drawn:
        """Read on, and deal out the next batch."""
        size = self._definition.global_batch
        least = size if self._definition.drop_last else 1
        self._drawn = []
        line = self._begun()
        line.mark()
        if line.fill(size + least) < least:
            raise self._too_few(line, least)
        self._drawn = items = [line.ready.popleft() for _ in range(min(size, len(line.ready)))]
        self._over = len(line.ready) < least
        digest = hashlib.sha256(b"".join(bytes.fromhex(item[2]) for item in items)).hexdigest()
        return Drawn(self.epoch, tuple(item[0] for item in items), [item[1] for item in items], digest, self._over)

    def state(self, waiting: Any) -> dict[str, Any]:
        drawn = self._drawn if waiting is not None else []
        if self._line is None or (self._over and not drawn):
            return {"epoch": self.epoch + self._over, "before": self._total, "given": self._total_given, "read": 0}
        place = {"epoch": self.epoch, "before": self._before, "given": self._total_given}
        return {**place, **self._line.state(drawn)}

    def go_on(self, state: Mapping[str, Any], shown: Shown, *, anyway: bool) -> int:
        check_like(state, {**PLACE, **(LIKE if state and state.get("read") else {})}, STATE)
        self.epoch, self._before, read = state["epoch"], state["before"], state["read"]
        slots = state.get("slots", [])
        if state["given"] != self._before + read - len(slots):
            raise ValueError(f"{STATE} has {len(slots)} samples waiting, of {read} that were read")
        check_epoch(self._definition, self.epoch)
        self._given = self._before
        if not read:
            return self._given
        self._line = line = self._lined()
        if not line.go_on(state, shown):
            refuse(f"first {read} samples of epoch {self.epoch}", anyway=anyway)
            self._over = line.reading.ended and not (line.ready or line.held)  # the epoch has fewer than it had
        line.given = self._total - line.held
        return line.given - len(line.ready)

    def close(self) -> None:
        """Let go of the iterable."""
        if self._line is not None:
            self._line.close()

    @property
    def _total(self) -> int:
        return self._before + (0 if self._line is None else self._line.reading.number)

    @property
    def _total_given(self) -> int:
        return self._given if self._line is None else self._line.given

    def _lined(self) -> Line:
        which = Pass(self.epoch, self._before)
        return Line(self._definition, functools.partial(self._opened, which), self._definition.seed, self._given)

    def _begun(self) -> Line:
        """The current line; begins an epoch if there is none, or if the last one is over."""
        if self._line is None or self._over:
            self._before, self._given = self._total, self._total_given
            self.epoch, self._over = self.epoch + self._over, False
            self.close()
            self._line = None
            self._line = self._lined().begin()
        return self._line

    def _too_few(self, line: Line, least: int) -> UsageError:
        if least == 1:
            return UsageError(
                f"the stream has no samples in epoch {self.epoch}: what make_iterable returned yielded nothing; it is "
                "called once per epoch, and must return an iterable that begins anew"
            )
        return UsageError(
            f"drop_last is True and a batch has {least} samples, but epoch {self.epoch} of the stream has "
            f"{line.reading.number}: every batch would be dropped; lower batch_size, or set drop_last=False"
        )


def supplied(
    definition: Definition,
    engine: Any,
    shown: Shown = lambda numbers, _: numbers,
    *,
    anyway: bool = False,
    apart: bool = False,
    opener: Opener | None = None,
) -> Supply:
    """The supply of a run whose data is a stream; it goes on where an earlier run was, and the run's state has it.

    Parameters
    ----------
    definition : Definition
    engine : Engine
        The run's.
    shown, anyway
        As ``Supply.go_on`` takes them.
    apart : bool
        Whether other processes compute replicas, and read for these.
    opener : Opener, optional
        What reads the stream, in place of this process.
    """
    progress, seen, stream = engine.progress, engine.seen, definition.stream
    assert stream is not None
    opener = opener or Readings(definition)
    facts = definition, opener.opened
    dealer = Sharded(*facts, engine.reading, apart=apart) if stream.shards else Whole(*facts)
    supply = Supply(dealer, engine.reading, opener.close)
    state = seen.take(STATE)
    if state is not None and definition.steps is not None and progress.steps >= definition.steps:
        seen.keep(STATE, lambda: state)  # all steps are done, so nothing is read again
        return supply
    if state is not None or (progress.resumed_from is not None and not anyway):
        dealt = supply.go_on(state or {}, shown, anyway=anyway)
        if dealt > progress.samples and not definition.drop_last:  # drop_last leaves some out
            raise SnapshotError(f"{STATE} in the snapshot has dealt {dealt} samples, of {progress.samples}")
    seen.keep(STATE, lambda: supply.state(progress.steps))
    return supply
