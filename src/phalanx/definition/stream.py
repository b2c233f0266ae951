"""What a user passes as data that is read in its own order. ``passes``, ``streams`` and ``shards`` read it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.definition import checks
from phalanx.definition.checks import answering
from phalanx.errors import UsageError


class Shard(int):
    """Which logical reader of a stream ``make_iterable`` is called for.

    Attributes
    ----------
    epoch : int
        The pass over the data, from 0.
    """

    epoch: int

    @classmethod
    def of(cls, number: int, epoch: int) -> Shard:
        """A shard in an epoch."""
        shard = cls(number)
        shard.epoch = epoch
        return shard


@answering(
    num_shards="it is called shards",
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
        generator function is one. With ``shards`` it is called as ``make_iterable(shard, shards)`` for each of them;
        ``shard`` is a number from 0 with an attribute ``epoch``. Generators of random numbers are seeded from (seed,
        epoch) before it is called, and from (seed, sample) before each sample is asked for; with ``shards`` from the
        shard, too. ``set_epoch(epoch)`` of the iterable is called, if it has that.
    shuffle_buffer : int, default 0
        How many samples the next one is drawn from, by keys; one is read for each that is drawn. 0: no buffer, the
        iterable's order. With as many as an epoch has, every order is equally likely.
        Each shard has a buffer of its own.
    epoch_size : int, optional
        Samples of an epoch; what the iterable has beyond them is not read. Needed for endless iterables if anything is
        done by epochs. None: an epoch ends where the iterable does, or the last shard.
    shards : int, optional
        S logical readers, a part of the answer as the recipe's ``replicas`` are; at least as many as those. Shard s is
        read where replica s mod R is computed, and nowhere else, and each replica takes its samples from its shards in
        turn. None: one iterable, and the caller's process reads it.

    Raises
    ------
    UsageError
        ``make_iterable`` is no function, or a number is not valid.
    """

    make_iterable: Callable[..., Iterable[Any]]
    shuffle_buffer: int = 0
    epoch_size: int | None = None
    shards: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.make_iterable):
            kind = type(self.make_iterable).__name__
            way_out = "pass a function that returns it: phalanx.Stream(lambda: iterable)"
            if isinstance(self.make_iterable, Iterator):
                way_out = (
                    "which can be read once only, and each epoch, and each resumed run, reads anew: pass the function "
                    "that makes it, as in phalanx.Stream(generate), not phalanx.Stream(generate())"
                )
            raise UsageError(f"make_iterable is a {kind}, but must be a function; {way_out}")
        settle = object.__setattr__
        if self.shards is not None:
            settle(self, "shards", checks.integer("shards", self.shards, least=1))
        self._check_arguments()
        settle(self, "shuffle_buffer", checks.integer("shuffle_buffer", self.shuffle_buffer, least=0))
        if self.epoch_size is not None:
            hint = "None means that an epoch ends where the iterable does"
            settle(self, "epoch_size", checks.integer("epoch_size", self.epoch_size, least=1, hint=hint))

    def _check_arguments(self) -> None:
        """Refuse a function that cannot be called as it will be, where that can be told."""
        given = (0, 1) if self.shards else ()
        try:
            inspect.signature(self.make_iterable).bind(*given)
        except TypeError:
            wanted = (
                "with shards= it is called as make_iterable(shard, shards), and yields the samples of that one"
                if self.shards
                else "it is called without arguments; one that takes (shard, shards) wants Stream(..., shards=S)"
            )
            raise UsageError(f"make_iterable cannot be called as it will be: {wanted}") from None
        except ValueError:  # written in C
            pass

    def check(self, replicas: int, batch: int) -> None:
        """Refuse shards, or a batch, of which not every replica has some.

        Raises
        ------
        UsageError
            There are fewer than replicas.
        """
        if self.shards is not None and not replicas <= min(self.shards, batch):
            few = "shards" if self.shards < replicas else "batch_size"
            raise UsageError(
                f"{few} is {min(self.shards, batch)} and replicas is {replicas}, but each replica takes its samples "
                f"from shards of its own; raise {few}, or lower replicas"
            )
