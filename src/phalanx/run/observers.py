"""Who looks on at a run for the user: a progress bar on stderr, and callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from phalanx.run.callbacks import observing
from phalanx.seams import Engine, Observer
from phalanx.seams.records import Evaluated, StepReport
from phalanx.surroundings.presence import shows
from phalanx.surroundings.turns import Turns

REFRESH_SECONDS = 0.1
DELAY_SECONDS = 0.5


def watching(
    progress: bool | str, callbacks: Sequence[Any], total: int | None, turn: Turns, *, stop: bool = False
) -> list[Observer]:
    """The observers that a user asked for; none where there is nothing to show and nobody to call.

    Parameters
    ----------
    progress : bool or "auto"
        "auto": show a bar if stderr is a terminal, once the run takes longer than half a second.
    callbacks : sequence of callables and objects with hooks
    total : int or None
        Steps to expect; None where the caller brings the batches.
    turn : Turns
        The run's own, which is lent to others while callbacks run.
    stop : bool
        Whether callbacks that cannot write end the run.
    """
    observers: list[Observer] = []
    if shows(progress):
        observers.append(ProgressBar(total, 0.0 if progress is True else DELAY_SECONDS))
    return [*observers, *observing(callbacks, turn, stop=stop)]


def reading_again(progress: bool | str) -> Callable[[Iterable[int], str], Iterable[int]]:
    """How a stream that goes on where an earlier run was shows how far it is, if that takes a while."""
    from tqdm import tqdm

    hidden = not shows(progress)
    return lambda numbers, title: tqdm(numbers, desc=title, unit="sample", disable=hidden, delay=DELAY_SECONDS)


class ProgressBar(Observer):
    """Shows steps, loss, the last metric, samples a second, workers, and incidents if there were some.

    Costs one clock read a step between refreshes.

    Parameters
    ----------
    total : int or None
    delay_seconds : float
        How long a run takes before its bar appears.
    """

    def __init__(self, total: int | None, delay_seconds: float) -> None:
        self._total = total
        self._delay_seconds = delay_seconds
        self._bar: Any = None
        self._engine: Engine | None = None
        self._metrics: Sequence[Evaluated] = ()
        self._samples, self._since = 0, time.monotonic()
        self._next_refresh = 0.0
        self._pending = 0

    def begin(self, engine: Engine, run: Any = None) -> None:
        """Draw the bar; it starts at what an earlier run had done."""
        from tqdm import tqdm

        self._engine, self._metrics = engine, engine.run_state.evaluated
        self._bar = tqdm(
            total=self._total, initial=engine.run_state.steps, unit="step", delay=self._delay_seconds,
            mininterval=0, dynamic_ncols=True, desc="phalanx",
        )  # fmt: skip

    def step(self, report: StepReport) -> None:
        """Count a finished step; redraw a few times a second, with the newest metric, and at the last step."""
        if self._bar is None:
            return
        self._pending += 1
        self._samples += report.samples
        now, is_last = time.monotonic(), self._bar.n + self._pending == self._total
        if is_last or now >= self._next_refresh:
            self._next_refresh = now + REFRESH_SECONDS
            metric = {self._metrics[-1].name: f"{self._metrics[-1].value:.4g}"} if self._metrics else {}
            self._bar.set_postfix({"loss": f"{report.loss:.4g}", **metric, **self._pace(now)}, refresh=False)
            self._bar.update(self._pending)
            self._pending = 0
        if is_last:
            self.end()

    def _pace(self, now: float) -> dict[str, str]:
        """Samples a second since the last refresh, workers, and what happened to them."""
        assert self._engine is not None
        seconds, self._since = now - self._since, now
        rate, self._samples = self._samples / max(seconds, 1e-9), 0
        incidents = len(self._engine.run_state.incidents)
        facts = {"samples/s": f"{rate:.3g}", "workers": str(self._engine.workers)}
        return facts | ({"incidents": str(incidents)} if incidents else {})

    def end(self) -> None:
        """Leave the bar as it stands; what is printed next begins on a line of its own."""
        if self._bar is not None:
            self._bar.update(self._pending)
            self._bar.close()
            self._bar = None
