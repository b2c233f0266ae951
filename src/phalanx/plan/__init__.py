"""The plan: what follows from the recipe alone, computed when asked, never carried.

Sample orders and random keys, which steps are audited, and how a run is cut: into steps and their phases, a batch into
shares, a share into micro-batches. Pure: no framework, process, clock or file.

A key is a 64-bit integer, a bijection of its counter under a constant that is hashed from seed and stream. Its low 32
bits alone are a bijection of the counter's low 32 bits: torch's CPU generator uses no more than those, so a hash could
collide, and a bijection cannot within 2**32 counters. It takes two rounds with the constant in between, so that streams
are not one permutation shifted. Mixers: splitmix64 (Steele, Lea and Flood, 2014) and the
32-bit finalizer of MurmurHash3 (Appleby, 2011).

The order of an epoch is a pure function of (seed, epoch), pinned by test vectors. Algorithm ``splitmix64-argsort-1``:
give sample i the i-th output of splitmix64 started from a hash of (seed, epoch), and sort the samples by it. The
outputs of one stream are all different, so there are no ties and every sorting algorithm gives the same order.

Each phase of a step is gradients, fold, update. Engines count updates, so that whatever holds between two steps (a
barrier, a snapshot in memory, the death of a worker) holds between two phases. Without phases both are the same.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from phalanx.errors import UsageError

T = TypeVar("T")
Seeded = Callable[[int], contextlib.AbstractContextManager[None]]
MASK32: Final = 0xFFFFFFFF
MASK64: Final = 0xFFFFFFFFFFFFFFFF
GOLDEN: Final = 0x9E3779B97F4A7C15
REPLICA_STREAM: Final = 1
SAMPLE_STREAM: Final = 2
EVALUATION_STREAM: Final = 3
EVALUATION_SAMPLE_STREAM: Final = 4
ORDER_STREAM: Final = 5
UPDATE_STREAM: Final = 6
AUDIT_STREAM: Final = 7
ITERABLE_STREAM: Final = 8
BUFFER_STREAM: Final = 9
DRAW_STREAM: Final = 10
SAMPLER_STREAM: Final = 11
PHASE: Final = 1 << 8  # from the stream of one phase of a step to that of the next
Indices = np.ndarray[Any, np.dtype[np.int64]]
Outputs = np.ndarray[Any, np.dtype[np.uint64]]
ALGORITHM = "splitmix64-argsort-1"
BLOCK = 4096  # samples of short epochs that are sorted at once
DRAWS = 2  # numbers that are drawn for a step of an audit


@dataclass(frozen=True)
class Plan:
    """Sample order, shares and random keys of a recipe over data of known length.

    Public as ``recipe.plan``, so that a hand-written loop can follow it.

    Attributes
    ----------
    samples : int
        Length of the data; 0 for a stream, whose samples are known when they are read.
    replicas : int
        R.
    batch_size : int
        Samples a step over all replicas.
    steps : int
        Optimizer steps in the whole run; 0 for a stream of unknown length that is read for some epochs.
    seed : int
    shuffle, drop_last : bool
    """

    samples: int
    replicas: int
    batch_size: int
    steps: int
    seed: int
    shuffle: bool
    drop_last: bool
    seeder: Seeded = field(repr=False, compare=False)

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the data; the last may be short.

        Raises
        ------
        UsageError
            The data is a stream: its samples are known when they are read.
        """
        if not self.samples:
            raise UsageError(
                "this plan has keys, but no samples: data is a Stream, whose samples are known when they are read; "
                "its seeded() and key() work, and the samples are those of make_iterable()"
            )
        return steps_per_epoch(self.samples, self.batch_size, drop_last=self.drop_last)

    @functools.cached_property
    def _orders(self) -> dict[range, Indices]:
        return {}

    def epoch(self, step: int) -> int:
        """The pass over the data that ``step`` belongs to, from 0."""
        return step // self.steps_per_epoch

    def start(self, epoch: int) -> int:
        """The first step of an epoch."""
        return epoch * self.steps_per_epoch

    def indices(self, step: int) -> Indices:
        """Sample indices of ``step``, in order: shape ``(samples in this step,)``, int64.

        Raises
        ------
        IndexError
            ``step`` is negative.
        """
        if step < 0:
            raise IndexError(f"step is {step}; steps count from 0")
        epoch, position = divmod(int(step), self.steps_per_epoch)
        start = position * self.batch_size
        end = min(start + self.batch_size, self.samples)
        return self._order(epoch)[start:end].copy() if self.shuffle else np.arange(start, end, dtype=np.int64)

    def _order(self, epoch: int) -> Indices:
        """The order of an epoch. Steps run in order, so only the last block of epochs is kept."""
        count = max(1, BLOCK // self.samples)
        epochs = range(epoch - epoch % count, epoch - epoch % count + count)
        orders = self._orders.get(epochs)
        if orders is None:
            orders = self._orders_of(epochs)
            self._orders.clear()
            self._orders[epochs] = orders
        return orders[epoch - epochs.start]

    def _orders_of(self, epochs: range) -> Indices:
        return epoch_orders(self.seed, epochs, self.samples)

    def shares(self, step: int) -> list[Indices]:
        """Sample indices of ``step`` per replica: R arrays, as ``numpy.array_split`` cuts them; some may be empty.

        Raises
        ------
        IndexError
            ``step`` is negative.
        """
        indices = self.indices(step)
        return [indices[start:end] for start, end in share_bounds(len(indices), self.replicas)]

    def seeded(self, step: int, replica: int, phase: int = 0) -> contextlib.AbstractContextManager[None]:
        """Seed all generators for one replica-step inside the block; restore them after it.

        The key covers everything that the replica does in the step: collating, forward, loss, backward.
        """
        return self.seeder(self.key(step, replica, phase))

    def key(self, step: int, replica: int, phase: int = 0) -> int:
        """The 64-bit random key of one replica-step; a ``jax.random`` key is made of its two halves, high one first."""
        return replica_key(self.seed, step, replica, self.replicas, phase)

    def seeded_sample(self, step: int, index: int) -> contextlib.AbstractContextManager[None]:
        """Seed all generators for reading one sample of a map-style dataset; restore them after it."""
        return self.seeder(self.sample_key(step, index))

    def seeded_update(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Seed all generators for the optimizer's step, which only optimizers outside torch.optim may need."""
        return self.seeder(update_key(self.seed, step))

    def sample_key(self, step: int, index: int) -> int:
        """Key of (seed, epoch, sample): equal for every step and replica that reads it in this epoch."""
        return key(self.seed, SAMPLE_STREAM, int(self.epoch(step)) * self.samples + int(index))


def replica_key(seed: int, step: int, replica: int, replicas: int, phase: int = 0) -> int:
    """Key of (seed, step, replica, phase); each phase has a stream of its own."""
    return key(seed, REPLICA_STREAM + PHASE * int(phase), int(step) * replicas + int(replica))


def stream_sample_key(seed: int, number: int) -> int:
    """Key for reading a sample of a stream; ``number`` counts through all epochs, as for a dataset read in order."""
    return key(seed, SAMPLE_STREAM, number)


def iterable_key(seed: int, epoch: int) -> int:
    """Key for making a stream's iterable for an epoch."""
    return key(seed, ITERABLE_STREAM, epoch)


def buffer_slot(seed: int, number: int, held: int) -> int:
    """Which of the samples in a shuffle buffer comes next; ``number``: how many came in all epochs before."""
    return (key(seed, BUFFER_STREAM, number) & MASK32) * held >> 32


def update_key(seed: int, step: int) -> int:
    """Key of the update of one step, for optimizers that draw random numbers."""
    return key(seed, UPDATE_STREAM, int(step))


def evaluation_key(seed: int, chunk: int) -> int:
    """Key of one chunk of an evaluation; the same in every evaluation of a run."""
    return key(seed, EVALUATION_STREAM, chunk)


def evaluation_sample_key(seed: int, index: int) -> int:
    """Key for reading one sample in an evaluation."""
    return key(seed, EVALUATION_SAMPLE_STREAM, int(index))


def steps_per_epoch(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Batches in one pass over ``samples``; the last short one counts unless ``drop_last``."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def splitmix64(value: int) -> int:
    """One output of splitmix64 for the state ``value``."""
    value = (value + GOLDEN) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def fmix32(value: int) -> int:
    """MurmurHash3's 32-bit finalizer, a bijection on 32 bits."""
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & MASK32
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & MASK32
    return value ^ (value >> 16)


@functools.lru_cache(maxsize=64)
def _stream_constant(seed: int, stream: int) -> int:
    return splitmix64(splitmix64(seed) ^ stream)


def key(seed: int, stream: int, counter: int) -> int:
    """The 64-bit key number ``counter`` of a stream.

    Parameters
    ----------
    seed : int
        The recipe's seed.
    stream : int
        One of the ``*_STREAM`` constants: keeps unlike uses of one counter apart.
    counter : int
        Any non-negative integer.
    """
    constant = _stream_constant(seed, stream)
    mixed = constant ^ counter
    return (mixed & ~MASK32 & MASK64) | fmix32((fmix32(mixed & MASK32) + (constant >> 32)) & MASK32)


def epoch_orders(seed: int, epochs: range, samples: int) -> Indices:
    """Sample indices of some epochs, each epoch's exactly once. Several cost little more than one if they are short.

    Returns
    -------
    numpy.ndarray
        Shape ``(len(epochs), samples)``, int64.
    """
    return np.argsort(outputs(seed, ORDER_STREAM, epochs, samples), axis=1)


def outputs(seed: int, stream: int, epochs: range, samples: int) -> Outputs:
    """As many outputs of splitmix64 as there are samples, for each epoch; a stream has its own."""
    positions = np.arange(samples, dtype=np.uint64)
    starts = np.array([key(seed, stream, epoch) + GOLDEN & MASK64 for epoch in epochs], dtype=np.uint64)
    return _mixed(starts[:, None] + positions * np.uint64(GOLDEN))


def _mixed(state: Outputs) -> Outputs:
    """The outputs of splitmix64 for these states, written over them."""
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


def share_bounds(samples: int, replicas: int) -> list[tuple[int, int]]:
    """Cut ``samples`` into ``replicas`` runs, as ``numpy.array_split`` does.

    The first ``samples % replicas`` shares hold one sample more; shares may be empty.

    Returns
    -------
    list of (start, end)
        One half-open range per replica.
    """
    size, larger = divmod(samples, replicas)
    starts = [replica * size + min(replica, larger) for replica in range(replicas + 1)]
    return list(itertools.pairwise(starts))


def share_weights(sizes: Sequence[int]) -> list[float]:
    """Weights known from the plan: ``n_r / n_max``; exactly 1.0 for all that have samples if those are equally many."""
    largest = max(sizes)
    return [size / largest for size in sizes]


class Parts:
    """Adds up the losses of a replica's parts, each with its weight.

    Parameters
    ----------
    sizes : sequence of int
        Samples of each part, which are its weight if the loss returns none.

    Attributes
    ----------
    weight : float
        The sum of the weights so far.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._known = share_weights(sizes)
        self._returns: set[bool] = set()
        self._total: Any = 0.0
        self.weight = 0.0

    def add(self, number: int, loss: Any, returned: float | None) -> float:
        """Count a part; returns its weight. With 0 its gradient is ignored.

        Raises
        ------
        UsageError
            The loss returned a weight for some parts only, which would not be comparable.
        """
        self._returns.add(returned is not None)
        if len(self._returns) > 1:
            raise UsageError(
                "loss_fn returned a weight for some micro-batches and none for others; return it always or never"
            )
        weight = self._known[number] if returned is None else returned
        if weight:
            self._total = self._total + (loss if weight == 1 else weight * loss)
            self.weight += weight
        return weight

    @property
    def loss(self) -> Any:
        """The weighted mean of the losses; 0 where nothing counts."""
        return self._total if self.weight in (0, 1) else self._total / self.weight

    @property
    def returned(self) -> float | None:
        """The weight of the replica, if the loss returned those of its parts."""
        return self.weight if True in self._returns else None


class Moment(NamedTuple):
    """An update of a run.

    Attributes
    ----------
    step, phase : int
        The step and the phase that it belongs to.
    first, last : bool
        Whether it begins the step, or ends it.
    name : str
        Of the phase; "" where there are none.
    """

    step: int
    phase: int
    first: bool
    last: bool
    name: str

    def __str__(self) -> str:
        return f"step {self.step}, phase {self.name!r}" if self.name else f"step {self.step}"


@dataclass(frozen=True)
class Rounds:
    """The phases of every step, in order.

    Attributes
    ----------
    every : tuple of int
        Phase p is done in steps 0, ``every[p]``, 2 ``every[p]`` and so on; at least one is done in every step.
    names : tuple of str
    """

    every: tuple[int, ...] = (1,)
    names: tuple[str, ...] = ("",)

    @property
    def main(self) -> int:
        """The first phase that is done in every step: its loss stands for the step's."""
        return self.every.index(1)

    def updates(self, steps: int) -> int:
        """How many updates ``steps`` steps have."""
        return sum(-(-steps // every) for every in self.every)

    def at(self, update: int) -> Moment:
        """The step and phase of an update, counted from 0."""
        if len(self.every) == 1:
            return Moment(update, 0, True, True, self.names[0])
        step = bisect.bisect_right(range(update + 1), update, key=self.updates) - 1
        due = [phase for phase, every in enumerate(self.every) if step % every == 0]
        position = update - self.updates(step)
        return Moment(step, due[position], position == 0, position == len(due) - 1, self.names[due[position]])

    def by_phase(self, values: Sequence[T]) -> dict[str, list[T]]:
        """Values of all updates, sorted by the names of their phases."""
        if len(self.every) == 1:
            return {self.names[0]: list(values)}
        sorted_in: dict[str, list[T]] = {name: [] for name in self.names}
        for update, value in enumerate(values):
            sorted_in[self.at(update).name].append(value)
        return sorted_in


@dataclass(frozen=True)
class Audit:
    """A share of steps in which one replica is computed twice, the same ones for any number of workers.

    Attributes
    ----------
    share : float
        Of the steps, from 0 to 1.
    seed : int
        The recipe's.
    """

    share: float
    seed: int

    def due(self, step: int) -> bool:
        """Whether a step is audited."""
        return self._drawn(step, 0) < self.share * (MASK64 + 1)

    def replica(self, step: int, ran: Sequence[int]) -> int:
        """Which of the replicas that have samples is computed again."""
        return ran[self._drawn(step, 1) % len(ran)]

    def _drawn(self, step: int, what: int) -> int:
        return splitmix64(key(self.seed, AUDIT_STREAM, DRAWS * step + what))


def joined(replica: int, block: Sequence[int], ran: Sequence[int]) -> list[int]:
    """A replica, after the one before if a worker that hosts ``block`` may add up the two as it computes them."""
    pair = replica % 2 and replica - 1 in block and replica - 1 in ran
    return [replica - 1, replica] if pair else [replica]
