"""One pass of one reader over a stream: its samples, its shuffle buffer, and its place, so that it can be read again.

A sample is read once. It waits in the shuffle buffer, if there is one, and then among those that are ready. A state has
only the numbers of samples that wait: whoever goes on from it reads these samples again, from the last mark before all
of them.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from phalanx.definition import checks, generators
from phalanx.definition.data import is_array, own
from phalanx.definition.fields import Definition
from phalanx.definition.plain import Each, encoded, hashed
from phalanx.definition.stream import Shard
from phalanx.errors import PhalanxError, RunError, UsageError, WorkerError, safe_str
from phalanx.plan.keys import buffer_slot, iterable_key, shard_seed, stream_sample_key
from phalanx.surroundings import interrupts

LIKE = {"read": int, "ready": Each(int), "slots": Each(int), "hash": str, "mark": [int, str, object]}
MARKS = 32  # marks that are kept: a sample waits for a few rounds of the buffer at most
PROTOCOLS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
LED_ELSEWHERE = (
    "the stream's state led to other samples than those that were read before (a shuffle buffer of its own, say), so "
    "those of the epoch were read again from its beginning; the buffer of phalanx.Stream(..., shuffle_buffer=n) is "
    "kept exactly"
)
EACH_TIME = (
    "make_iterable must yield the same samples each time: sort what file systems list, and draw random numbers from "
    "global generators, which are seeded before each call and each sample"
)
Shown = Callable[[Iterable[int], str], Iterable[int]]  # shows how far reading again is: ``shown(numbers, title)``
Item = tuple[int, Any, str]  # the number of a sample, itself, the running hash after it
Opened = Callable[["Pass", "Mark"], "Source"]  # what reads a pass from a mark on


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


@dataclass(frozen=True)
class Pass:
    """Which reader of a stream this is, and in which epoch.

    Attributes
    ----------
    epoch : int
    before : int
        Samples that were read in all epochs before; counted only where one reader reads the whole stream.
    shard, shards : int
        Which logical reader, of how many; 0 of 0 reads the whole stream.
    """

    epoch: int
    before: int = 0
    shard: int = 0
    shards: int = 0

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What ``make_iterable`` is called with."""
        return (Shard.of(self.shard, self.epoch), self.shards) if self.shards else ()

    def seed(self, seed: int) -> int:
        """The seed from which its random keys follow; ``seed``: the recipe's."""
        return shard_seed(seed, self.epoch, self.shard, self.shards) if self.shards else seed

    def named(self, number: int) -> int:
        """How a step calls a sample: by its number in the epoch; with shards n is sample n // S of shard n % S."""
        return number * self.shards + self.shard if self.shards else number

    def __str__(self) -> str:
        return f"shard {self.shard} of epoch {self.epoch}" if self.shards else f"epoch {self.epoch}"


class Source(Protocol):
    """What a line reads from: a ``Reading``, or one that a process of its own does."""

    number: int
    hash: str
    ended: bool

    def next(self) -> Any:
        """The next sample; it means nothing once ``ended`` is set."""
        ...

    def mark(self) -> Mark | None:
        """A place at or before the present one; None where the iterable cannot tell any."""
        ...

    def close(self) -> None:
        """Let go of the iterable."""
        ...


