"""Observers of a run for the user: a progress bar or lines on stderr, and the user's own callbacks.

Callbacks are plain functions, or objects with hooks and a state of their own.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from phalanx.definition import checks
from phalanx.definition.callback import said
from phalanx.definition.described import by_class
from phalanx.definition.fields import Definition
from phalanx.definition.plain import taking_over
from phalanx.errors import PhalanxError, SnapshotError, UsageError
from phalanx.seams import NEVER, Engine, Observer
from phalanx.seams.records import StepReport
from phalanx.surroundings import interrupts
from phalanx.surroundings.presence import printable, say, shows, terminal
from phalanx.surroundings.turns import Turns

DELAY_SECONDS = 0.5
LINE_SECONDS = 60.0  # from one line to the next, where epochs are longer
HOOKS = ("begin", "step", "evaluated", "end", "state", "load")
LEFT = ("averaged", "best")  # attributes that results have, too


def watching(options: SimpleNamespace, callbacks: Sequence[Any], definition: Definition, turn: Turns) -> list[Observer]:
    """The observers that a user asked for; none where there is nothing to show and nobody to call.

    Parameters
    ----------
    options : namespace
        Those of ``Recipe.train``, settled. With ``progress="auto"`` a bar is shown if stderr is a terminal, once the
        run takes longer than half a second; with True a bar at once, or plain lines if stderr is no terminal.
        ``on_snapshot_error`` says whether callbacks of phalanx's own that cannot write end the run.
    callbacks : sequence of callables and objects with hooks
    definition : Definition
    turn : Turns
        The run's own, which is lent to others while callbacks run.
    """
    observers: list[Observer] = []
    if shows(options.progress):
        delay = 0.0 if options.progress is True else DELAY_SECONDS
        observers.append(ProgressBar(definition.total, delay) if terminal() else ProgressLines(definition))
    stop = options.on_snapshot_error == "stop"
    for name, callback in by_class(callbacks):  # snapshots have the states of objects by these names
        observers.append(Called(callback, name if is_object(callback) else "", turn, stop=stop))
    return observers


def shown(numbers: Iterable[int], what: str, *, unit: str = "step", progress: bool | str = "auto") -> Iterable[int]:
    """Numbers of steps, or of other work that is repeated, with a bar on a terminal where that takes a while."""
    from tqdm import tqdm

    delay = 0.0 if progress is True else DELAY_SECONDS
    return tqdm(numbers, desc=what, unit=unit, disable=not (progress and terminal()), delay=delay, leave=False)


def is_object(callback: Any) -> bool:
    """Whether it has hooks, rather than being a function."""
    return any(callable(getattr(callback, hook, None)) for hook in HOOKS)


def checked_callbacks(callbacks: Any) -> tuple[Any, ...]:
    """What was passed as ``callbacks``, as a tuple.

    Raises
    ------
    UsageError
        One is neither a function nor an object with hooks, or is a class.
    """
    listed: list[Any] = list(callbacks) if isinstance(callbacks, Iterable) else [None]
    for callback in listed:
        if isinstance(callback, type):
            raise UsageError(f"callbacks has the class {callback.__name__}; pass an instance: {callback.__name__}(...)")
        if not callable(callback) and not is_object(callback):
            raise UsageError(
                f"callbacks is {checks.shown(callbacks)}; it must be a list of functions f(report), as in "
                f"callbacks=[show], or of objects with any of {', '.join(HOOKS)}"
            )
        if is_object(callback) and callable(callback) and not callable(getattr(callback, "step", None)):
            checks.warn(
                f"callbacks has a {type(callback).__name__} with hooks, so its __call__ is never called; call that "
                "step(report)"
            )
        if callable(getattr(callback, "state", None)) != callable(getattr(callback, "load", None)):
            raise UsageError(
                f"callbacks has a {type(callback).__name__} with only one of state() and load(state); what one gives, "
                "the other takes when a run is resumed"
            )
        asked = said(callback).gradients
        if isinstance(asked, str) or not all(isinstance(name, str) for name in asked):
            raise UsageError(
                f"{type(callback).__name__}.gradients is {checks.shown(asked)}; it must be a list, as ['*.weight']"
            )
    return tuple(listed)


class Called(Observer):
    """Calls a user's callback in the thread that does the steps.

    Meanwhile this thread's turn is lent, so that a callback may wait for a thread that uses the same run.

    Parameters
    ----------
    callback : callable, or object with hooks
    name : str
        Of an object's state in snapshots; "" for a function.
    turn : Turns
        The run's own.
    stop : bool
        Whether one that may fail and cannot write (on a full disk, say) ends the run, as a snapshot does.
    """

    runs_user_code = True

    def __init__(self, callback: Any, name: str, turn: Turns, *, stop: bool) -> None:
        self.callback, self._name, self._turn, self._stop = callback, name, turn, stop
        self._run: Any = None
        self._idle = False

    def begin(self, engine: Engine, run: Any = None) -> None:
        """Give it the state that it left in the snapshot from which the run goes on; then call ``begin(run)``."""
        self._run, seen, resumed_from = run, engine.seen, engine.progress.resumed_from
        if self._name in seen.waiting:
            with taking_over(f"the state of {self._name}"):
                self._call("load", seen.take(self._name))
        elif resumed_from and hasattr(self.callback, "load"):
            checks.warn(f"the snapshot of step {resumed_from} has no state of {self._name}, which begins anew there")
        if self._name and hasattr(self.callback, "state"):
            seen.keep(self._name, self.callback.state)
        if said(self.callback).decay_of_workers is not None:
            self._idle = engine.averaged is not None
            self.callback.averaged_by((lambda: engine.averaged()) if self._idle else None)  # of the engine of that time
        self._call("begin", run)

    def horizon(self, steps: int) -> int:
        """A callback may look at the state, so no step is done ahead of the one that it is told of."""
        return NEVER if self._idle else steps + 1

    def advanced(self, report: StepReport) -> None:
        """Call an object's ``step(report)``."""
        self._call("step", report)

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Call an object's ``evaluated(values)``."""
        self._call("evaluated", values)

    def step(self, report: StepReport) -> None:
        """Call a function."""
        if not self._name:
            self._guarded(self.callback, report)

    def left(self) -> dict[str, Any]:
        """Attributes that a result has, too."""
        attributes = {name: getattr(self.callback, name, None) for name in LEFT} if self._name else {}
        return {name: value for name, value in attributes.items() if value is not None}

    def end(self) -> None:
        """Call ``end(result)``; with None if there is no whole state."""
        if self._run is None or not callable(getattr(self.callback, "end", None)):
            return
        result = None
        with contextlib.suppress(PhalanxError):  # the state may be lost
            result = self._run.result()
        self._call("end", result)

    def _call(self, hook: str, argument: Any) -> None:
        if self._name and (function := getattr(self.callback, hook, None)) is not None:
            try:
                self._guarded(function, argument)
            except OSError as error:
                self._not_written(hook, error)

    def _not_written(self, hook: str, error: OSError) -> None:
        """A callback that may fail could not write: the run goes on, unless a failed snapshot would end it."""
        if not said(self.callback).may_fail:
            raise error
        why = f"the callback {self._name} could not write: {error}"
        if hook == "begin":
            raise UsageError(f"{why}; mend that, or leave the callback out") from error
        if self._stop:
            raise SnapshotError(why) from error
        checks.warn(f"{why}; the run goes on")

    def _guarded(self, function: Any, argument: Any) -> None:
        with self._turn.lent(), interrupts.user_code():
            function(argument)


