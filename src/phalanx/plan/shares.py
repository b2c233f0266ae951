"""How a run is cut: into steps and their phases, a batch into shares, a share into micro-batches. Pure arithmetic.

Each phase of a step is gradients, fold, update. Engines count updates, so that whatever holds between two steps (a
barrier, a snapshot in memory, the fall of a worker) holds between two phases. Without phases both are the same.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

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


T = TypeVar("T")


class Moment(NamedTuple):
    """An update of a run.

    Attributes
    ----------
    step, phase : int
        Where it belongs.
    first, last : bool
        Whether it begins the step, or ends it.
    name : str
        Of the phase; "" where there are none.
    """

    step: int
    phase: int
    first: bool
    last: bool
    name: str

    def __str__(self) -> str:
        return f"step {self.step}, phase {self.name!r}" if self.name else f"step {self.step}"


@dataclass(frozen=True)
class Rounds:
    """The phases of every step, in order.

    Attributes
    ----------
    every : tuple of int
        Phase p is done in steps 0, ``every[p]``, 2 ``every[p]`` and so on; one of them in each.
    names : tuple of str
    """

    every: tuple[int, ...] = (1,)
    names: tuple[str, ...] = ("",)

    @property
    def main(self) -> int:
        """The first phase that is done in every step: its loss stands for the step's."""
        return self.every.index(1)

    def updates(self, steps: int) -> int:
        """How many updates so many steps have."""
        return sum(-(-steps // every) for every in self.every)

    def at(self, update: int) -> Moment:
        """Where an update belongs, counted from 0."""
        if len(self.every) == 1:
            return Moment(update, 0, True, True, self.names[0])
        step = bisect.bisect_right(range(update + 1), update, key=self.updates) - 1
        due = [phase for phase, every in enumerate(self.every) if step % every == 0]
        place = update - self.updates(step)
        return Moment(step, due[place], place == 0, place == len(due) - 1, self.names[due[place]])

    def by_phase(self, values: Sequence[T]) -> dict[str, list[T]]:
        """What there is of every update, sorted into phases by their names."""
        if len(self.every) == 1:
            return {self.names[0]: list(values)}
        sorted_in: dict[str, list[T]] = {name: [] for name in self.names}
        for update, value in enumerate(values):
            sorted_in[self.at(update).name].append(value)
        return sorted_in