class Reading:
    """Reads a pass from its beginning or from a mark, sample by sample, each under its own key.

    Parameters
    ----------
    definition : Definition
    which : Pass
    mark : Mark

    Attributes
    ----------
    number : int
        Samples of this pass that were read.
    hash : str
        SHA-256 over them, one after another.
    ended : bool
        Whether there are no more.
    hashes : bool
        Whether it hashes samples, or whoever reads does that later.
    """

    hashes = True

    def __init__(self, definition: Definition, which: Pass, mark: Mark) -> None:
        stream = definition.stream
        assert stream is not None
        self.number, self.hash, self.ended = mark.number, mark.hash, False
        self._seed, self._owned = which.seed(definition.seed), definition.generators
        self._size, self._which = None if which.shards else stream.epoch_size, which
        self._broken = ""
        generators.seed(iterable_key(self._seed, which.epoch), self._owned)
        with self._user_code("while make_iterable() was called"):
            self.iterable = stream.make_iterable(*which.arguments)
            if getattr(self.iterable, "batch_sampler", None) is not None:
                raise UsageError("make_iterable returned a DataLoader of batches; give it batch_size=None, for samples")
            if callable(set_epoch := getattr(self.iterable, "set_epoch", None)):
                set_epoch(which.epoch)
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
        generators.seed(stream_sample_key(self._seed, self._which.before + self.number), self._owned)
        end, named = object(), self._which.named(self.number)
        with self._user_code(f"while sample {self.number} of {self._which} was read", named):
            sample = own(next(self.iterator, end))
        if sample is end:
            self.ended = True
            if self._size is not None:
                raise UsageError(
                    f"epoch_size is {self._size}, but in {self._which} the iterable ended after {self.number} "
                    "samples; lower it, leave it out, or yield more"
                )
            return None
        self.number += 1
        if self.hashes:
            self.hash = following(self.hash, sample)
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


def following(running: str, sample: Any) -> str:
    """The running hash after one sample more."""
    return hashlib.sha256(bytes.fromhex(running) + hashed(sample)).hexdigest()


class Opener(Protocol):
    """What opens passes of a stream."""

    def opened(self, which: Pass, mark: Mark) -> Source:
        """Read a pass from a mark on."""
        ...

    def close(self) -> None:
        """No pass is read any more."""
        ...


class Readings:
    """Opens readings in this process, and sees that ``make_iterable`` makes something new in each call.

    Parameters
    ----------
    definition : Definition
    """

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._last = dict[int, Reading]()  # by shard

    def opened(self, which: Pass, mark: Mark) -> Reading:
        """Read a pass from a mark on."""
        reading = Reading(self._definition, which, mark)
        if any(reading.iterator is other.iterable for other in self._last.values()):
            raise UsageError(
                f"make_iterable returned the same {type(reading.iterable).__name__} again for {which}; each "
                "epoch reads an iterable from its beginning, so make a new one in each call"
            )
        self._last[which.shard] = reading
        return reading

    def close(self) -> None:
        """Nothing is held but what is read, which is closed by itself."""


class Closed:
    """Stands where no reading is open. Implements ``Source``."""

    number, hash, ended = 0, "", True

    def next(self) -> None:
        """Nothing."""

    def mark(self) -> None:
        """None."""

    def close(self) -> None:
        """Nothing is open."""


