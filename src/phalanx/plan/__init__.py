"""The plan: what follows from the recipe alone, computed when asked, never carried.

Pure: no framework, process, clock or file.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.plan import keys
from phalanx.plan.order import Indices, Orders
from phalanx.plan.shares import share_bounds

Seeded = Callable[[int], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Plan:
    """Sample order, shares and random keys of a recipe over data of known length.

    Public as ``recipe.plan``, so that a hand-written loop can follow it.

    Attributes
    ----------
    samples : int
        Length of the data.
    replicas : int
        R.
    batch_size : int
        Samples a step over all replicas.
    steps : int
        Optimizer steps in the whole run.
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
        """Steps in one pass over the data; the last may be short."""
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

    def seeded(self, step: int, replica: int) -> contextlib.AbstractContextManager[None]:
        """Seed all generators for one replica-step inside the block; restore them after it.

        The key covers everything that the replica does in the step: collating, forward, loss, backward.
        """
        return self.seeder(self.key(step, replica))

    def key(self, step: int, replica: int) -> int:
        """The 64-bit random key of one replica-step; a ``jax.random`` key is made of its two halves, high one first."""
        return replica_key(self.seed, step, replica, self.replicas)

    def seeded_sample(self, step: int, index: int) -> contextlib.AbstractContextManager[None]:
        """Seed all generators for reading one sample of a map-style dataset; restore them after it."""
        return self.seeder(self.sample_key(step, index))

    def seeded_update(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Seed all generators for the optimizer's step, which only optimizers outside torch.optim may need."""
        return self.seeder(update_key(self.seed, step))

    def sample_key(self, step: int, index: int) -> int:
        """Key of (seed, epoch, sample): equal for every step and replica that reads it in this epoch."""
        return keys.key(self.seed, keys.SAMPLE_STREAM, int(self.epoch(step)) * self.samples + int(index))


def replica_key(seed: int, step: int, replica: int, replicas: int) -> int:
    """Key of (seed, step, replica)."""
    return keys.key(seed, keys.REPLICA_STREAM, int(step) * replicas + int(replica))


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
