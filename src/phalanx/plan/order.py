"""The sample order of an epoch: a pure function of (seed, epoch), pinned by test vectors.

Algorithm ``splitmix64-argsort-1``: give sample i the i-th output of splitmix64 (Steele, Lea and Flood, 2014) started
from a hash of (seed, epoch), and sort the samples by it. The outputs of one stream are all different, so there are no
ties and every sorting algorithm gives the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.plan.keys import GOLDEN, MASK64, ORDER_STREAM, key

Indices = np.ndarray[Any, np.dtype[np.int64]]
ALGORITHM = "splitmix64-argsort-1"


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
    starts = np.array([key(seed, ORDER_STREAM, epoch) + GOLDEN & MASK64 for epoch in epochs], dtype=np.uint64)
    state = starts[:, None] + positions.view(np.uint64) * np.uint64(GOLDEN)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return np.argsort(state, axis=1)
