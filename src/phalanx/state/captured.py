"""The seam between snapshots and a framework: its state as named tensors and plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.state.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Captured:
    """A state as snapshots hold it, as of a step boundary.

    Attributes
    ----------
    weights, training : dict of str to Tensor
        Parameters and buffers by name; the tensors of optimizers and schedules.
    facts : dict
        All else, as JSON values.
    release : callable
        To be called when the tensors have been read: their memory may be written from then on.
    """

    weights: dict[str, Tensor]
    training: dict[str, Tensor]
    facts: dict[str, Any]
    release: Callable[[], None] = lambda: None


class Snapshots(Protocol):
    """A framework's state as snapshots hold it."""

    def capture(self, *, copy: bool) -> Captured:
        """The state for a snapshot; ``copy``: it is to stay as it is while the run goes on."""
        ...

    def adopt(self, state: Captured) -> None:
        """Take over such a state."""
        ...

    def adopt_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over parameters and buffers only."""
        ...
