"""How samples are drawn where the recipe says so: by ``weights``, or in the batches of a ``batch_sampler``.

Draws by weights need no floating-point arithmetic, so they are the same on every processor. Each weight is an integer
times a power of two; sums of those integers cut the numbers below 2**64 into one interval per sample. An output of
splitmix64 is one draw, and a search finds its sample. A sample's chance is off by less than 2**-64.

A ``batch_sampler`` is called in each process, when an epoch's batches are counted and again when they are read. Both
calls must return the same batches, so one that keeps state is refused.
"""

from __future__ import annotations

import bisect
import itertools
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.definition import checks
from phalanx.errors import UsageError, safe_str
from phalanx.plan.keys import DRAW_STREAM, SAMPLE_STREAM, SAMPLER_STREAM, key
from phalanx.plan.orders import Indices, Outputs, Plan, Seeded, outputs

MOST_BATCHES = 1_000_000  # in an epoch, beside one for each sample: a generator that yields more has no end
MANTISSA = 53  # bits of a float's
LIST = "it must return a list of lists of sample numbers, as in [[3, 1], [0, 2]]"


@dataclass(frozen=True)
class RepeatingPlan(Plan):
    """A plan in which a sample may come several times an epoch, so that it is read with another key in each step."""

    def sample_key(self, step: int, index: int) -> int:
        """Key of (seed, step, sample)."""
        return key(self.seed, SAMPLE_STREAM, int(step) * self.samples + int(index))


@dataclass(frozen=True)
class WeightedPlan(RepeatingPlan):
    """Each epoch draws as many samples as there are, with replacement; ``bounds``: where each one's interval ends."""

    bounds: Outputs = field(repr=False, compare=False)

    def _orders_of(self, epochs: range) -> Indices:
        return np.searchsorted(self.bounds, outputs(self.seed, DRAW_STREAM, epochs, self.samples), side="right")


@dataclass(frozen=True)
class BatchPlan(RepeatingPlan):
    """The batches are those of a ``batch_sampler``."""

    batches: Batches = field(repr=False, compare=False)

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        """Refused: epochs may differ. ``start(epoch)`` says where one begins."""
        raise UsageError("epochs of a batch_sampler may differ in length; plan.start(epoch) is the first step of one")

    def start(self, epoch: int) -> int:
        """The first step of an epoch."""
        return self.batches.start(epoch)

    def epoch(self, step: int) -> int:
        """The epoch that ``step`` belongs to, from 0."""
        return self.batches.epoch(step)

    def indices(self, step: int) -> Indices:
        """Sample indices of ``step``, in order."""
        if step < 0:
            raise IndexError(f"step is {step}; steps count from 0")
        return self.batches.at(int(step)).copy()


