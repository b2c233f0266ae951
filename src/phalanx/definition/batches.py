"""Deals batches to replicas: turns the plan, or a batch that the caller brought, into shares that can be fetched.

Samples are copied as they are read (``own``). A dataset or a stream may fill one buffer for all of its samples. A
``collate_fn`` may write to samples, and so may a model that is handed them as they are. A share that is read again, in
the next phase of a step or after a worker's death, must be the same. Arrays keep their strides, which may decide bits:
kernels are chosen by them.

Columns must not change while a run is open: workers have them as they were, this process as they are. ``Unchanged``
notices changes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import zlib
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.definition import generators
from phalanx.definition.data import READING, Columns, Drawn, Samples, Share, Source, open_batch, open_data
from phalanx.definition.fields import Definition
from phalanx.definition.plain import content
from phalanx.errors import UsageError
from phalanx.plan.keys import evaluation_sample_key
from phalanx.plan.orders import Indices
from phalanx.plan.shares import share_bounds

EVALUATION = "evaluation data"
WHOLE_BYTES = 1 << 18  # of a column that is compared whole
ROWS = 32  # of others
UNCHANGING = frozenset({bool, int, float, complex, str, bytes, type(None)})  # kinds of values that cannot be written to
SeedSample = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Collated:
    """A share whose samples were collated where they were read; no random numbers were drawn for that."""

    batch: Any


def as_batch(samples: Any, share: Share, collate: Callable[[Any], Any]) -> Any:
    """The samples that ``share.read`` returned, as a batch."""
    if isinstance(samples, Collated):
        return samples.batch
    try:
        return samples if share.collated else (share.collate or collate)(samples)
    except Exception as error:
        for number, sample in zip(share.samples, samples, strict=False):
            if sample is None:
                error.add_note(f"{READING} {number}, it was given None")
        raise


class BatchShares:
    """Shares of planned steps, brought batches and evaluation data, all read in the same way.

    Parameters
    ----------
    definition : Definition
    opened : callable
        How the framework reads a source: columns become its arrays.
    ahead : callable, optional
        Called in place of what reads a planned share, if shares are read ahead:
        ``ahead(step, replica, read, samples)``.
    """

    def __init__(
        self, definition: Definition, opened: Callable[[Source], Source], ahead: Callable[..., Any] | None = None
    ) -> None:
        self._ahead = ahead
        self._definition = definition
        self._opened = opened
        self._source = None if definition.source is None else opened(definition.source)
        holders = functools.partial(getattr, definition, "holders")
        self._first = generators.FirstReadings("data", definition.generators, holders)

    def planned(self, update: int) -> list[Share]:
        """The shares of an update's planned step; a sample's generator seeds follow from (seed, epoch, index)."""
        plan, source = self._definition.plan, self._source
        step = self._definition.rounds.at(update).step
        assert source is not None
        owned = self._definition.generators
        read, collated = self._reader(
            source, lambda index: generators.seed(plan.sample_key(step, index), owned), self._first
        )
        ahead = self._ahead is not None and isinstance(source, Samples)
        epoch, shares = plan.epoch(step), list[Share]()
        for replica, indices in enumerate(plan.shares(step)):
            reads = functools.partial(self._ahead, step, replica, read) if ahead else read  # type: ignore[arg-type]
            shares.append(Share(indices, reads, collated, "data", epoch=epoch))
        return shares

    def brought(self, batch: Any) -> list[Share]:
        """The shares of a batch that the caller or a stream brought, cut as ``numpy.array_split`` does."""
        replicas, epoch = self._definition.replicas, None
        if isinstance(batch, Drawn):  # messages name samples by their numbers in the epoch
            numbers, origin, epoch = np.array(batch.numbers, dtype=np.int64), "data", batch.epoch
            source: Source = Samples(dict(zip(batch.numbers, batch.samples, strict=True)), random=False)
        else:
            source = self._opened(open_batch(batch))
            numbers, origin = np.arange(len(source), dtype=np.int64), "batch"
        if self._definition.batch_size is None and len(source) > replicas:
            raise UsageError(
                f"batch has {len(source)} samples, but batch_size=None hands one sample to each of {replicas} "
                "replicas; bring fewer, or give the recipe a batch_size"
            )
        read, collated = self._reader(source, _unseeded)
        return [
            Share(numbers[start:end], read, collated, origin, epoch=epoch)
            for start, end in share_bounds(len(numbers), replicas)
        ]

    def chunks(self, data: Any, batch_size: int, collate: Callable[[Any], Any] | None = None) -> Chunks:
        """Evaluation data in order, each sample once; one by one if the recipe hands over samples as they are.

        ``collate``: in place of the recipe's.
        """
        source = self._opened(open_data(data, EVALUATION))
        size = 1 if self._definition.batch_size is None else batch_size
        seed, roots = self._definition.seed, {EVALUATION: data} if isinstance(source, Samples) and source.random else {}
        own = generators.find(roots)
        owned = {**self._definition.generators, **own}
        first = generators.FirstReadings(EVALUATION, owned, lambda: roots)
        read, collated = self._reader(
            source, lambda index: generators.seed(evaluation_sample_key(seed, index), owned), first, collate
        )
        if own:  # what the run's environment does not restore
            read = functools.partial(_restoring, read, own)
        return Chunks(len(source), size, read, collated, collate)

    def _reader(
        self,
        source: Source,
        seed: SeedSample,
        first: generators.FirstReadings | None = None,
        collate: Callable[[Any], Any] | None = None,
    ) -> tuple[Callable[[Indices], Any], bool]:
        """How a share of ``source`` is read, and whether that gives a batch or a list still to be collated."""
        one = self._definition.batch_size is None
        collate = collate or self._definition.collate_fn
        if not one and isinstance(source, Columns) and collate is None:
            return functools.partial(_rows_of, source), True

        random = isinstance(source, Samples) and source.random
        changeable = one or collate is not None  # user code gets the samples themselves
        given = random or (changeable and isinstance(source, Samples))

        def read(indices: Indices) -> list[Any]:
            if given:
                return [own(_sample_of(source, int(index), seed)) for index in indices]
            return [_sample_of(source, int(index), seed) for index in indices]

        checked: Callable[[Indices], list[Any]] = read
        if first is not None and random:
            checked = functools.partial(first.read, checked)
        return (lambda indices: checked(indices[:1])[0]) if one else checked, one


def _rows_of(source: Columns, indices: Indices) -> Any:
    return source.rebuild(source.rows(source.arrays, indices))


def _sample_of(source: Source, index: int, seed: SeedSample) -> Any:
    """One sample, as it is; ``seed(index)`` comes first where reading runs user code.

    Of columns it is a row, with no added axis, copied as the rows of a batch are; nothing is drawn.
    """
    if isinstance(source, Columns):
        rows = source.rows(source.arrays, np.array([index], dtype=np.int64))
        return source.rebuild([row[0] for row in rows])
    if source.random:
        seed(index)
    try:
        return source.items[index]
    except Exception as error:
        error.add_note(f"{READING} {index}")
        raise


def own(sample: Any) -> Any:
    """A sample with copies of its arrays, containers and dataclasses; strides stay. Other objects are not copied."""
    kind: Any = type(sample)
    if kind is tuple or kind is list:
        parts = []
        for part in sample:
            # Most parts are of the first two kinds, and this runs for each sample: a call for each part is slow.
            if type(part) in UNCHANGING:
                parts.append(part)
            elif type(part) is np.ndarray and (copied := part.copy("K")).strides == part.strides:
                parts.append(copied)
            else:
                parts.append(own(part))
        return kind(parts)
    if hasattr(kind, "new_empty_strided") and not vars(sample):
        if sample.requires_grad:
            if sample.is_leaf:  # a copy would be another one
                return sample
            sample = sample.detach()  # workers and readers do not have the graph, and a backward pass may use it up
        copied = sample.clone()
        try:
            same = copied.stride() == sample.stride()
            return copied if same else sample.new_empty_strided(sample.shape, sample.stride()).copy_(sample)
        except RuntimeError:  # sparse, or with elements that share memory, as an expanded one
            return copied
    if kind is np.ndarray or kind is np.memmap:
        return _array(sample)
    if isinstance(sample, tuple) and callable(getattr(sample, "_make", None)):
        return kind._make(map(own, sample))
    if isinstance(sample, (dict, UserDict)):
        copied: Any = copy.copy(sample)
        for key, value in sample.items():
            copied[key] = own(value)
        return copied
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        copied = copy.copy(sample)
        for field in dataclasses.fields(sample):
            object.__setattr__(copied, field.name, own(getattr(sample, field.name)))
        return copied
    return sample


def bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Addresses of the first byte of an array and of the one after its last."""
    steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    address = array.__array_interface__["data"][0]
    return address + sum(min(step, 0) for step in steps), address + sum(max(step, 0) for step in steps) + array.itemsize


