"""An engine whose place another one takes at a step boundary: where a run computes may change, its answer cannot.

In between the caller's framework holds the state. An engine takes it home when it is closed, and the next one begins
with what it finds there. So whoever decides that a run goes on elsewhere needs no more than a function that opens that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from phalanx.definition.evaluation import Metrics
from phalanx.seams import Engine
from phalanx.seams.records import Captured, Exported, RunState, StepReport, Weights

E = TypeVar("E", bound=Engine)


class Changing(Generic[E]):
    """Implements ``seams.Engine`` by one engine after another.

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

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """See ``seams.Engine.worker_pids``."""
        return self.engine.worker_pids

    def advance(self, batch: Any, horizon: int) -> StepReport:
        """See ``seams.Engine.advance``."""
        return self.engine.advance(batch, horizon)

    def pause(self) -> bool:
        """See ``seams.Engine.pause``."""
        return self.engine.pause()

    def evaluate(self, metrics: Metrics, data: Any, batch_size: int, weights: Weights | None = None) -> list[Any]:
        """See ``seams.Engine.evaluate``."""
        return self.engine.evaluate(metrics, data, batch_size, weights)

    def schedule(self, value: float, epoch: int) -> None:
        """See ``seams.Engine.schedule``."""
        self.engine.schedule(value, epoch)

    def export(self, *, copy: bool, digest: bool = True) -> Exported:
        """See ``seams.Engine.export``."""
        return self.engine.export(copy=copy, digest=digest)

    def peek(self) -> dict[str, Any] | None:
        """See ``seams.Engine.peek``."""
        return self.engine.peek()

    def capture(self) -> Captured:
        """See ``seams.Engine.capture``."""
        return self.engine.capture()

    def check_able(self) -> None:
        """See ``seams.Engine.check_able``."""
        self.engine.check_able()

    def close(self) -> None:
        """See ``seams.Engine.close``."""
        self.engine.close()