class Batches:
    """The batches of a ``batch_sampler``, an epoch at a time.

    Parameters
    ----------
    sampler : callable
        The user's ``f(epoch, generator)``.
    samples, seed : int
    steps, epochs : int or None
        How many there are, by one of them; the sampler is not called for epochs after that.
    seeder : callable
        Seeds the global generators, and those that ``sampler`` holds, for one call.

    Attributes
    ----------
    known : list of (int, int)
        Of each epoch that was counted: the step that follows it, and a checksum of its batches.
    """

    def __init__(
        self,
        sampler: Callable[..., Any],
        samples: int,
        seed: int,
        steps: int | None,
        epochs: int | None,
        seeder: Seeded,
    ) -> None:
        self._sampler, self._samples, self._seed, self._seeder = sampler, samples, seed, seeder
        self._steps, self._epochs = (sys.maxsize if most is None else most for most in (steps, epochs))
        self._latest: tuple[int, list[Indices]] = (-1, [])
        self.known: list[tuple[int, int]] = []

    def start(self, epoch: int) -> int:
        """The first step of an epoch; after the last one, how many steps there are."""
        while len(self.known) < epoch and self._goes_on():
            batches = self._drawn(len(self.known))
            self.known.append((self.start(len(self.known)) + len(batches), checksum(batches)))
        return self.known[min(epoch, len(self.known)) - 1][0] if epoch else 0

    def _goes_on(self) -> bool:
        """Whether there are epochs after those that are known."""
        return len(self.known) < self._epochs and (not self.known or self.known[-1][0] < self._steps)

    def epoch(self, step: int) -> int:
        """The epoch that ``step`` belongs to."""
        while self._goes_on() and self.start(len(self.known)) <= step:
            self.start(len(self.known) + 1)
        return bisect.bisect_right(self.known, step, key=lambda item: item[0])

    def checksum(self, epoch: int) -> int:
        """A checksum of an epoch's batches, as they were counted."""
        self.start(epoch + 1)
        return self.known[epoch][1]

    def at(self, step: int) -> Indices:
        """The batch of a step."""
        epoch = self.epoch(step)
        if epoch == len(self.known):
            raise IndexError(f"step is {step}, but the batch_sampler's {epoch} epochs have {self.start(epoch)} steps")
        if self._latest[0] != epoch:
            self._latest = epoch, self._drawn(epoch)
            if checksum(self._latest[1]) != self.checksum(epoch):
                self._latest = (-1, [])
                raise UsageError(
                    f"batch_sampler returned other batches for epoch {epoch} when it was called again; it is called "
                    "several times, and in each process, so its batches must follow from its arguments alone: draw "
                    "from the generator, and keep nothing from call to call"
                )
        return self._latest[1][step - self.start(epoch)]

    def _drawn(self, epoch: int) -> list[Indices]:
        """What the sampler returns for an epoch, checked."""
        name, seed = f"batch_sampler(epoch={epoch})", key(self._seed, SAMPLER_STREAM, epoch)
        try:
            with self._seeder(seed):
                drawn = iter(self._sampler(epoch, np.random.default_rng(seed)))
                batches = list(itertools.islice(drawn, self._samples + MOST_BATCHES + 1))
        except Exception as error:
            raise UsageError(f"{name} raised {type(error).__name__}: {safe_str(error)}; {LIST}") from error
        if not batches:
            raise UsageError(f"{name} returned no batches; {LIST}")
        if len(batches) > self._samples + MOST_BATCHES:
            raise UsageError(
                f"{name} goes on after {len(batches) - 1:,} batches, and data has {self._samples:,} samples; end the "
                "epoch after its last batch, and take steps= for the length of the run"
            )
        return [self._batch(f"batch {number} of {name}", batch) for number, batch in enumerate(batches)]

    def _batch(self, name: str, batch: Any) -> Indices:
        try:
            indices = np.asarray(batch)
        except ValueError:  # lists of unequal length
            indices = np.array(None)
        if indices.ndim != 1 or not indices.size or indices.dtype.kind not in "iu":
            raise UsageError(f"{name} is {checks.described(batch)}, which is no list of sample numbers; {LIST}")
        outside = indices[(indices < 0) | (indices >= self._samples)]
        if outside.size:
            raise UsageError(
                f"{name} has sample {outside[0]}, but data has {self._samples} samples, counted from 0; return numbers "
                f"from 0 to {self._samples - 1}"
            )
        return indices.astype(np.int64)


def checksum(batches: Sequence[Indices]) -> int:
    """Of batches in their order."""
    sizes = np.array([len(batch) for batch in batches])
    return zlib.crc32(np.concatenate([sizes, *batches]).tobytes())


def checked_weights(weights: Any, samples: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A copy of a recipe's weights, float64.

    Raises
    ------
    UsageError
        There is not one for each sample, one is negative or not finite, or all are 0.
    """
    if hasattr(weights, "num_samples"):
        raise UsageError(f"weights is a {type(weights).__name__}; pass the numbers: weights=sampler.weights")
    try:
        values = np.array(weights.tolist() if hasattr(weights, "tolist") else weights, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.array(None, dtype=np.float64)
    if values.shape != (samples,):
        what = f"has {len(values)} numbers" if values.ndim == 1 else f"is {checks.described(weights)}"
        raise UsageError(
            f"weights {what}; it must have one number per sample, and data has {samples}. For "
            "classes, give each sample the weight of its class: weights=(1 / counts)[y]"
        )
    wrong = np.flatnonzero(~((values >= 0) & (values < np.inf)))
    if wrong.size or not values.any():
        first = f"weights[{wrong[0]}] is {values[wrong[0]]}" if wrong.size else "all weights are 0"
        raise UsageError(f"{first}; weights must be finite numbers of at least 0, and one must be positive")
    return values


def bounds_of(weights: np.ndarray[Any, np.dtype[np.float64]]) -> Outputs:
    """Where each sample's interval of the numbers below 2**64 ends; none from the last positive weight on."""
    mantissas, exponents = np.frexp(weights)
    integers = (mantissas * 2.0**MANTISSA).astype(np.int64).tolist()
    shifts = (exponents - exponents[weights > 0].min()).clip(0).tolist()
    sums = list(itertools.accumulate(number << shift for number, shift in zip(integers, shifts, strict=True)))
    return np.array([(end << 64) // sums[-1] for end in sums if end < sums[-1]], dtype=np.uint64)
