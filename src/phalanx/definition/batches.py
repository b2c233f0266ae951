"""Deals batches to replicas: which samples belong to which share, and a share's to which micro-batch.

The batch is one of the plan, one that the caller or a stream brought, or a chunk of evaluation data. How samples are
read is in ``data``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.definition import generators
from phalanx.definition.data import Columns, OneByOne, Reader, Samples, Share, Source, open_batch, open_data
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.plan.keys import evaluation_sample_key
from phalanx.plan.orders import Indices
from phalanx.plan.shares import share_bounds

EVALUATION = "evaluation data"


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
    sizes : tuple of int, optional
        How many each replica has, where logical readers decide that. Of replicas that other processes compute the
        samples are None, and numbers only tell them apart.
    """

    epoch: int
    numbers: tuple[int, ...]
    samples: list[Any]
    hash: str
    last: bool
    sizes: tuple[int, ...] | None = None


class BatchShares:
    """Shares of planned steps, brought batches and evaluation data, all read in the same way.

    Parameters
    ----------
    definition : Definition
    opened : callable
        How the framework reads a source: columns become its arrays.
    ahead : callable, optional
        ``ahead(step, replica, reader)``: what reads a planned share in place of its reader, if shares are read ahead.
    """

    def __init__(
        self,
        definition: Definition,
        opened: Callable[[Source], Source],
        ahead: Callable[[int, int, Reader], Reader] | None = None,
    ) -> None:
        self._definition = definition
        self._opened = opened
        self._source = None if definition.source is None else opened(definition.source)
        self._ahead = ahead if isinstance(self._source, Samples) else None
        self._first = generators.FirstReadings("data", definition.generators, lambda: definition.holders)

    def planned(self, update: int) -> list[Share]:
        """The shares of an update's planned step; a sample's generator seeds follow from (seed, epoch, index)."""
        plan, step = self._definition.plan, self._definition.rounds.at(update).step
        assert self._source is not None
        reader = self._reader(self._source, self._first, functools.partial(plan.sample_key, step))
        epoch, shares = plan.epoch(step), list[Share]()
        for replica, indices in enumerate(plan.shares(step)):
            mine = reader if self._ahead is None else self._ahead(step, replica, reader)
            shares.append(Share(indices, mine, "data", epoch=epoch))
        return shares

    def brought(self, batch: Any) -> list[Share]:
        """The shares of a batch that the caller or a stream brought, cut as ``numpy.array_split`` does."""
        replicas, epoch, sizes = self._definition.replicas, None, None
        if isinstance(batch, Drawn):  # messages name samples by their numbers in the epoch
            numbers, origin, epoch = np.array(batch.numbers, dtype=np.int64), "data", batch.epoch
            sizes = batch.sizes
            source: Source = Samples(dict(zip(batch.numbers, batch.samples, strict=True)), random=False)
        else:
            source = self._opened(open_batch(batch))
            numbers, origin = np.arange(len(source), dtype=np.int64), "batch"
        if self._definition.batch_size is None and len(source) > replicas:
            raise UsageError(
                f"batch has {len(source)} samples, but batch_size=None hands one sample to each of {replicas} "
                "replicas; bring fewer, or give the recipe a batch_size"
            )
        whole = Share(numbers, self._reader(source), origin, epoch=epoch)
        return dealt(whole, replicas) if sizes is None else _sized(whole, sizes)

    def chunks(self, data: Any, batch_size: int, collate: Callable[[Any], Any] | None = None) -> Chunks:
        """Evaluation data in order, each sample once; one by one if the recipe hands over samples as they are.

        ``collate``: in place of the recipe's.
        """
        source = self._opened(open_data(data, EVALUATION))
        size = 1 if self._definition.batch_size is None else batch_size
        roots = {EVALUATION: data} if source.random else {}
        found = generators.find(roots)
        first = generators.FirstReadings(EVALUATION, {**self._definition.generators, **found}, lambda: roots)
        reader = self._reader(source, first, functools.partial(evaluation_sample_key, self._definition.seed), collate)
        if found:  # what the run's environment does not restore
            reader = Restoring(reader, found)
        return Chunks(len(source), size, reader, collate)

    def _reader(
        self,
        source: Source,
        first: generators.FirstReadings | None = None,
        key_of: Callable[[int], int] = int,
        collate: Callable[[Any], Any] | None = None,
    ) -> Reader:
        """What reads a share of ``source``; with a collate_fn, or ``batch_size=None``, user code gets samples."""
        one = self._definition.batch_size is None
        handed = one or (collate or self._definition.collate_fn) is not None
        if isinstance(source, Columns):
            return OneByOne(source, copies=False, collated=one) if handed else source
        return OneByOne(source, source.random or handed, one, first if source.random else None, key_of)


def dealt(share: Share, count: int) -> list[Share]:
    """A share in ``count`` of them, as ``numpy.array_split`` cuts it; some may be empty."""
    return [replace(share, samples=share.samples[start:end]) for start, end in share_bounds(len(share.samples), count)]


def _sized(share: Share, sizes: Sequence[int]) -> list[Share]:
    """A share in parts of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return [replace(share, samples=share.samples[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def cut(share: Share, parts: int) -> list[Share]:
    """A share in at most ``parts`` micro-batches, none empty.

    Samples that are still to be collated are read now: that seeds the generators, and what follows draws from them.
    """
    pieces = [piece for piece in dealt(share, parts) if len(piece.samples)]
    if not share.reader.collated:
        samples = iter(share.read())
        for piece in pieces:
            piece.reader = Held([next(samples) for _ in piece.samples])
    return pieces


@dataclass(frozen=True, slots=True)
class Held:
    """Gives samples that were read already."""

    samples: list[Any]
    collated: bool = False

    def read(self, indices: Indices) -> list[Any]:
        """All of them."""
        return self.samples


@dataclass(frozen=True, slots=True)
class Restoring:
    """Reads with another reader, and puts generators back after it."""

    reader: Reader
    owned: generators.Owned

    @property
    def collated(self) -> bool:
        """As of the other."""
        return self.reader.collated

    def read(self, indices: Indices) -> Any:
        """What the other reads."""
        with generators.kept(self.owned):
            return self.reader.read(indices)


@dataclass(frozen=True)
class Chunks(Sequence[Share]):
    """Shares of ``size`` samples in order, each made when it is asked for: data may be long."""

    samples: int
    size: int
    reader: Reader
    collate: Callable[[Any], Any] | None

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def __getitem__(self, number: Any) -> Any:
        start = range(0, self.samples, self.size)[number]
        indices = np.arange(start, min(start + self.size, self.samples), dtype=np.int64)
        return Share(indices, self.reader, EVALUATION, self.collate)
