"""One pass over a stream: its iterable is made, and read sample by sample, each under its own key."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.definition import checks, generators
from phalanx.definition.copies import own
from phalanx.definition.data import is_array
from phalanx.definition.digest import hashed
from phalanx.definition.fields import Definition
from phalanx.definition.plain import encoded
from phalanx.definition.streams import Stream
from phalanx.errors import PhalanxError, RunError, UsageError, WorkerError
from phalanx.plan import iterable_key, stream_sample_key
from phalanx.surroundings import interrupts

PROTOCOLS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
NOTHING = hashlib.sha256().hexdigest()


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in an epoch from which its iterable can be read again.

    Attributes
    ----------
    number : int
        Samples before it.
    hash : str
        Running hash of those.
    state : Any
        What the iterable, or its iterator, said of itself there; None where the epoch begins.
    """

    number: int
    hash: str
    state: Any


class Reading:
    """Reads an epoch of a stream, from its beginning or from a mark.

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

    def __init__(
        self, definition: Definition, stream: Stream, epoch: int, before: int, mark: Mark = Mark(0, NOTHING, None)
    ) -> None:
        self.number, self.hash, self.ended = mark.number, mark.hash, False
        self._seed, self._owned = definition.seed, definition.generators
        self._stream, self._epoch, self._before = stream, epoch, before
        self._broken = ""
        generators.seed(iterable_key(self._seed, epoch), self._owned)
        with self._user_code("while make_iterable() was called"):
            self.iterable = stream.make_iterable()
            _call(self.iterable, "set_epoch", epoch)
            self._carrier, self._take, give = _protocol(self.iterable)
            if self._carrier is self.iterable and mark.state is not None:
                _call(self.iterable, give, copy.deepcopy(mark.state))
            self.iterator = self._begun()
            if self._carrier is None:
                self._carrier, self._take, give = _protocol(self.iterator)
                if mark.state is not None:
                    _call(self.iterator, give, copy.deepcopy(mark.state))

    def next(self) -> Any:
        """Read a sample; what is returned means nothing once ``ended`` is set.

        Raises
        ------
        WorkerError
            The iterable raised.
        UsageError
            It ended before ``epoch_size`` samples.
        """
        size = self._stream.epoch_size
        if self.number == size:
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
            if size is not None:
                raise UsageError(
                    f"epoch_size is {size}, but in epoch {self._epoch} the iterable ended after {self.number} samples; "
                    "lower it, leave it out, or yield more"
                )
            return None
        self.number += 1
        self.hash = hashlib.sha256(bytes.fromhex(self.hash) + _hashed(sample)).hexdigest()
        return sample

    def mark(self) -> Mark | None:
        """The place where reading is, if the iterable can say it in plain values and tensors."""
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

    def _begun(self) -> Iterator[Any]:
        if not hasattr(type(self.iterable), "__iter__") and not hasattr(type(self.iterable), "__getitem__"):
            raise UsageError(
                f"make_iterable returned a {type(self.iterable).__name__}, which cannot be iterated over; return an "
                "iterable that yields samples, or make it a generator function with yield"
            )
        return iter(self.iterable)

    @contextlib.contextmanager
    def _user_code(self, when: str, number: int | None = None) -> Iterator[None]:
        """What it raises becomes a WorkerError; an iterator that raised, or was broken off, is not asked again."""
        try:
            with interrupts.user_code():
                yield
        except PhalanxError:
            raise
        except Exception as error:
            self._broken = f"{type(error).__name__} ({error}) {when}"
            samples = () if number is None else (number,)
            raise WorkerError(
                f"{type(error).__name__} in user code {when}, of a stream: {error}", samples=samples
            ) from error
        except BaseException as error:
            self._broken = f"it was broken off by {type(error).__name__} {when}"
            raise


def _hashed(sample: Any) -> bytes:
    """A hash of what can be looked into."""
    try:
        return hashed(sample)
    except TypeError:  # an array of objects
        return type(sample).__qualname__.encode()


def _protocol(carrier: Any) -> tuple[Any, str, str]:
    """Who tells its place, and by which methods; None if it does not."""
    for take, give in PROTOCOLS:
        if callable(getattr(carrier, take, None)) and callable(getattr(carrier, give, None)):
            return carrier, take, give
    return None, "", ""


def _call(owner: Any, name: str, argument: Any) -> None:
    method: Callable[..., Any] | None = getattr(owner, name, None)
    if callable(method):
        method(argument)
