"""Replicas that have become slow because numbers are denormal: noticed while they are computed, and said once.

Intel processors take up to a hundred times as long for numbers below 1e-38 (float32), which gradients reach where a
loss goes to 0. AMD's hardly do.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable

import torch

from phalanx.definition import checks
from phalanx.frameworks.torch.process import flushes_denormals

USUAL = 8  # replicas whose median is taken for the usual time
SLOW = 3.0  # times that, as many replicas in a row
LOOKS = 2  # at most in a run: what is slow for another reason stays so


class Denormals:
    """Times replicas, and computes a slow one with denormals flushed, which may be fast.

    Slow is what takes more of a processor than the first replicas did: a busy machine is no reason to look. What a
    processor did is asked of the kernel, which may take longer than a small replica; so it is asked of the first ones,
    and after one that the clock, which is free, calls slow.

    Attributes
    ----------
    due : bool
        Whether it is time to look.
    """

    def __init__(self) -> None:
        self.due = False
        self._looks = LOOKS
        self._first: list[tuple[float, float]] = []
        self._usual = math.inf, math.inf
        self._asks = True
        self._slow = 0

    def begin(self) -> None:
        """A replica begins."""
        self._processor = time.thread_time() if self._asks else 0.0
        self._began = time.perf_counter()

    def end(self) -> None:
        """It was computed."""
        clock = time.perf_counter() - self._began
        if not self._asks:
            self._asks = self._looks > 0 and clock > SLOW * self._usual[0]
            return
        processor = time.thread_time() - self._processor
        if len(self._first) < USUAL:
            self._first.append((clock, processor))
            if len(self._first) == USUAL:
                clocks, processors = zip(*self._first, strict=True)
                self._usual = statistics.median(clocks), statistics.median(processors)
                self._asks = False
        else:
            self._slow = self._slow + 1 if processor > SLOW * self._usual[1] else 0
            self.due, self._asks = self._slow >= USUAL, bool(self._slow)

    def look(self, compute: Callable[[], object]) -> None:
        """Compute a replica that counts for nothing, as it is and with denormals flushed, and say what that tells."""
        self._looks -= 1
        self._slow, self.due, self._asks = 0, False, False
        if flushes_denormals() or not torch.set_flush_denormal(True):
            return
        with contextlib.suppress(Exception):  # user code that fails will do so in the step, which says where
            try:
                fast = _seconds(compute)
            finally:
                torch.set_flush_denormal(False)
            if _seconds(compute) > SLOW / 2 * fast:
                self._looks = 0
                checks.warn(
                    "steps have become slow because gradients or activations have denormal numbers (below 1e-38 in "
                    "float32), for which this processor takes many times as long; torch.set_flush_denormal(True) "
                    "before the run takes them for 0 (it is part of what the bits depend on)"
                )


def _seconds(compute: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(2):
        began = time.process_time()
        compute()
        times.append(time.process_time() - began)
    return min(times)
