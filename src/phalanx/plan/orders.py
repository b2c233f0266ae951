"""The samples of each step and share.

The order of an epoch is a pure function of (seed, epoch), pinned by test vectors. Algorithm ``splitmix64-argsort-1``:
give sample i the i-th output of splitmix64 started from a hash of (seed, epoch), and sort the samples by it. The
outputs of one stream are all different, so there are no ties and every sorting algorithm gives the same order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.errors import UsageError
from phalanx.plan.keys import GOLDEN, MASK64, ORDER_STREAM, SAMPLE_STREAM, key, replica_key, update_key
from phalanx.plan.shares import share_bounds

Seeded = Callable[[int], contextlib.AbstractContextManager[None]]
Indices = np.ndarray[Any, np.dtype[np.int64]]
Outputs = np.ndarray[Any, np.dtype[np.uint64]]
ALGORITHM = "splitmix64-argsort-1"
BLOCK = 4096  # samples of short epochs that are sorted at once


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


def steps_per_epoch(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Batches in one pass over ``samples``; the last short one counts unless ``drop_last``."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


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
