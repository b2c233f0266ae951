"""A run's state as a Result; what is raised out of a run carries the last good one, so that nothing trained is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.checkpoint.saver import Saver
from phalanx.definition.fields import Definition
from phalanx.errors import PhalanxError
from phalanx.run.loop import Loop
from phalanx.run.result import Result, result_of
from phalanx.seams import Engine
from phalanx.surroundings import interrupts


class Outcomes:
    """Makes results of a run, and sets ``error.result``.

    Parameters
    ----------
    definition, engine, loop, saver
        The run's own.
    called : float
        When it was called for.
    predictor : callable or None
        For ``result.predict``.
    """

    def __init__(
        self,
        definition: Definition,
        engine: Engine,
        loop: Loop,
        saver: Saver | None,
        called: float,
        predictor: Callable[..., Any] | None,
    ) -> None:
        self._definition, self._engine, self._loop, self._saver = definition, engine, loop, saver
        self._times = called, time.perf_counter()
        self._predictor = predictor
        self.closed = False

    def now(self, *, copy: bool) -> Result:
        """The state as it is; ``copy``: independent of the run."""
        if self._loop.refused:
            self._loop.check_able()
        if self._saver is not None and not self.closed:
            self._saver.settle()
        left = {**self._loop.left(), "stopped_early": self._loop.stopped_early}
        return result_of(self._definition, self._engine, self._times, left, self._predictor, copy=copy)

    @contextlib.contextmanager
    def handed_over(self) -> Iterator[None]:
        """What is raised inside gets the last good state."""
        try:
            yield
        except PhalanxError as error:
            self.hand_over(error)
            raise

    def hand_over(self, error: BaseException | None) -> None:
        """Set ``error.result`` to the last good state, unless it is set or the class has no room for it."""
        if getattr(error, "result", None) is None:
            with contextlib.suppress(AttributeError, TypeError), interrupts.held():
                error.result = self._last_good()  # type: ignore[union-attr]

    def _last_good(self) -> Result | None:
        """None where an update was torn. A model that cannot be copied is handed over as it is."""
        for copy in (True, False):
            with contextlib.suppress(PhalanxError):
                return self.now(copy=copy)
        return None
