"""The seam between an engine with several processes and a framework: its state in memory that all of them map.

A vector is a gradient: a list with one entry per parameter, None where there is none, or where it is another worker's.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from phalanx.plan.placement import Placement

Vector = list[Any]
Places = Mapping[int, tuple[mmap.mmap, int]]
Order = Callable[[tuple[int, ...]], Sequence[tuple[int, int]]]


class GradientBuckets(Protocol):
    """Gradients in an arena: published for those who own the parameters, and folded by them.

    Attributes
    ----------
    blank : callable
        ``blank(index)``: an array as a parameter's gradient is, with any content.
    """

    blank: Callable[[int], Any]

    def set_destination(self, number: int) -> None:
        """Put the next replica's gradient where this worker publishes the ``number``-th vector that it holds.

        -1: anywhere but where a vector lies.
        """
        ...

    def watch(self, told: Callable[[int, Any], None]) -> bool:
        """Call ``told(index, gradient)`` when a gradient is there, and where it is wanted; again if it changes.

        False: gradients come all at once here.
        """
        ...

    def peer(self, worker: int, number: int) -> Vector:
        """What another worker published, as far as this one owns it."""
        ...

    def add(self, left: Vector, right: Vector, number: int) -> Vector:
        """``left + right``; may be put in place of ``left``, the ``number``-th vector."""
        ...

    def publish(self, number: int, vector: Vector) -> None:
        """See to it that what others own of the ``number``-th vector is where they look for it."""
        ...

    def fold(self, vectors: Sequence[Vector | None], order: Order, divisor: float) -> Vector:
        """Add vectors as ``order(positions that are there)`` says, and divide the sum; for what this worker owns."""
        ...

    def publish_norms(self, gradient: Vector) -> None:
        """Write the norms of what this worker owns."""
        ...

    def total_norm(self, there: Sequence[int] | None) -> float:
        """The global norm, out of what all published; ``there``: which parameters have a gradient, None for all."""
        ...


class Arrays(Protocol):
    """How a framework's arrays lie over memory; see ``shared.layout.Spec`` for what they look like."""

    def view(self, memory: mmap.mmap, offset: int, spec: Any) -> Any:
        """An array over memory."""
        ...

    def write(self, target: Any, source: Any) -> None:
        """Copy an array into another of the same shape and dtype."""
        ...


class WorkerState(Protocol):
    """What a framework keeps in a worker process, while weights, buffers and optimizer state lie in the arena."""

    @property
    def buckets(self) -> GradientBuckets:
        """Gradients."""
        ...

    @property
    def starts(self) -> Sequence[Any]:
        """The buffers at the step's start, which lie in the arena."""
        ...

    def made(self, absent: Sequence[int]) -> Mapping[int, Any]:
        """Those of the ``absent`` pieces of optimizer state that the last update made."""
        ...

    def adopt(self, pieces: Mapping[int, Any], *, more: bool = False) -> None:
        """Use these arrays as the pieces of optimizer state, and forget all others, or use these ``more``."""
        ...

    def foreign(self) -> Any:
        """Optimizer state that no place is known for, as far as this worker owns it; can be pickled."""
        ...

    def options(self) -> Any:
        """Options of optimizers and schedules; can be pickled."""
        ...

    def take(self, foreign: Any, options: Any) -> None:
        """Continue from state that no place is known for, and from options."""
        ...


class CallerState(Protocol):
    """A framework's state in the caller's process, to be copied into an arena and out of it."""

    @property
    def starts(self) -> Sequence[Any]:
        """The buffers."""
        ...

    def weights(self) -> Sequence[np.ndarray]:
        """The bytes of each storage, in the layout's order."""
        ...

    def state(self) -> Mapping[int, Any]:
        """The pieces of the optimizer's that exist, by their number in the layout."""
        ...

    def foreign(self) -> Any:
        """Optimizer state that no place is known for; can be pickled."""
        ...

    def options(self) -> Any:
        """Options of optimizers and schedules; can be pickled."""
        ...

    def take_weights(self, contents: Sequence[np.ndarray | None]) -> None:
        """Take the bytes of all storages as the weights, where there are any; what is passed may change later."""
        ...

    def take_buffers(self, buffers: Sequence[Any]) -> None:
        """Take the buffers; what is passed may change later."""
        ...

    def take(self, foreign: Any, options: Any) -> None:
        """Take state that no place is known for, and options."""
        ...

    def adopt(self, pieces: Mapping[int, Any]) -> None:
        """Take these arrays as the pieces of optimizer state, and forget all others; they stay as they are."""
        ...


class Sharing(Protocol):
    """How a framework shares its state with other processes.

    Attributes
    ----------
    moving_seconds : float
        About how long it takes until worker processes are ready, with the framework imported.
    arrays : Arrays
    """

    moving_seconds: ClassVar[float]
    arrays: ClassVar[Arrays]

    @property
    def count(self) -> int:
        """How many entries a gradient has."""
        ...

    @property
    def portable(self) -> bool:
        """Whether the whole state is known, so that a run can move to other processes in the middle."""
        ...

    def lay_out(self, placement: Placement, take: Callable[[int], int], known: Any = None) -> Any:
        """Give everything its place in an arena.

        ``known``: what another process, which may be further on, has found the state to consist of.
        """
        ...

    def caller_state(self, layout: Any) -> CallerState:
        """The state in the caller's process."""
        ...

    def worker_state(self, layout: Any, arena: mmap.mmap, worker: int) -> WorkerState:
        """The state in a worker's process; from here on, it lies in the arena."""
        ...

    def move(self, layout: Any, places: Places) -> None:
        """Have storages of this process's weights, by their number, lie elsewhere: at an offset into a memory."""
        ...

    def look(self, layout: Any, arena: mmap.mmap, resting: Sequence[int]) -> Any:
        """What lies in the arena as ``records.Exported``, without a digest; shares memory where arrays are written.

        ``resting``: storages that the caller's state has as they are.
        """
        ...
