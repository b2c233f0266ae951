"""Reads a stream, deals it out in batches, and keeps its position, so that a later run can go on there.

A sample is read once. It waits in the shuffle buffer, if there is one, and then among those that are ready; the samples
of a step are kept until that step is done. A snapshot has only the numbers of samples that wait: a resumed run reads
these samples again, from the last mark before all of them.

A ``Reading`` is one pass over the iterable. A ``Supply`` makes batches of pass after pass, and knows which step has
which of them.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from phalanx.definition import checks, generators
from phalanx.definition.batches import Drawn
from phalanx.definition.data import Stream, is_array, own
from phalanx.definition.fields import Definition
from phalanx.definition.plain import Each, check_like, encoded, hashed, taking_over
from phalanx.errors import PhalanxError, RunError, SnapshotError, UsageError, WorkerError, safe_str
from phalanx.plan.keys import buffer_slot, iterable_key, stream_sample_key
from phalanx.surroundings import interrupts

STATE = "data.stream"  # its name among the states of callbacks, which have names of classes
LIKE = {"epoch": int, "before": int, "given": int, "read": int}
WAITING = {"ready": Each(int), "slots": Each(int), "hash": str, "mark": [int, str, object]}  # once some are read
MARKS = 32  # marks that are kept: a sample waits for a few rounds of the buffer at most
PROTOCOLS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
Shown = Callable[[Iterable[int], str], Iterable[int]]  # shows how far reading again is: ``shown(numbers, title)``
Item = tuple[int, Any, str]  # the number of a sample, itself, the running hash after it


class Mark(NamedTuple):
    """A place in an epoch from which its iterable can be read again.

    Attributes
    ----------
    number : int
        Samples before it.
    hash : str
        Running hash of those.
    state : Any
        The state of the iterable, or of its iterator, there; None where the epoch begins.
    """

    number: int
    hash: str
    state: Any


BEGINNING = Mark(0, hashlib.sha256().hexdigest(), None)


class Reading:
    """Reads an epoch of a stream, from its beginning or from a mark, sample by sample, each under its own key.

    Parameters
    ----------
    definition : Definition
    stream : Stream
    epoch : int
    before : int
        Samples that were read in all epochs before.
    mark : Mark

    Attributes
    ----------
    number : int
        Samples of this epoch that were read.
    hash : str
        SHA-256 over them, one after another.
    ended : bool
        Whether there are no more.
    """

    def __init__(self, definition: Definition, stream: Stream, epoch: int, before: int, mark: Mark) -> None:
        self.number, self.hash, self.ended = mark.number, mark.hash, False
        self._seed, self._owned = definition.seed, definition.generators
        self._size, self._epoch, self._before = stream.epoch_size, epoch, before
        self._broken = ""
        generators.seed(iterable_key(self._seed, epoch), self._owned)
        with self._user_code("while make_iterable() was called"):
            self.iterable = stream.make_iterable()
            if getattr(self.iterable, "batch_sampler", None) is not None:
                raise UsageError("make_iterable returned a DataLoader of batches; give it batch_size=None, for samples")
            if callable(set_epoch := getattr(self.iterable, "set_epoch", None)):
                set_epoch(epoch)
            self._carrier, self._take = _restored(self.iterable, mark.state)
            self.iterator = iter(self.iterable)
            if self._carrier is None:
                self._carrier, self._take = _restored(self.iterator, mark.state)

    def next(self) -> Any:
        """Read a sample; what is returned means nothing once ``ended`` is set.

        Raises
        ------
        WorkerError
            The iterable raised.
        UsageError
            It ended before ``epoch_size`` samples.
        """
        if self.number == self._size:
            self.ended = True
            return None
        if self._broken:
            raise RunError(f"this stream cannot be read on: {self._broken}; start another run")
        generators.seed(stream_sample_key(self._seed, self._before + self.number), self._owned)
        end = object()
        with self._user_code(f"while sample {self.number} of epoch {self._epoch} was read", self.number):
            sample = own(next(self.iterator, end))
        if sample is end:
            self.ended = True
            if self._size is not None:
                raise UsageError(
                    f"epoch_size is {self._size}, but in epoch {self._epoch} the iterable ended after {self.number} "
                    "samples; lower it, leave it out, or yield more"
                )
            return None
        self.number += 1
        self.hash = hashlib.sha256(bytes.fromhex(self.hash) + hashed(sample)).hexdigest()
        return sample

    def mark(self) -> Mark | None:
        """The present position; None if the iterable cannot give its state as plain values and tensors."""
        if self._carrier is None or not self.number:
            return None
        with self._user_code(f"while {self._take}() was called"):
            state = copy.deepcopy(getattr(self._carrier, self._take)())
        try:
            encoded(state, lambda leaf, path: path if is_array(leaf) else None, f"{self._take}()")
        except UsageError as error:
            checks.warn(
                f"the stream's state cannot be kept, so that a resumed run reads the samples of its epoch again to "
                f"find its place: {error}"
            )
            self._carrier = None
            return None
        return Mark(self.number, self.hash, state)

    def close(self) -> None:
        """Let go of the iterable; a generator's ``finally`` runs now."""
        with contextlib.suppress(Exception):
            self.iterator.close()  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def _user_code(self, when: str, number: int | None = None) -> Iterator[None]:
        """Turn what it raises into a WorkerError; an iterator that raised, or was interrupted, is not read again."""
        try:
            with interrupts.user_code():
                yield
        except PhalanxError:
            raise
        except Exception as error:
            self._broken = f"{type(error).__name__} ({safe_str(error)}) {when}"
            message = f"{type(error).__name__} in user code {when}, of a stream: {safe_str(error)}"
            raise WorkerError(message, samples=() if number is None else (number,)) from error
        except BaseException as error:
            self._broken = f"it was broken off by {type(error).__name__} {when}"
            raise


