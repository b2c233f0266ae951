"""How often a worker saves what it owns in memory: seldom enough that it costs next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.005  # of the time, for snapshots


class Keeper:
    """Times snapshots in memory.

    Attributes
    ----------
    pace : float
        Seconds of the latest step.
    """

    def __init__(self) -> None:
        self.pace = 0.0
        self._seconds = 0.0

    def keep(self, save: Callable[[], None]) -> None:
        """Save, and note what it took."""
        began = time.perf_counter()
        save()
        self._seconds = time.perf_counter() - began

    def interval(self) -> float:
        """Steps from one snapshot to the next."""
        return self._seconds / (SHARE * self.pace) if self.pace else 1
