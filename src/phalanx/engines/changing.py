"""An engine whose place another one takes at a step boundary: where a run computes may change, its answer cannot.

In between the caller's framework holds the state. An engine takes it home when it is closed, and the next one begins
with what it finds there. So whoever decides that a run goes on elsewhere needs no more than a function that opens that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from phalanx.seams import Engine
from phalanx.seams.records import RunState

E = TypeVar("E", bound=Engine)


class Changing(Generic[E]):
    """Implements ``seams.Engine`` by one engine after another; what is not here, the present one has.

    Parameters
    ----------
    run_state : RunState
        All of them count in it.
    opened : callable
        Makes the first.

    Attributes
    ----------
    engine : Engine
        The present one.
    """

    def __init__(self, run_state: RunState, opened: Callable[[], E]) -> None:
        self.run_state = run_state
        self.engine, self._opened = opened(), opened
        self.workers = self.engine.workers
        # One that changes while somebody is inside must give the same back: these are the framework's in any engine.
        self.environment, self.reading = self.engine.environment, self.engine.reading

    def change(self, opened: Callable[[], E]) -> None:
        """Close the engine, and go on in the one that ``opened`` makes; only when nothing is ahead of the caller.

        If none can be made, the one before is opened again, and the error is raised.
        """
        self.engine.close()
        self.engine.check_able()
        try:
            self.engine = opened()
        except BaseException:
            self.engine = self._opened()
            raise
        self._opened, self.workers = opened, self.engine.workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)
