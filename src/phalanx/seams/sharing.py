"""The seam between an engine with several processes and a framework: its state in memory that all of them map.

A vector is a gradient: a list with one entry per parameter, None where there is none, or where it is another worker's.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from phalanx.plan.placement import Placement

Vector = list[Any]
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
        """Put the next replica's gradient where this worker publishes the ``number``-th vector that it holds."""
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

    def used(self, piece: int) -> int:
        """Bytes of a piece of optimizer state that hold something."""
        ...

    def place_in_arena(self) -> bool:
        """Move optimizer state that this worker owns into the arena, as far as it is not there; True if some was."""
        ...

    def described(self) -> Any:
        """The optimizer state that this worker owns; can be pickled, and stays true as long as nothing is housed."""
        ...

    def options(self) -> Any:
        """Options of optimizers and schedules; can be pickled."""
        ...

    @property
    def scheduled(self) -> Any:
        """Options after the schedulers' last step, if that cannot be done again from a loss; else None."""
        ...

    def take(self, optimizers: Sequence[Any], options: Any) -> None:
        """Continue from what was described, earlier descriptions first, and from options."""
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

    def put_optimizers(self) -> Any:
        """Copy optimizer state into the arena; returns a description of it."""
        ...

    def options(self) -> Any:
        """Options of optimizers and schedules; can be pickled."""
        ...

    def take_weights(self, contents: Sequence[np.ndarray]) -> None:
        """Take the bytes of all storages as the weights; what is passed may change later."""
        ...

    def take_buffers(self, buffers: Sequence[Any]) -> None:
        """Take the buffers; what is passed may change later."""
        ...

    def take_optimizers(self, described: Sequence[Any], options: Any, *, saved: bool) -> None:
        """Take the optimizer state that each worker described, out of the arena or out of the snapshot in it."""
        ...


class Shard(Protocol):
    """A framework's state in an arena, as one worker works with it: it owns some parameters, and their optimizer.

    Attributes
    ----------
    weights : list of (offset, bytes)
        Where the weights that it owns lie in the arena.
    buffer_payload : list of list of memoryview
        For each replica the memory that ``leave`` writes; empty without buffers.
    """

    weights: list[tuple[int, int]]
    buffer_payload: list[list[memoryview]]

    @property
    def slots(self) -> GradientBuckets:
        """Gradients."""
        ...

    def leave(self, replica: int, left: list[Any]) -> None:
        """Publish the buffers that a replica left."""
        ...

    def left(self, replica: int) -> list[Any]:
        """The buffers that a replica left, wherever it ran."""
        ...

    def place_in_arena(self) -> bool:
        """Move optimizer state that this worker owns into the arena, as far as it is not there; True if some was."""
        ...

    def described(self) -> Any:
        """The optimizer state that this worker owns; can be pickled, and stays true as long as nothing is housed."""
        ...

    def state(self) -> dict[str, Any]:
        """What of the state is not weights or buffers, as far as this worker owns it; can be pickled."""
        ...

    @property
    def scheduled(self) -> Any:
        """Options after the schedulers' last step, if that cannot be done again from a loss; else None."""
        ...

    def take(self, optimizers: Sequence[Any], options: Any) -> None:
        """Continue from what was described, earlier descriptions first, and from options."""
        ...

    def save(self) -> int:
        """Copy what this worker owns into the snapshot; returns the checksum of that."""
        ...

    def restore(self) -> int:
        """Copy it back, after ``take``; returns the checksum of what was there."""
        ...


class Mirror(Protocol):
    """The same arena, seen from the caller's process, whose framework keeps a state of its own."""

    def put(self) -> dict[str, Any]:
        """Copy the state into the arena; returns what describes the rest."""
        ...

    def get(self, states: Sequence[dict[str, Any]], *, saved: bool) -> None:
        """Copy the state out of the arena, or out of the snapshot in it, with what the workers described.

        Optimizer state stays where it is: that of a snapshot is not written while the run goes on.
        """
        ...


class Sharing(Protocol):
    """How a framework shares its state with other processes.

    Attributes
    ----------
    moving_seconds : float
        About how long it takes until worker processes are ready, with the framework imported.
    """

    moving_seconds: ClassVar[float]

    @property
    def count(self) -> int:
        """How many entries a gradient has."""
        ...

    @property
    def portable(self) -> bool:
        """Whether the whole state is known, so that a run can move to other processes in the middle."""
        ...

    def lay_out(self, placement: Placement, take: Callable[[int], int]) -> Any:
        """Give everything its place in an arena."""
        ...

    def mirror(self, layout: Any, arena: mmap.mmap) -> Mirror:
        """The arena as the caller's process sees it."""
        ...

    def shard(self, layout: Any, arena: mmap.mmap, worker: int) -> Shard:
        """The arena as a worker sees it; from here on, its framework's state lies there."""
        ...
