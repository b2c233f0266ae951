"""When something is due that takes time: every so many steps, or as seldom as it costs a small share of the time."""

from __future__ import annotations

import time

from phalanx.seams import NEVER


class Pacing:
    """Says when the next one is due.

    Parameters
    ----------
    every : int or None
        Steps from one to the next; None: as ``share`` says; 0: never.
    seconds : float
        Between two, at least, where ``every`` is None.
    share : float
        Of the time that they may take.
    """

    def __init__(self, every: int | None, seconds: float, share: float) -> None:
        self._every = every
        self._seconds = seconds
        self._share = share
        self._next = NEVER if every == 0 else 0  # the step at which workers stop, to see whether it is time
        self._since = time.monotonic()
        self._pace = 0.0  # seconds of the latest step
        self._cost = 0.0  # seconds that the latest one took

    def horizon(self, steps: int) -> int:
        """The step after which the next is due, or, by time, probably is."""
        if self._next <= steps:
            if self._every is not None:
                self._next = (steps // self._every + 1) * self._every
            else:
                left = self._pause - (time.monotonic() - self._since)
                self._next = steps + (max(1, int(left / self._pace)) if self._pace else 1)
        return self._next

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        self._pace = seconds

    def due(self, steps: int) -> bool:
        """Whether it is time, after so many steps."""
        if steps < self._next:
            return False
        if self._every is not None:
            return steps % self._every == 0
        return time.monotonic() - self._since >= self._pause

    def took(self, began: float) -> None:
        """One is done now, that began then."""
        self._since = time.monotonic()
        self._cost = self._since - began

    @property
    def _pause(self) -> float:
        return max(self._seconds, self._cost / self._share)
