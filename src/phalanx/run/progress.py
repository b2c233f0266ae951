"""One progress bar for a run, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from phalanx.seams.events import Evaluated, StepReport

REFRESH_SECONDS = 0.1
DELAY_SECONDS = 0.5


class ProgressBar:
    """Shows finished steps, loss and the last metric. Costs one clock read a step between refreshes.

    Parameters
    ----------
    shown : bool or "auto"
        "auto": when stderr is a terminal, and only once a run takes longer than half a second.
    total : int or None
        Steps to expect; None where the caller brings the batches.
    done : int
        Steps that were done in an earlier run.
    """

    def __init__(self, shown: bool | str, total: int | None, done: int = 0) -> None:
        self._bar: Any = None
        self._next = 0.0
        self._pending = 0
        if shown is True or (shown == "auto" and sys.stderr.isatty()):
            from tqdm import tqdm

            delay = 0.0 if shown is True else DELAY_SECONDS
            self._bar = tqdm(
                total=total, initial=done, unit="step", delay=delay, mininterval=0, dynamic_ncols=True, desc="phalanx"
            )

    def show(self, report: StepReport, metrics: Sequence[Evaluated]) -> None:
        """Count a finished step; redraw a few times a second, with the newest of ``metrics``."""
        if self._bar is None:
            return
        self._pending += 1
        now = time.monotonic()
        if now >= self._next or self._bar.n + self._pending == self._bar.total:
            self._next = now + REFRESH_SECONDS
            metric = {metrics[-1].name: f"{metrics[-1].value:.4g}"} if metrics else {}
            self._bar.set_postfix(loss=f"{report.loss:.4g}", **metric, refresh=False)
            self._bar.update(self._pending)
            self._pending = 0

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.update(self._pending)
            self._bar.close()
            self._bar = None
