"""Gradients in an arena: computed where other workers look for them, added up and measured by torch."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence

import torch

from phalanx.frameworks.torch.arithmetic import Gradient, add_up, blank, view
from phalanx.frameworks.torch.phases import Updates
from phalanx.frameworks.torch.replica.gradient import Collector
from phalanx.seams.sharing import Order
from phalanx.shared.buckets import BucketViews
from phalanx.shared.layout import Layout


class GradientBuckets:
    """Implements ``seams.sharing.GradientBuckets`` for PyTorch.

    Parameters
    ----------
    collector : Collector
    updates : Updates
    layout : Layout
    arena : mmap.mmap
    worker : int
    """

    def __init__(self, collector: Collector, updates: Updates, layout: Layout, arena: mmap.mmap, worker: int) -> None:
        self._collector = collector
        self._updates = updates
        self._worker = worker
        self._views = BucketViews(functools.partial(view, arena), layout, worker)
        self._owned = self._views.owned
        self.blank = functools.partial(_blank, layout)
        count = len(layout.owners)
        self._norms = torch.frombuffer(arena, dtype=updates.norm_dtype, count=count, offset=layout.norms)
        self._norm_of = list(self._norms)
        collector.watch([index for index, owner in enumerate(layout.owners) if owner != worker])

    def watch(self, told: Callable[[int, torch.Tensor], None]) -> bool:
        """Call ``told(index, gradient)`` when a gradient is where it is wanted."""
        self._collector.tell(told)
        return True

    def set_destination(self, number: int) -> None:
        """Put the next replica's gradient where this worker publishes the ``number``-th vector that it holds."""
        self._collector.set_destination(self._views.destinations(number) if number >= 0 else None)

    def peer(self, worker: int, number: int) -> Gradient:
        """What another worker published, as far as this one owns it."""
        return self._views.peer(worker, number)

    def add(self, left: Gradient, right: Gradient, number: int) -> Gradient:
        """``left + right`` in place of ``left``, the ``number``-th vector; so does what only ``right`` has.

        What is in ``left`` itself was added already.
        """
        added: Gradient = []
        for mine, other, home in zip(left, right, self._views.destinations(number), strict=True):
            if mine is not None:
                added.append(mine if other is None or other is mine else mine.add_(other))
            else:
                added.append(other if other is None or home is None else home.copy_(other))
        return added

    def publish(self, number: int, vector: Gradient) -> None:
        """It was computed there."""

    def fold(self, vectors: Sequence[Gradient | None], order: Order, divisor: float) -> Gradient:
        """Add vectors as ``order(positions that are there)`` says, and divide the sum; for what this worker owns."""
        return self._views.fold(vectors, order, divisor, add_up)

    def publish_norms(self, gradient: Gradient) -> None:
        """Write the norms of what this worker owns."""
        if self._updates.whole:
            if self._worker == 0:
                self._norms[0] = self._updates.norm(gradient)
            return
        for index in self._owned:
            grad = gradient[index]
            if grad is not None:
                torch.linalg.vector_norm(grad, out=self._norm_of[index])

    def total_norm(self, there: Sequence[int] | None) -> float:
        """The global norm, out of what all published; ``there``: which parameters have a gradient, None for all."""
        if self._updates.whole:
            return self._norms[0].item()
        return self._updates.total_norm(self._norms if there is None else self._norms[list(there)])


def _blank(layout: Layout, index: int) -> torch.Tensor:
    return blank(layout.contents.gradients[index])
