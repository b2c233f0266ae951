"""How a batch is dealt to replicas, and what each share weighs. Pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


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
