"""A replica whose share is cut into micro-batches: its loss and weight, out of those of the parts in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.errors import UsageError
from phalanx.plan.shares import share_weights


class Parts:
    """Adds up the losses of a replica's parts, each with its weight.

    Parameters
    ----------
    sizes : sequence of int
        Samples of each part; a part counts by them where the loss tells no weight.

    Attributes
    ----------
    weight : float
        The sum of the weights so far.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._known = share_weights(sizes)
        self._told: set[bool] = set()
        self._total: Any = 0.0
        self.weight = 0.0

    def add(self, number: int, loss: Any, returned: float | None) -> float:
        """Count a part; returns its weight, 0 where its gradient is not to be looked at.

        Raises
        ------
        UsageError
            The loss told its weight in some parts only, which would not be comparable.
        """
        self._told.add(returned is not None)
        if len(self._told) > 1:
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
        """The weight of the replica, if the loss told those of its parts."""
        return self.weight if True in self._told else None
