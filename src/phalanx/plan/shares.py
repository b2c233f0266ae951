"""How a batch is cut into shares, one for each replica, a share into micro-batches, and what each of them weighs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from phalanx.errors import UsageError


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
