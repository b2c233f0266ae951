"""The plan: what follows from the recipe alone, computed when asked, never carried.

Pure: no framework, process, clock or file.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.errors import UsageError
from phalanx.plan import keys
from phalanx.plan.keys import Indices, Orders
from phalanx.plan.shares import share_bounds

Seeded = Callable[[int], contextlib.AbstractContextManager[None]]


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
    def _orders(self) -> Orders:
        return Orders(self.seed, self.samples, shuffle=self.shuffle)

    def epoch(self, step: int) -> int:
        """The pass over the data that ``step`` belongs to, from 0."""
        return step // self.steps_per_epoch

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
        return self._orders.piece(epoch, start, start + self.batch_size)

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
        return keys.key(self.seed, keys.SAMPLE_STREAM, int(self.epoch(step)) * self.samples + int(index))


def replica_key(seed: int, step: int, replica: int, replicas: int, phase: int = 0) -> int:
    """Key of (seed, step, replica, phase); each phase has a stream of its own."""
    return keys.key(seed, keys.REPLICA_STREAM + keys.PHASE * int(phase), int(step) * replicas + int(replica))


def stream_sample_key(seed: int, number: int) -> int:
    """Key for reading a sample of a stream, which is the so manyeth of all epochs; as of a dataset read in order."""
    return keys.key(seed, keys.SAMPLE_STREAM, number)


def iterable_key(seed: int, epoch: int) -> int:
    """Key for making a stream's iterable for an epoch."""
    return keys.key(seed, keys.ITERABLE_STREAM, epoch)


def buffer_slot(seed: int, number: int, held: int) -> int:
    """Which of the samples in a shuffle buffer comes next; ``number``: how many came in all epochs before."""
    return (keys.key(seed, keys.BUFFER_STREAM, number) & keys.MASK32) * held >> 32


def update_key(seed: int, step: int) -> int:
    """Key of the update of one step, for optimizers that draw random numbers."""
    return keys.key(seed, keys.UPDATE_STREAM, int(step))


def evaluation_key(seed: int, chunk: int) -> int:
    """Key of one chunk of an evaluation; the same in every evaluation of a run."""
    return keys.key(seed, keys.EVALUATION_STREAM, chunk)


def evaluation_sample_key(seed: int, index: int) -> int:
    """Key for reading one sample in an evaluation."""
    return keys.key(seed, keys.EVALUATION_SAMPLE_STREAM, int(index))


def steps_per_epoch(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Batches in one pass over ``samples``; the last short one counts unless ``drop_last``."""
    return samples // batch_size if drop_last else -(-samples // batch_size)
