"""Random keys: each is a pure function of the seed, what it is for, and a counter.

A key is a 64-bit integer, a bijection of its counter under a constant that is hashed from seed and stream. Its low 32
bits alone are a bijection of the counter's low 32 bits: torch's CPU generator uses no more than those, so a hash could
collide, and a bijection cannot within 2**32 counters. It takes two rounds with the constant in between, so that streams
are not one permutation shifted. Mixers: splitmix64 (Steele, Lea and Flood, 2014) and the
32-bit finalizer of MurmurHash3 (Appleby, 2011).
"""

from __future__ import annotations

import functools
from typing import Final

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
LOSS_STREAM: Final = 12
SHARD_STREAM: Final = 13
PHASE: Final = 1 << 8  # from the stream of one phase of a step to that of the next


def replica_key(seed: int, step: int, replica: int, replicas: int, phase: int = 0) -> int:
    """Key of (seed, step, replica, phase); each phase has a stream of its own."""
    return key(seed, REPLICA_STREAM + PHASE * int(phase), int(step) * replicas + int(replica))


def loss_key(seed: int, step: int, phase: int = 0) -> int:
    """Key of a loss over the whole batch, of (seed, step, phase)."""
    return key(seed, LOSS_STREAM + PHASE * int(phase), int(step))


def stream_sample_key(seed: int, number: int) -> int:
    """Key for reading a sample of a stream; ``number`` counts through all epochs, as for a dataset read in order."""
    return key(seed, SAMPLE_STREAM, number)


def shard_seed(seed: int, epoch: int, shard: int, shards: int) -> int:
    """The seed of one of a stream's logical readers in an epoch, from which its other keys follow."""
    return key(seed, SHARD_STREAM, epoch * shards + shard)


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
