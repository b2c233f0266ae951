"""The user's own callbacks: plain functions, and objects with hooks and a state of their own."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phalanx.definition import checks
from phalanx.definition.plain import taking_over
from phalanx.errors import PhalanxError, SnapshotError, UsageError
from phalanx.seams import Engine
from phalanx.seams.events import StepReport
from phalanx.seams.observer import Observer
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import Turns

HOOKS = ("begin", "step", "evaluated", "end", "state", "load")
LEFT = ("averaged", "best")  # attributes that results have, too


def is_object(callback: Any) -> bool:
    """Whether it has hooks, rather than being a function."""
    return any(callable(getattr(callback, hook, None)) for hook in HOOKS)


def checked_callbacks(callbacks: Any) -> tuple[Any, ...]:
    """What was passed as ``callbacks``, one by one.

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
        if callable(getattr(callback, "state", None)) != callable(getattr(callback, "load", None)):
            raise UsageError(
                f"callbacks has a {type(callback).__name__} with only one of state() and load(state); what one gives, "
                "the other takes when a run is resumed"
            )
    return tuple(listed)


class Callbacks(Observer):
    """Calls them in the thread that does the steps, in the order in which they were passed.

    While they run, this thread's turn is lent, so that a callback may wait for a thread that uses the same run, and
    Ctrl-C is the caller's: nothing of the run is half done there.

    Parameters
    ----------
    callbacks : sequence
    turn : Turns
        The run's own.
    stop : bool
        Whether one of the package's own that cannot write, as on a full disk, ends the run, as a snapshot does.
    """

    runs_user_code = True

    def __init__(self, callbacks: Sequence[Any], turn: Turns, *, stop: bool) -> None:
        self._stop = stop
        self._functions = [callback for callback in callbacks if not is_object(callback)]
        self._objects: dict[str, Any] = {}
        seen: Counter[str] = Counter()
        for callback in callbacks:
            if is_object(callback):
                kind = type(callback).__name__
                seen[kind] += 1
                self._objects[kind if seen[kind] == 1 else f"{kind}-{seen[kind]}"] = callback
        self._turn = turn
        self._run: Any = None

    def begin(self, engine: Engine, run: Any = None) -> None:
        """Give each the state that it left in the snapshot from which the run goes on; then call ``begin(run)``."""
        self._run = run
        states, engine.run_state.states = engine.run_state.callbacks, self._states
        missing = ", ".join(name for name, one in self._objects.items() if hasattr(one, "load") and name not in states)
        if missing and (resumed := engine.run_state.resumed_from):
            checks.warn(f"the snapshot of step {resumed} has no state of {missing}, which begins anew there")
        for name in [name for name in states if name in self._objects]:
            with taking_over(f"the state of {name}"):
                self._call(name, "load", states.pop(name))
        for name in self._objects:
            self._call(name, "begin", run)

    def horizon(self, steps: int) -> int:
        """A callback may look at the state, so no step is done ahead of the one that it is told of."""
        return steps + 1

    def advanced(self, report: StepReport) -> None:
        """Call ``step(report)`` of each object."""
        for name in self._objects:
            self._call(name, "step", report)

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Call ``evaluated(values)`` of each object."""
        for name in self._objects:
            self._call(name, "evaluated", values)

    def step(self, report: StepReport) -> None:
        """Call all functions in order; what one raises reaches the caller, and the others are not called."""
        for callback in self._functions:
            with self._turn.lent(), interrupts.opened():
                callback(report)

    def left(self) -> dict[str, Any]:
        """See ``Observer.left``."""
        found: dict[str, Any] = {}
        for callback in self._objects.values():
            for name in LEFT:
                if (value := getattr(callback, name, None)) is not None:
                    found.setdefault(name, value)
        return found

    def end(self) -> None:
        """Call ``end(result)`` of each; with None if there is no whole state."""
        ending = [name for name, callback in self._objects.items() if callable(getattr(callback, "end", None))]
        if not ending or self._run is None:
            return
        result = None
        with contextlib.suppress(PhalanxError):  # the state may be lost
            result = self._run.result()
        for name in ending:
            self._call(name, "end", result)

    def _states(self) -> dict[str, Any]:
        return {name: callback.state() for name, callback in self._objects.items() if hasattr(callback, "state")}

    def _call(self, name: str, hook: str, argument: Any) -> None:
        function = getattr(self._objects[name], hook, None)
        if function is not None:
            with self._turn.lent(), interrupts.opened():
                try:
                    function(argument)
                except OSError as error:
                    self._not_written(name, hook, error)

    def _not_written(self, name: str, hook: str, error: OSError) -> None:
        """A callback of the package's own that cannot write does not end the run, unless that is wanted."""
        if not type(self._objects[name]).__module__.startswith("phalanx."):
            raise error
        why = f"the callback {name} could not write: {error}"
        if hook == "begin":
            raise UsageError(f"{why}; mend that, or leave the callback out") from error
        if self._stop:
            raise SnapshotError(why) from error
        checks.warn(f"{why}; the run goes on")
