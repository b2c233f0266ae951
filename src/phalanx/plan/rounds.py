"""The phases of a step.

Each phase is gradients, fold, update. Engines count updates, so that whatever holds between two steps (a barrier, a
snapshot in memory, the death of a worker) holds between two phases. Without phases both are the same.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Moment(NamedTuple):
    """An update of a run.

    Attributes
    ----------
    step, phase : int
        The step and the phase that it belongs to.
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
        Phase p is done in steps 0, ``every[p]``, 2 ``every[p]`` and so on; at least one is done in every step.
    names : tuple of str
    """

    every: tuple[int, ...] = (1,)
    names: tuple[str, ...] = ("",)

    @property
    def main(self) -> int:
        """The first phase that is done in every step: its loss stands for the step's."""
        return self.every.index(1)

    def updates(self, steps: int) -> int:
        """How many updates ``steps`` steps have."""
        return sum(-(-steps // every) for every in self.every)

    def at(self, update: int) -> Moment:
        """The step and phase of an update, counted from 0."""
        if len(self.every) == 1:
            return Moment(update, 0, True, True, self.names[0])
        step = bisect.bisect_right(range(update + 1), update, key=self.updates) - 1
        due = [phase for phase, every in enumerate(self.every) if step % every == 0]
        position = update - self.updates(step)
        return Moment(step, due[position], position == 0, position == len(due) - 1, self.names[due[position]])

    def by_phase(self, values: Sequence[T]) -> dict[str, list[T]]:
        """Values of all updates, sorted by the names of their phases."""
        if len(self.every) == 1:
            return {self.names[0]: list(values)}
        sorted_in: dict[str, list[T]] = {name: [] for name in self.names}
        for update, value in enumerate(values):
            sorted_in[self.at(update).name].append(value)
        return sorted_in