class Line:
    """A reader with its shuffle buffer: deals its samples one by one.

    Parameters
    ----------
    definition : Definition
    opened : callable
        ``opened(mark)`` reads from there on.
    seed : int
        Of the draws from the buffer.
    given : int
        How many draws came before.

    Attributes
    ----------
    given : int
        Samples that have left the buffer.
    ready : deque of Item
        Those that are read and drawn, and not taken yet.
    """

    def __init__(self, definition: Definition, opened: Callable[[Mark], Source], seed: int, given: int = 0) -> None:
        stream = definition.stream
        assert stream is not None
        self._opened, self._seed, self.given = opened, seed, given
        self._most, self._apart = max(1, stream.shuffle_buffer), apart(definition)
        self.ready, self._buffer, self._marks = deque[Item](), list[Item](), deque[Mark]([], MARKS)
        self.reading: Source = Closed()

    def begin(self, mark: Mark = BEGINNING) -> Line:
        """Begin at a mark; no sample waits then."""
        self.reading.close()
        self.ready, self._buffer, self._marks, self.reading = deque(), [], deque([mark], MARKS), Closed()
        self.reading = self._opened(mark)
        return self

    def close(self) -> None:
        """Let go of the iterable."""
        self.reading.close()

    @property
    def held(self) -> int:
        """Samples in the buffer."""
        return len(self._buffer)

    def mark(self) -> None:
        """Now and then, mark where the iterable is; the oldest marks are dropped."""
        if self.reading.number - self._marks[-1].number >= self._apart and (mark := self.reading.mark()) is not None:
            self._marks.append(mark)

    def fill(self, count: int) -> int:
        """Read until ``count`` samples are ready, or the pass has no more; returns how many are."""
        while len(self.ready) < count:
            while not self.reading.ended and len(self._buffer) < self._most:
                sample = self.reading.next()
                if not self.reading.ended:
                    self._buffer.append((self.reading.number - 1, sample, self.reading.hash))
            if not self._buffer:
                break
            slot = buffer_slot(self._seed, self.given, len(self._buffer))
            self._buffer[slot], self._buffer[-1] = self._buffer[-1], self._buffer[slot]
            self.ready.append(self._buffer.pop())
            self.given += 1
        return len(self.ready)

    def state(self, waiting: Iterable[Item] = ()) -> dict[str, Any]:
        """Where it is, in plain values; ``waiting``: samples that were taken, of a step that is not done."""
        ready = [number for number, *_ in (*waiting, *self.ready)]
        slots = [number for number, *_ in self._buffer]
        first = min([*ready, *slots, max(0, self.reading.number - 1)])
        mark = next((mark for mark in reversed(self._marks) if mark.number <= first), BEGINNING)
        place = {"read": self.reading.number, "hash": self.reading.hash, "mark": list(mark)}
        return {**place, "ready": ready, "slots": slots}

    def go_on(self, state: Mapping[str, Any], shown: Shown) -> bool:
        """Read again what waited where ``state`` was, from a mark before it.

        Returns
        -------
        bool
            Whether the samples are those of then.
        """
        check_waiting(state)
        marks = [Mark(*state["mark"]), BEGINNING] if state["mark"][0] else [BEGINNING]
        for mark in marks:
            with contextlib.suppress(*([WorkerError] if mark.number else [])):  # a state of another version, say
                self._read_from(mark, state, shown)
            if self.reading.hash == state["hash"]:
                if mark is not marks[0]:
                    checks.warn(LED_ELSEWHERE)
                return True
        return False

    def _read_from(self, mark: Mark, state: Mapping[str, Any], shown: Shown) -> None:
        self.begin(mark)
        waiting, items = {*state["ready"], *state["slots"]}, dict[int, Item]()
        for number in shown(range(mark.number, state["read"]), "phalanx: reading samples again"):
            sample = self.reading.next()
            if self.reading.ended:
                break
            if number in waiting:
                items[number] = number, sample, self.reading.hash
        self.ready = deque(items[number] for number in state["ready"] if number in items)
        self._buffer = [items[number] for number in state["slots"] if number in items]


def apart(definition: Definition) -> int:
    """How many samples of a pass lie between two marks: a batch, or a share of one, and a buffer at least."""
    stream = definition.stream
    assert stream is not None
    size = definition.global_batch
    return max(-(-size // definition.replicas) if stream.shards else size, stream.shuffle_buffer)


def check_waiting(state: Mapping[str, Any]) -> None:
    """Refuse a state in which samples wait that were not read, or wait twice."""
    waiting, read = sorted([*state["ready"], *state["slots"]]), state["read"]
    if len(set(waiting)) != len(waiting) or not all(0 <= number < read for number in waiting):
        raise ValueError(f"it has {waiting} waiting, of {read} samples that were read")


def check_epoch(definition: Definition, epoch: int) -> None:
    """Refuse to go on in an epoch that the recipe does not have."""
    epochs = definition.epochs
    if epochs is not None and epoch > epochs:
        raise UsageError(f"epochs is {epochs}, but the run that is resumed has done {epoch}; raise epochs")


def refuse(which: str, *, anyway: bool) -> None:
    """Refuse samples that are not those of the earlier run, or warn of them."""
    why = f"{which} are not those that the earlier run had read"
    if not anyway:
        raise UsageError(f"the stream's {why}; {EACH_TIME}. resume='anyway' (--resume anyway) goes on all the same")
    checks.warn(f"the stream's {why}; going on all the same")


def _restored(carrier: Any, state: Any) -> tuple[Any, str]:
    """Give an iterable its state, if there is one; returns it, and the method that tells it. None: it has no such."""
    for take, give in PROTOCOLS:
        if callable(getattr(carrier, take, None)) and callable(getattr(carrier, give, None)):
            if state is not None:
                getattr(carrier, give)(copy.deepcopy(state))
            return carrier, take
    return None, ""
