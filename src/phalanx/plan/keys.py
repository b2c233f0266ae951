"""Random keys, and what is drawn by them: the order of samples, and which steps are audited. Nothing is carried.

A key is a 64-bit integer, a bijection of its counter under a constant that is hashed from seed and stream. Its low 32
bits alone are a bijection of the counter's low 32 bits: torch's CPU generator uses no more than those, so a hash could
collide, and a bijection cannot within 2**32 counters. It takes two rounds with the constant in between, so that streams
are not one permutation shifted. Mixers: splitmix64 (Steele, Lea and Flood, 2014) and the
32-bit finalizer of MurmurHash3 (Appleby, 2011).

The order of an epoch is a pure function of (seed, epoch), pinned by test vectors. Algorithm ``splitmix64-argsort-1``:
give sample i the i-th output of splitmix64 started from a hash of (seed, epoch), and sort the samples by it. The
outputs of one stream are all different, so there are no ties and every sorting algorithm gives the same order. A long
epoch is never held whole. Its outputs are cut by value into windows of about as many, so that the samples of one window
follow those of the one before. How many lie in each takes one pass over all outputs, a window itself another.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

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
PHASE: Final = 1 << 8  # from the stream of one phase of a step to that of the next
Indices = np.ndarray[Any, np.dtype[np.int64]]
Outputs = np.ndarray[Any, np.dtype[np.uint64]]
ALGORITHM = "splitmix64-argsort-1"
WINDOW = 1 << 24  # samples of an epoch that are held at once; a longer epoch takes a pass over its outputs for each
CHUNK = 1 << 18  # outputs that are computed at once
BLOCK = 4096  # samples of short epochs that are sorted at once
KEPT = 2  # windows: a batch may lie in two
DRAWS = 2  # numbers that are drawn for a step of an audit


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


class Orders:
    """The orders of all epochs, asked for in pieces; what was asked for last is kept.

    Parameters
    ----------
    seed, samples : int
    shuffle : bool
        False: every epoch is 0, 1, 2, ..
    window : int
        Samples to hold at once, about.
    chunk : int
        Outputs to compute at once.
    """

    def __init__(self, seed: int, samples: int, *, shuffle: bool, window: int = WINDOW, chunk: int = CHUNK) -> None:
        self._seed = seed
        self._samples = samples
        self._shuffle = shuffle
        self._chunk = chunk
        self._bits = (-(-samples // window) - 1).bit_length() if shuffle else 0  # of an output, that say its window
        self._short: dict[int, Indices] = {}
        self._windows: dict[int, Indices] = {}
        self._ends: tuple[int, Indices] = (-1, np.zeros(0, np.int64))  # an epoch, and where its windows end

    def piece(self, epoch: int, start: int, end: int) -> Indices:
        """Sample indices of an epoch from position ``start`` to before ``end``, as far as there are any."""
        end = min(end, self._samples)
        if not self._shuffle:
            return np.arange(start, end, dtype=np.int64)
        if not self._bits:
            return self._whole(epoch)[start:end].copy()
        ends = self._window_ends(epoch)
        found = [np.zeros(0, np.int64)]
        while start < end:
            number = int(np.searchsorted(ends, start, side="right"))
            begin, rest = int(ends[number - 1]) if number else 0, min(end, int(ends[number]))
            found.append(self._window(epoch, number)[start - begin : rest - begin])
            start = rest
        return np.concatenate(found)

    def _whole(self, epoch: int) -> Indices:
        """Steps run in order, so the block of epochs around the last one asked for is all that is kept."""
        order = self._short.get(epoch)
        if order is None:
            block = max(1, BLOCK // self._samples)
            epochs = range(epoch - epoch % block, epoch - epoch % block + block)
            orders = epoch_orders(self._seed, epochs, self._samples, shuffle=True)
            order = orders[epoch % block]
            self._short = dict(zip(epochs, orders, strict=True))
        return order

    def _window_ends(self, epoch: int) -> Indices:
        known, ends = self._ends
        if known != epoch:
            counts = np.zeros(1 << self._bits, np.int64)
            for _, outputs in self._chunks(epoch):
                counts += np.bincount(self._numbers(outputs), minlength=len(counts))
            ends = np.cumsum(counts)
            self._ends = epoch, ends
            self._windows = {}
        return ends

    def _window(self, epoch: int, number: int) -> Indices:
        """The samples of one window, in order."""
        found = self._windows.get(number)
        if found is None:
            ends = self._window_ends(epoch)
            count = int(ends[number] - (ends[number - 1] if number else 0))
            keys, samples, filled = np.empty(count, np.uint64), np.empty(count, np.int64), 0
            for start, outputs in self._chunks(epoch):
                inside = np.flatnonzero(self._numbers(outputs) == number)
                rest = filled + len(inside)
                keys[filled:rest], samples[filled:rest], filled = outputs[inside], inside + start, rest
            found = samples[np.argsort(keys)]
            while len(self._windows) >= KEPT:
                del self._windows[next(iter(self._windows))]
            self._windows[number] = found
        return found

    def _chunks(self, epoch: int) -> Iterator[tuple[int, Outputs]]:
        """All outputs of an epoch's stream, some at a time, each with the sample that the first belongs to."""
        begin = _begin(self._seed, epoch)
        for start in range(0, self._samples, self._chunk):
            positions = np.arange(start, min(start + self._chunk, self._samples), dtype=np.uint64)
            yield start, _mixed(begin + positions * np.uint64(GOLDEN))

    def _numbers(self, outputs: Outputs) -> Indices:
        """Which window each output lies in."""
        return (outputs >> np.uint64(64 - self._bits)).view(np.int64)


def epoch_orders(seed: int, epochs: range, samples: int, *, shuffle: bool) -> Indices:
    """Sample indices of some epochs, each epoch's exactly once. Several cost little more than one if they are short.

    Returns
    -------
    numpy.ndarray
        Shape ``(len(epochs), samples)``, int64.
    """
    positions = np.arange(samples, dtype=np.int64)
    if not shuffle:
        return np.broadcast_to(positions, (len(epochs), samples))
    starts = np.array([_begin(seed, epoch) for epoch in epochs], dtype=np.uint64)
    return np.argsort(_mixed(starts[:, None] + positions.view(np.uint64) * np.uint64(GOLDEN)), axis=1)


def _begin(seed: int, epoch: int) -> np.uint64:
    """The state that leads to an epoch's first output."""
    return np.uint64(key(seed, ORDER_STREAM, epoch) + GOLDEN & MASK64)


def _mixed(state: Outputs) -> Outputs:
    """The outputs of splitmix64 for these states, written over them."""
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


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
    """A replica, after the one before where a worker that hosts ``block`` may add the two up as it computes them."""
    pair = replica % 2 and replica - 1 in block and replica - 1 in ran
    return [replica - 1, replica] if pair else [replica]
