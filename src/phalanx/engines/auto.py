"""The engine that measures instead of guessing: it starts inline at once, and hands over to workers if they are faster.

The answer cannot change, so the choice may be made while training. Workers are started beside the run when what is left
of it seems worth that; the state moves at a step boundary, and moves back if the workers turn out to be slower. A state
that is not wholly known (optimizers from elsewhere) stays where it is.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from phalanx.definition import checks
from phalanx.definition.evaluation.metrics import Metrics
from phalanx.definition.fields import Definition
from phalanx.engines.inline import Inline
from phalanx.engines.processes.driver import Processes
from phalanx.engines.processes.starter import WARM
from phalanx.engines.reading.pool import ahead_here
from phalanx.engines.recovery.deadline import Deadline
from phalanx.plan.placement import place
from phalanx.seams import Engine, Exported, Framework, RunState, Weights
from phalanx.seams.events import StepReport
from phalanx.seams.snapshots import Captured

START_SECONDS = 2.0  # of importing the framework in a new process, with room
WARM_UP = 3  # steps after a move that say nothing
TRIAL = 7  # steps that decide


class Auto:
    """Implements ``seams.Engine`` by one of two others.

    Parameters
    ----------
    definition : Definition
    framework : Framework
    run_state : RunState
        What was done before.
    workers : int
        How many to hand over to, at least 2.
    deadline : Deadline
    """

    def __init__(
        self,
        definition: Definition,
        framework: Framework,
        run_state: RunState,
        workers: int,
        deadline: Deadline,
        readers: int | None = 0,
    ) -> None:
        self.run_state = run_state
        self._definition = definition
        self._framework = framework
        self._most = workers
        self._deadline = deadline
        self._readers = readers
        self._inline = self._in_this_process()
        self._engine: Engine = self._inline
        self.workers = self._engine.workers
        self.environment = self.reading = framework.environment
        self._seconds: deque[float] = deque(maxlen=TRIAL)  # of a step, without what is between steps
        self._ends: deque[float] = deque(maxlen=TRIAL + 1)  # when steps were done
        self._left = WARM_UP + TRIAL  # steps until workers are judged
        self._alone = 0.0  # seconds from step to step without workers
        self._processes: Processes | None = None
        self._moving = framework.sharing.moving_seconds
        movable = framework.sharing.portable
        self._consider: Callable[[], None] | None = self._think_of_starting if movable else None

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """See ``seams.Engine.worker_pids``."""
        return self._engine.worker_pids

    def advance(self, batch: Any, horizon: int) -> StepReport:
        """See ``seams.Engine.advance``."""
        if self._consider is not None:
            self._consider()
        report = self._engine.advance(batch, horizon)
        if self._consider is not None and self.run_state.span is not None:
            self._seconds.append(report.seconds)
            self._ends.append(self.run_state.span[1])
        return report

    def pause(self) -> bool:
        """See ``seams.Engine.pause``."""
        return self._engine.pause()

    def evaluate(self, metrics: Metrics, data: Any, batch_size: int, weights: Weights | None = None) -> list[Any]:
        """See ``seams.Engine.evaluate``."""
        return self._engine.evaluate(metrics, data, batch_size, weights)

    def schedule(self, value: float, epoch: int) -> None:
        """See ``seams.Engine.schedule``."""
        self._engine.schedule(value, epoch)

    def export(self, *, copy: bool, digest: bool = True) -> Exported:
        """See ``seams.Engine.export``."""
        return self._engine.export(copy=copy, digest=digest)

    def peek(self) -> dict[str, Any] | None:
        """See ``seams.Engine.peek``."""
        return self._engine.peek()

    def capture(self) -> Captured:
        """See ``seams.Engine.capture``."""
        return self._engine.capture()

    def close(self) -> None:
        """See ``seams.Engine.close``."""
        self._engine.close()

    def _think_of_starting(self) -> None:
        """Start the process that forks workers as soon as that may pay."""
        if self._gain() > self._moving + (0.0 if WARM.awake else START_SECONDS):
            try:
                WARM.prepare(self._definition)
                self._consider = self._think_of_moving
            except Exception as error:  # no process can be started here
                self._stay(error)

    def _think_of_moving(self) -> None:
        """WorkerHandle over once workers can start at once; stay where that is refused or no longer pays."""
        if not WARM.awake:
            return
        if self._gain() < self._moving:
            self._consider = None
            return
        self._alone = _pace(self._ends)
        try:  # Ctrl-C leaves all as it is; the next step tries again
            placement = place(self._definition.replicas, self._most)
            facts = self._definition, self._framework, placement, self.run_state, self._deadline
            self._processes = Processes(*facts, readers=self._readers)
            self._engine, self._consider = self._processes, self._judge
            self.workers = self._engine.workers
            self._inline.close()
        except Exception as error:  # the recipe cannot travel, the arena does not fit, or descriptors are short
            self._stay(error)

    def _stay(self, error: Exception) -> None:
        """Go on in this process, and say why."""
        self._consider = None
        checks.warn(f"training goes on in this process (same answer), as it cannot move to workers: {error}")

    def _judge(self) -> None:
        """Move back if the workers are slower."""
        self._left -= 1
        if self._left < 0:
            self._consider = self._move_back if _pace(self._ends) > self._alone else None

    def _move_back(self) -> None:
        """As soon as nothing is ahead of the caller, and nobody reads the state to write it down."""
        assert self._processes is not None
        if self._processes.hand_back():
            self._consider = None
            self._engine = self._in_this_process()
            self.workers = self._engine.workers

    def _in_this_process(self) -> Inline:
        facts = self._definition, self._framework
        return Inline(*facts, self.run_state, ahead=ahead_here(*facts, self._readers))

    def _gain(self) -> float:
        """Seconds that workers might save: what is left, if all of them computed at once and nothing else took time."""
        done = len(self.run_state.loss_history)
        if len(self._ends) < WARM_UP:
            return -math.inf
        updates = self._definition.updates
        left = done if updates is None else updates - done
        return left * statistics.median(self._seconds) * (1 - 1 / self._most)


def _pace(ends: Iterable[float]) -> float:
    """Seconds from the end of a step to the end of the next: all that steps cost, whoever does it."""
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))
