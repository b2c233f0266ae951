"""Data that can be read in its own order only: what a user says of it, and what a step gets of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.definition import checks
from phalanx.definition.checks import answering
from phalanx.errors import UsageError


@answering(
    shuffle="it is called shuffle_buffer: from so many samples the next one is drawn",
    buffer_size="it is called shuffle_buffer",
    length="it is called epoch_size",
)
@dataclass(frozen=True, eq=False)
class Stream:
    """Samples in the order in which an iterable yields them, as a recipe's ``data``.

    Every sample is read once, whatever the number of workers, and kept until the step that needs it is done. How to
    write one, and how a run goes on in the middle of one: ``docs/inputs.md``.

    Parameters
    ----------
    make_iterable : callable
        Called without arguments at the beginning of each epoch; returns an iterable or iterator that yields samples. A
        generator function is one. Generators of random numbers are seeded from (seed, epoch) before it is called, and
        from (seed, sample) before each sample is asked for. ``set_epoch(epoch)`` of the iterable is called, if it has
        that.
    shuffle_buffer : int, default 0
        From so many samples the next one is drawn, by keys; one is read for each that is drawn. 0: none, the order is
        the iterable's. As many as an epoch has: every order is as likely.
    epoch_size : int, optional
        Samples of an epoch; what the iterable has beyond them is not read. Needed for endless iterables if anything is
        done by epochs. None: an epoch ends where the iterable does.

    Raises
    ------
    UsageError
        ``make_iterable`` is no function, or a number is none.
    """

    make_iterable: Callable[[], Iterable[Any]]
    shuffle_buffer: int = 0
    epoch_size: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.make_iterable):
            kind = type(self.make_iterable).__name__
            way_out = "pass a function that returns it: phalanx.Stream(lambda: iterable)"
            if isinstance(self.make_iterable, Iterator):
                way_out = (
                    "which can be read once only, and each epoch, and each resumed run, reads anew: pass the function "
                    "that makes it, as in phalanx.Stream(generate), not phalanx.Stream(generate())"
                )
            raise UsageError(f"make_iterable is a {kind}, but must be a function without arguments; {way_out}")
        settle = object.__setattr__
        settle(self, "shuffle_buffer", checks.integer("shuffle_buffer", self.shuffle_buffer, least=0))
        if self.epoch_size is not None:
            hint = "None means that an epoch ends where the iterable does"
            settle(self, "epoch_size", checks.integer("epoch_size", self.epoch_size, least=1, hint=hint))


@dataclass(frozen=True, slots=True)
class Drawn:
    """The samples of one step, as a stream gave them.

    Attributes
    ----------
    epoch : int
    numbers : tuple of int
        Which samples of the epoch these are, counted from 0 as they were read.
    samples : list
    hash : str
        SHA-256 over all of them, in hexadecimal.
    last : bool
        Whether the epoch ends with them.
    """

    epoch: int
    numbers: tuple[int, ...]
    samples: list[Any]
    hash: str
    last: bool