def _array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    copied = array.copy(order="K")
    if copied.strides == array.strides or array.dtype.hasobject or not array.size:
        return copied
    low, high = bounds(array)
    below = array.__array_interface__["data"][0] - low
    copied = np.ndarray(array.shape, array.dtype, np.empty(high - low, np.uint8), below, array.strides)
    copied[...] = array
    return copied


def _restoring(read: Callable[[Indices], Any], owned: generators.Owned, indices: Indices) -> Any:
    with generators.kept(owned):
        return read(indices)


@dataclass(frozen=True)
class Chunks(Sequence[Share]):
    """Shares of ``size`` samples in order, each made when it is asked for: data may be long."""

    samples: int
    size: int
    read: Callable[[Indices], Any]
    collated: bool
    collate: Callable[[Any], Any] | None

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def __getitem__(self, number: Any) -> Any:
        start = range(0, self.samples, self.size)[number]
        indices = np.arange(start, min(start + self.size, self.samples), dtype=np.int64)
        return Share(indices, self.read, self.collated, EVALUATION, self.collate)


def _unseeded(index: int) -> None:
    """Samples that the caller brought are there already: reading them draws nothing."""


class Unchanged:
    """Notices that the caller changes columns in place.

    Tensors count their changes. Arrays of numpy do not, so they are compared, whole or at some rows, when asked for.

    Parameters
    ----------
    source : Columns, Samples or None
    """

    def __init__(self, source: Columns | Samples | None) -> None:
        self._arrays = source.arrays if isinstance(source, Columns) else ()
        versions = [(number, array, _version(array)) for number, array in enumerate(self._arrays)]
        self._counting = [known for known in versions if known[-1] is not None]  # looked at before every step
        self._sums = [_checksum(array) for array in self._arrays]

    def check(self, *, contents: bool) -> None:
        """Refuse to go on with other data; ``contents``: look at what numpy's arrays hold, too.

        Raises
        ------
        UsageError
            A column was changed since this was made.
        """
        for number, array, version in self._counting:
            if array._version != version:
                raise self._changed(number)
        for number, array in enumerate(self._arrays if contents else ()):
            if _checksum(array) != self._sums[number]:
                raise self._changed(number)

    def _changed(self, number: int) -> UsageError:
        return UsageError(
            f"data was changed in place while the run was open (column {number} of {len(self._arrays)}), which "
            "workers do not see; change it between runs, pass a dataset that computes samples, or bring "
            "batches yourself: data=None, then run.step(batch)"
        )


def _version(array: Any) -> int | None:
    """How often a tensor was changed; None for what does not count."""
    try:
        return getattr(array, "_version", None)
    except RuntimeError:  # made in inference mode
        return None


def _checksum(array: Any) -> int | None:
    if _version(array) is not None:
        return None
    if array.nbytes <= WHOLE_BYTES:
        return zlib.crc32(content(array))
    rows = np.unique(np.linspace(0, array.shape[0] - 1, ROWS).astype(np.int64))
    # Slices go by position; a number alone may be a label, as in a column of pandas.
    return zlib.crc32(b"".join(content(array[row : row + 1]) for row in rows.tolist()))