def say_resumed(run: Any, total: int | None) -> None:
    """Say on stderr from where a run goes on, if it does."""
    if run.run_dir is not None and run.resumed_from not in (None, total):
        near = os.path.relpath(run.run_dir)
        where = run.run_dir if near.startswith(os.pardir) else near
        anew = f"{where} has no snapshot of a later step than 0: beginning anew"
        say(f"going on from step {run.resumed_from} of {where}" if run.resumed_from else anew)


class ProgressLines(Observer):
    """Prints a line on stderr after each epoch and evaluation, after each minute, and at the end.

    The loss is the mean over the steps since the line before; metrics are those that were evaluated since then.

    Parameters
    ----------
    definition : Definition
    """

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._losses: list[float] = []
        self._metrics: dict[str, float] = {}
        self._samples = 0

    def begin(self, engine: Engine, run: Any = None) -> None:
        """Say from where the run goes on, and begin to count."""
        self._engine, self._since = engine, time.monotonic()
        say_resumed(run, self._definition.total)

    def step(self, report: StepReport) -> None:
        """Count a step, and print a line if one is due."""
        if self._definition.stream is not None and self._losses and report.epoch != self._report.epoch:
            self._line()  # of a stream, the next epoch says that one has ended
        self._report = report
        self._losses.append(report.loss)
        self._samples += report.samples
        self._metrics |= report.metrics
        ended = self._definition.source is not None and self._definition.epoch_ended(report.step + 1)
        if ended or report.metrics or time.monotonic() - self._since >= LINE_SECONDS:
            self._line()

    def end(self) -> None:
        """Print what was done since the last line."""
        if self._losses:
            self._line()

    def _line(self) -> None:
        report, definition, total = self._report, self._definition, self._definition.total
        seconds, steps, incidents = time.monotonic() - self._since, report.step + 1, self._engine.progress.incidents
        epochs = definition.epochs or (-(-total // definition.per_epoch) if total and definition.per_epoch else None)
        facts = [] if report.epoch is None else [f"epoch {report.epoch + 1}{f'/{epochs}' if epochs else ''}"]
        facts += [f"step {steps}{f'/{total}' if total else ''}", f"loss {sum(self._losses) / len(self._losses):.4g}"]
        facts += [f"{name} {value:.4g}" for name, value in self._metrics.items()]
        facts += [f"{self._samples / max(seconds, 1e-9):,.0f} samples/s"]
        if total and steps < total:
            remaining = round(seconds / len(self._losses) * (total - steps))
            facts += [f"{datetime.timedelta(seconds=remaining)} left"]
        say(", ".join(facts + ([f"incidents {len(incidents)}"] if incidents else [])))
        self._since, self._losses, self._metrics, self._samples = time.monotonic(), [], {}, 0


class ProgressBar(Observer):
    """Shows steps, loss, the last metric, workers, and incidents if there were some.

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

    def begin(self, engine: Engine, run: Any = None) -> None:
        """Draw the bar; it starts at what an earlier run had done."""
        from tqdm import tqdm

        self._engine = engine
        say_resumed(run, self._total)
        self._bar = tqdm(
            total=self._total, initial=engine.progress.steps, unit="step", delay=self._delay_seconds,
            dynamic_ncols=True, desc="phalanx",
        )  # fmt: skip

    def step(self, report: StepReport) -> None:
        """Count a finished step; tqdm redraws a few times a second, and at the last step."""
        if self._bar is None:
            return
        is_last = self._bar.n + 1 == self._total
        if self._bar.update() or is_last:
            incidents = self._engine.progress.incidents
            facts = {
                "loss": f"{report.loss:.4g}",
                **{printable(item.name): f"{item.value:.4g}" for item in self._engine.seen.evaluated[-1:]},
            }
            facts |= {"workers": str(self._engine.workers)}
            self._bar.set_postfix(facts | ({"incidents": str(len(incidents))} if incidents else {}))
        if is_last:
            self.end()

    def end(self) -> None:
        """Leave the bar as it stands; what is printed next begins on a line of its own."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
