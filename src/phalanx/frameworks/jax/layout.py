"""Where everything of a jax run lies in an arena: the same in every process, as it follows from tree and placement."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from phalanx.plan.placement import Placement, dealt, most_held

SHARED = -1


class Spec(NamedTuple):
    """An array: its shape and dtype; of random keys, those of their words."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return int(np.prod(self.shape, dtype=int)) * self.dtype.itemsize


@dataclass
class Layout:
    """Offsets into an arena.

    Attributes
    ----------
    params, state : list of Spec
        The leaves of the parameters, and of the optimizer's state.
    owners, keepers : list of int
        The worker that folds and updates each parameter; that keeps each leaf of the state
        (SHARED: each for itself).
    weights : list of int
    kept : list of list of int
        ``kept[worker][leaf]`` of the optimizer's state; one place for all, but where it is SHARED.
    sets : list of list of list of int
        ``sets[worker][number][parameter]``: where a partial sum is published for the owners of what it adds up.
    squares : int
        Each parameter's sum of squared gradients.
    snapshot : (list of int, list of list of int)
        Copies, as of a step boundary, of the weights and of what is kept.
    touched : int
        Bytes that will really be used, about.
    """

    params: list[Spec]
    state: list[Spec]
    owners: list[int]
    keepers: list[int]
    weights: list[int] = field(init=False)
    kept: list[list[int]] = field(init=False)
    sets: list[list[list[int]]] = field(init=False)
    squares: int = field(init=False)
    snapshot: tuple[list[int], list[list[int]]] = field(init=False)
    touched: int = field(init=False)

    def signature(self) -> str:
        """Equal in two processes whose models fit together."""
        return repr((self.params, self.state, self.owners, self.keepers))


def held(holders: Sequence[int], worker: int) -> list[int]:
    """What a worker folds or updates, of parameters by their owners, or of the optimizer's state by its keepers."""
    return [index for index, holder in enumerate(holders) if holder in (worker, SHARED)]


def owners_of(
    params: Sequence[Spec], state: Sequence[Spec], users: Sequence[int] | None, workers: int
) -> tuple[list[int], list[int]]:
    """An owner for each parameter, and a keeper for each leaf of the optimizer's state.

    ``users``: the parameter that each leaf of the state belongs to; None: the first worker owns all.
    """
    if users is None:
        return [0] * len(params), [0] * len(state)
    owners = dealt([spec.size for spec in params], workers)
    return owners, [SHARED if user < 0 else owners[user] for user in users]


def lay_out(
    params: list[Spec],
    state: list[Spec],
    owners: list[int],
    keepers: list[int],
    placement: Placement,
    take: Callable[[int], int],
) -> Layout:
    """Give everything its place, handed out by ``take``."""
    layout, workers = Layout(params, state, owners, keepers), placement.workers
    layout.weights = [take(spec.size) for spec in params]
    layout.kept = _kept(state, keepers, workers, take)
    layout.sets = [
        [
            [take(spec.size) if owner != worker else 0 for spec, owner in zip(params, owners, strict=True)]
            for _ in range(most_held(placement.replicas, block))
        ]
        for worker, block in enumerate(placement.blocks)
    ]
    layout.squares = take(8 * len(params))
    layout.snapshot = [take(spec.size) for spec in params], _kept(state, keepers, workers, take)
    layout.touched = take(0)
    return layout


def _kept(state: list[Spec], keepers: list[int], workers: int, take: Callable[[int], int]) -> list[list[int]]:
    rows = [[take(spec.size) for spec in state]]
    for _ in range(1, workers):
        leaves = zip(state, keepers, rows[0], strict=True)
        rows.append([take(spec.size) if keeper == SHARED else first for spec, keeper, first in leaves])
    return rows


def view(arena: mmap.mmap, offset: int, spec: Spec) -> np.ndarray:
    """An array over arena memory."""
    return np.frombuffer(arena, np.uint8, spec.size, offset).view(spec.dtype).reshape(spec.shape)