class Supply:
    """Deals out a stream in batches, and knows which step has which.

    Parameters
    ----------
    definition : Definition
        Its data is a stream.
    surroundings : context manager
        Inside, generators and threads are the run's. Re-entrant.

    Attributes
    ----------
    epoch : int
        That of the next batch, or of the last one.
    """

    def __init__(self, definition: Definition, surroundings: AbstractContextManager[Any]) -> None:
        assert definition.stream is not None
        self._definition, self._stream, self._surroundings = definition, definition.stream, surroundings
        self._reading: Reading | None = None
        self.epoch = 0
        self._before = 0  # samples read in earlier epochs
        self._given = 0  # samples that left the buffer, in all epochs
        self._buffer: list[Item] = []
        self._ready: deque[Item] = deque()
        self._drawn: list[Item] = []
        self._batch: Drawn | None = None  # what was drawn last
        self._step = -1  # the step that has it
        self._over = False  # whether the epoch ends with what was drawn
        self._marks: deque[Mark] = deque([BEGINNING], MARKS)

    def draw(self, step: int) -> Drawn:
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
                batch = self._batch = self._next()
            except WorkerError as error:
                error.step = step
                raise
        self._step = step
        return batch

    def postpone(self, step: int) -> None:
        """The caller brings a batch for this step, so the batch that was drawn for it goes to the next one."""
        if self._pending(step):
            self._step = step + 1

    def epochs(self, steps: int) -> int:
        """How many epochs are over after so many steps."""
        batch = self._batch
        return self.epoch + (batch is not None and batch.last and not self._pending(steps))

    def state(self, steps: int) -> dict[str, Any]:
        """The stream's position after so many steps, in plain values."""
        waiting = self._drawn if self._pending(steps) else []
        if self._reading is None or (self._over and not waiting):
            return {"epoch": self.epoch + self._over, "before": self._total, "given": self._given, "read": 0}
        ready = [number for number, *_ in [*waiting, *self._ready]]
        slots = [number for number, *_ in self._buffer]
        first = min([*ready, *slots, max(0, self._reading.number - 1)])
        mark = next((mark for mark in reversed(self._marks) if mark.number <= first), BEGINNING)
        return {
            "epoch": self.epoch, "before": self._before, "given": self._given, "read": self._reading.number,
            "ready": ready, "slots": slots, "hash": self._reading.hash, "mark": list(mark),
        }  # fmt: skip

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
        check_like(state, {**LIKE, **(WAITING if state and state.get("read") else {})}, STATE)
        self.epoch, self._before, read = state["epoch"], state["before"], state["read"]
        ready, slots = state.get("ready", []), state.get("slots", [])
        waiting = sorted([*ready, *slots])
        once = len(set(waiting)) == len(waiting) and all(0 <= number < read for number in waiting)
        if state["given"] != self._before + read - len(slots) or not once:
            raise ValueError(f"{STATE} has {waiting} waiting, of {read} samples that were read")
        epochs = self._definition.epochs
        if epochs is not None and self.epoch > epochs:
            raise UsageError(f"epochs is {epochs}, but the run that is resumed has done {self.epoch}; raise epochs")
        if read:
            with self._surroundings:
                self._read_again(state, shown, anyway=anyway)
        self._given = self._total - len(self._buffer)
        return self._given - len(self._ready)

    def close(self) -> None:
        """Let go of the iterable."""
        reading, self._reading = self._reading, None
        if reading is not None:
            with self._surroundings:
                reading.close()

    @property
    def _total(self) -> int:
        return self._before + (0 if self._reading is None else self._reading.number)

    def _pending(self, step: int) -> bool:
        """Whether the batch that was drawn is of a step that is not done."""
        return self._batch is not None and self._step >= step

    def _next(self) -> Drawn:
        """Read on, and deal out the next batch."""
        size = self._definition.global_batch
        least = size if self._definition.drop_last else 1
        self._drawn = []
        with self._surroundings:
            reading = self._begun()
            self._mark(reading)
            self._fill(reading, size + least)
        if len(self._ready) < least:
            raise self._too_few(reading, least)
        self._drawn = items = [self._ready.popleft() for _ in range(min(size, len(self._ready)))]
        self._over = len(self._ready) < least
        digest = hashlib.sha256(b"".join(bytes.fromhex(item[2]) for item in items)).hexdigest()
        return Drawn(self.epoch, tuple(item[0] for item in items), [item[1] for item in items], digest, self._over)

    def _read_again(self, state: Mapping[str, Any], shown: Shown, *, anyway: bool) -> None:
        """Read up to where an earlier run was, from a mark that leads to the same samples."""
        marks = [Mark(*state["mark"]), BEGINNING] if state["mark"][0] else [BEGINNING]
        for mark in marks:
            with contextlib.suppress(*([WorkerError] if mark.number else [])):  # a state of another version, say
                self._read_from(mark, state, shown)
            if self._reading is not None and self._reading.hash == state["hash"]:
                if mark is not marks[0]:
                    checks.warn(
                        "the stream's state led to other samples than those that the earlier run had read (a shuffle "
                        "buffer of its own, say), so those of the epoch were read again from its beginning; the buffer "
                        "of phalanx.Stream(..., shuffle_buffer=n) is kept exactly"
                    )
                return
        why = f"first {state['read']} samples of epoch {self.epoch} are not those that the earlier run had read"
        if not anyway:
            raise UsageError(
                f"the stream's {why}; make_iterable must yield the same samples each time: sort what file systems "
                "list, and draw random numbers from global generators, which are seeded before each call and each "
                "sample. resume='anyway' (--resume anyway) goes on all the same"
            )
        checks.warn(f"the stream's {why}; going on all the same")

    def _read_from(self, mark: Mark, state: Mapping[str, Any], shown: Shown) -> None:
        """Read an epoch from a mark up to where an earlier run was; keep the samples that waited there."""
        reading, waiting, items = self._opened(mark), {*state["ready"], *state["slots"]}, dict[int, Item]()
        for number in shown(range(mark.number, state["read"]), "phalanx: reading samples again"):
            sample = reading.next()
            if reading.ended:
                break
            if number in waiting:
                items[number] = number, sample, reading.hash
        self._ready = deque(items[number] for number in state["ready"] if number in items)
        self._buffer = [items[number] for number in state["slots"] if number in items]
        self._over = reading.ended and not items  # the epoch has fewer samples than it had

    def _begun(self) -> Reading:
        """The current reading; begins an epoch if there is none, or if the last one is over."""
        last = self._reading
        if last is not None and not self._over:
            return last
        self._before = self._total
        self.epoch, self._over = self.epoch + self._over, False
        reading = self._opened(BEGINNING)
        if last is not None and reading.iterator is last.iterable:
            raise UsageError(
                f"make_iterable returned the same {type(last.iterable).__name__} again for epoch {self.epoch}; each "
                "epoch reads an iterable from its beginning, so make a new one in each call"
            )
        return reading

    def _opened(self, mark: Mark) -> Reading:
        """Let go of the last reading, and begin one of the present epoch at a mark; no sample waits then."""
        self.close()
        self._ready, self._buffer, self._marks = deque(), [], deque([mark], MARKS)
        self._reading = Reading(self._definition, self._stream, self.epoch, self._before, mark)
        return self._reading

    def _mark(self, reading: Reading) -> None:
        """Now and then, mark where the iterable is; the oldest marks are dropped."""
        if reading.number - self._marks[-1].number < max(self._definition.global_batch, self._stream.shuffle_buffer):
            return
        mark = reading.mark()
        if mark is not None:
            self._marks.append(mark)

    def _fill(self, reading: Reading, count: int) -> None:
        """Read until ``count`` samples are ready, or the epoch has no more."""
        most = max(1, self._stream.shuffle_buffer)
        while len(self._ready) < count:
            while not reading.ended and len(self._buffer) < most:
                sample = reading.next()
                if not reading.ended:
                    self._buffer.append((reading.number - 1, sample, reading.hash))
            if not self._buffer:
                return
            slot = buffer_slot(self._definition.seed, self._given, len(self._buffer))
            self._buffer[slot], self._buffer[-1] = self._buffer[-1], self._buffer[slot]
            self._ready.append(self._buffer.pop())
            self._given += 1

    def _too_few(self, reading: Reading, least: int) -> UsageError:
        if least == 1:
            return UsageError(
                f"the stream has no samples in epoch {self.epoch}: what make_iterable returned yielded nothing; it is "
                "called once per epoch, and must return an iterable that begins anew"
            )
        return UsageError(
            f"drop_last is True and a batch has {least} samples, but epoch {self.epoch} of the stream has "
            f"{reading.number}: every batch would be dropped; lower batch_size, or set drop_last=False"
        )


