"""The seam between an engine with several processes and a framework: its state in memory that all of them map.

A vector is a gradient: a list with one entry per parameter, None where there is none, or where it is another worker's.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from phalanx.plan.placement import Placement

Vector = list[Any]
Places = Mapping[int, tuple[mmap.mmap, int]]
Order = Callable[[tuple[int, ...]], Sequence[tuple[int, int]]]


class Arrays(Protocol):
    """How a framework's arrays lie over memory; see ``shared.layout.Spec`` for what they look like.

    ``target[...] = source`` copies an array into another of the same shape and dtype.
    """

    def view(self, memory: mmap.mmap, offset: int, spec: Any) -> Any:
        """An array over memory."""
        ...

    def add_into(self, left: Vector, right: Vector, homes: Vector) -> Vector:
        """``left + right``, written into ``left``, which lies in ``homes``; what only ``right`` has moves there."""
        ...

    def add_up(self, parts: Sequence[Any], additions: Sequence[tuple[int, int]], first: int, divisor: float) -> Any:
        """Do the additions (into, from) between ``parts``, then divide part ``first``, and return it."""
        ...


class SharedState(Protocol):
    """A framework's state as one process has it: a worker, where it lies in an arena, or the caller, who copies it.

    Attributes
    ----------
    direct : bool
        Whether gradients are computed where they are wanted, each as soon as it is there.
    """

    direct: bool

    @property
    def starts(self) -> Sequence[Any]:
        """The buffers at the step's start; of a worker, they lie in the arena."""
        ...

    def made(self, absent: Sequence[int]) -> Mapping[int, Any]:
        """Those of the ``absent`` pieces of optimizer state that exist now, by their number in the layout."""
        ...

    def adopt(self, pieces: Mapping[int, Any], *, more: bool = False) -> None:
        """Use these arrays as the pieces of optimizer state, and forget all others, or use these ``more``."""
        ...

    def rest(self) -> tuple[Any, Any]:
        """Optimizer state without a place, as far as it is this process's, and options of optimizers and schedules.

        Both can be pickled.
        """
        ...

    def take(self, foreign: Any, options: Any) -> None:
        """Continue from such a rest."""
        ...

    def weights(self) -> Sequence[np.ndarray]:
        """The caller's: the bytes of each storage, in the layout's order."""
        ...

    def take_arrays(self, weights: Sequence[np.ndarray | None], buffers: Sequence[Any]) -> None:
        """The caller takes the bytes of storages, where there are any, and buffers; what is passed may change later."""
        ...

    def aim(self, homes: Vector | None) -> None:
        """Put the next replica's gradient there, if gradients are ``direct``; None: anywhere."""
        ...

    def norm(self, gradient: Vector, meet: Callable[[], None], there: Sequence[int] | None) -> float:
        """Write the norms of what this worker owns, ``meet`` the others, and return the global norm out of all.

        ``there``: which parameters have a gradient, None for all.
        """
        ...


class Sharing(Protocol):
    """How a framework shares its state with other processes.

    Attributes
    ----------
    arrays : Arrays
    moving_seconds : float
        About how long it takes until worker processes are ready, with the framework imported.
    portable : bool
        Whether the whole state is known, so that a run can move to other processes in the middle.
    """

    arrays: Arrays
    moving_seconds: float
    portable: bool

    def lay_out(self, placement: Placement, take: Callable[[int], int], known: Any = None) -> Any:
        """Give everything its place in an arena.

        ``known``: what another process, which may be further on, has found the state to consist of.
        """
        ...

    def open(self, layout: Any, arena: mmap.mmap, worker: int | None) -> SharedState:
        """The state in this process: a worker's lies in the arena from here on; None: in the caller's."""
        ...

    def move(self, layout: Any, places: Places) -> None:
        """Have storages of this process's weights, by their number, lie elsewhere: at an offset into a memory."""
        ...

    def look(self, layout: Any, arena: mmap.mmap, resting: Sequence[int]) -> Any:
        """What lies in the arena as ``records.Exported``, without a digest; shares memory where arrays are written.

        ``resting``: storages that the caller's state has as they are.
        """
        ...
