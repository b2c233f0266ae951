"""An engine that another one can replace at a step boundary: where a run computes may change, its answer cannot.

In between, the caller's framework holds the state. An engine copies its state there when it is closed, and the next one
starts from it. So code that moves a run needs only a function that opens the next engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from phalanx.seams import Engine
from phalanx.seams.records import Records

E = TypeVar("E", bound=Engine)


class Changing(Generic[E]):
    """Implements ``seams.Engine`` by one engine after another. Other attributes are those of the current one.

    Parameters
    ----------
    records : Records
        All engines count their steps there.
    opened : callable
        Opens the first engine.

    Attributes
    ----------
    engine : Engine
        The current one.
    """

    def __init__(self, records: Records, opened: Callable[[], E]) -> None:
        self._records = records
        self.options, self.progress, self.seen = records.options, records.progress, records.seen
        self.engine, self._opened = opened(), opened
        self.workers = self.engine.workers
        # The engine may change inside these contexts, so all engines must have the same ones: the framework's.
        self.environment, self.reading = self.engine.environment, self.engine.reading

    def change(self, opened: Callable[[], E]) -> None:
        """Close the engine, and go on in the one that ``opened`` opens. No step may be ahead of the caller.

        If ``opened`` fails, the previous engine is opened again, and the error is raised.
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