def supplied(
    definition: Definition,
    engine: Any,
    shown: Shown = lambda numbers, _: numbers,
    *,
    anyway: bool = False,
) -> Supply:
    """The supply of a run whose data is a stream; it goes on where an earlier run was, and the run's state has it.

    Parameters
    ----------
    definition : Definition
    engine : Engine
        The run's.
    shown, anyway
        As ``Supply`` and its ``go_on`` take them.
    """
    progress, seen, supply = engine.progress, engine.seen, Supply(definition, engine.reading)
    state = seen.take(STATE)
    if state is not None or (progress.resumed_from is not None and not anyway):
        dealt = supply.go_on(state or {}, shown, anyway=anyway)
        if dealt > progress.samples and not definition.drop_last:  # drop_last leaves some out
            raise SnapshotError(f"{STATE} in the snapshot has dealt {dealt} samples, of {progress.samples}")
    seen.keep(STATE, lambda: supply.state(progress.steps))
    return supply


def _restored(carrier: Any, state: Any) -> tuple[Any, str]:
    """Give an iterable its state, if there is one; returns it, and the method that tells it. None: it has no such."""
    for take, give in PROTOCOLS:
        if callable(getattr(carrier, take, None)) and callable(getattr(carrier, give, None)):
            if state is not None:
                getattr(carrier, give)(copy.deepcopy(state))
            return carrier, take
    return None, ""
