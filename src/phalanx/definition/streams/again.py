"""Reading an epoch of a stream again, up to where an earlier run was: from a mark that leads to the same samples."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.definition.streams import Stream
from phalanx.definition.streams.reading import Mark, Reading
from phalanx.errors import UsageError, WorkerError

SAID_SECONDS = 5.0
Shown = Callable[[Iterable[int], str], Iterable[int]]
Item = tuple[int, Any, str]  # the number of a sample, itself, the running hash after it


class Place(NamedTuple):
    """Where an earlier run was: how many samples of the epoch it had read, and their running hash."""

    definition: Definition
    stream: Stream
    epoch: int
    before: int
    read: int
    hash: str


def read_again(
    place: Place, marks: Sequence[Mark], waiting: set[int], *, anyway: bool, shown: Shown
) -> tuple[Reading, Mark, dict[int, Item]]:
    """Be at a place again.

    Parameters
    ----------
    place : Place
    marks : sequence of Mark
        Where to begin; one after another, until the samples are those of the earlier run.
    waiting : set of int
        The samples that are needed.
    anyway : bool
        Whether other samples only warn.
    shown : callable
        Shows how far reading is: ``shown(numbers, title)``.

    Returns
    -------
    (Reading, Mark, dict)
        There, the mark from which that was read, and what waits, by number.

    Raises
    ------
    UsageError
        The samples are others.
    """
    began = time.monotonic()
    for mark in marks:
        with contextlib.suppress(*([WorkerError] if mark.number else [])):  # a state of another version, say
            reading, items = _read(place, mark, waiting, shown)
            if reading.hash == place.hash:
                _say(place, mark, time.monotonic() - began, expected=mark is marks[0])
                return reading, mark, items
            reading.close()
    why = f"the stream's first {place.read} samples of epoch {place.epoch} are not those that the earlier run had read"
    if not anyway:
        raise UsageError(
            f"{why}; make_iterable must yield the same samples each time: sort what file systems list, and draw random "
            "numbers from global generators, which are seeded before each call and each sample. resume='anyway' goes "
            "on all the same"
        )
    checks.warn(f"{why}; going on all the same")
    reading, items = _read(place, marks[-1], waiting, shown)
    return reading, marks[-1], items


def _read(place: Place, mark: Mark, waiting: set[int], shown: Shown) -> tuple[Reading, dict[int, Item]]:
    reading = Reading(place.definition, place.stream, place.epoch, place.before, mark)
    items: dict[int, Item] = {}
    for number in shown(range(mark.number, place.read), "phalanx: reading samples again"):
        sample = reading.next()
        if reading.ended:
            break
        if number in waiting:
            items[number] = number, sample, reading.hash
    return reading, items


def _say(place: Place, mark: Mark, seconds: float, *, expected: bool) -> None:
    """Say what took long, and which state cannot be relied on."""
    if not expected:
        checks.warn(
            "the stream's state led to other samples than those that the earlier run had read (a shuffle buffer of its "
            f"own, say), so those of the epoch were read again from its beginning, which took {seconds:.1f} s; the "
            "buffer of phalanx.Stream(..., shuffle_buffer=n) is kept exactly"
        )
    elif seconds > SAID_SECONDS:
        checks.warn(f"reading {place.read - mark.number} samples again took {seconds:.0f} s")
