"""The sample order of an epoch: a pure function of (seed, epoch), pinned by test vectors.

Algorithm ``philox-argsort-1``: the first n outputs of Philox4x64-10 (Salmon et al., 2011) with key
``(seed, epoch)`` and counter 0, stably argsorted. numpy keeps the raw streams of its bit generators fixed, unlike
those of its distributions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ALGORITHM = "philox-argsort-1"


def epoch_order(seed: int, epoch: int, samples: int, *, shuffle: bool) -> npt.NDArray[np.int64]:
    """Sample indices of one epoch, each exactly once.

    Returns
    -------
    numpy.ndarray
        Shape ``(samples,)``, int64.
    """
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(samples)
    return np.argsort(random, kind="stable").astype(np.int64, copy=False)
