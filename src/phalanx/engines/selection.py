"""Picks the engine of a run: before it begins or, if the number of workers is not given, while it goes on.

The answer cannot change, so the choice may be made while training. Such a run starts in this process at once. Workers
are started beside it when the remaining steps seem worth that. The state moves at a step boundary, and moves back if
the workers turn out to be slower. A state that is not wholly known (another library's optimizer) stays where it is.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.engines.changing import Changing
from phalanx.engines.inline import Inline
from phalanx.engines.processes.driver import Processes, beside
from phalanx.engines.processes.starter import WARM
from phalanx.engines.readers import ahead_here
from phalanx.engines.recovery.failures import Deadline
from phalanx.errors import UsageError, safe_str
from phalanx.frameworks.registry import open_framework
from phalanx.plan.fold import Placement, place
from phalanx.seams import Engine, Framework
from phalanx.seams.records import Records, RunOptions, Seen, StepReport
from phalanx.surroundings.interrupts import of_handler
from phalanx.surroundings.presence import processors, several, usable_cores

START_SECONDS = 2.0  # to import the framework in a new process, with a margin
WARM_UP = 3  # steps after a move whose times say nothing
TRIAL = 7  # steps whose times decide


def open_engine(
    definition: Definition,
    engine: str,
    workers: int | None,
    devices: Sequence[str],
    deadline_seconds: float | None,
    begin: Callable[[Framework], Seen],
    options: RunOptions,
    *,
    readers: int | None = 0,
    functions: Sequence[Any] = (),
    world: Any = None,
    min_hosts: int = 1,
) -> Engine:
    """The engine that was asked for; "auto" without a number of workers measures.

    ``readers``: their number. None: one for each worker, as far as cores are free.
    ``functions``: what workers will call beside the recipe's own; their packages are imported ahead.
    ``world``: the processes of a torch.distributed world, as ``entered`` returns it; ``min_hosts``: with how many of
    them it is worth while to go on.
    ``begin(framework)`` may give the framework the state of an earlier run, and returns what that run had done.
    """
    if world is not None:
        from phalanx.engines.hosts.driver import open_distributed  # loads what speaks to networks

        facts = definition, workers, devices, processors()[: usable_cores()], world, begin, options
        return cast("Engine", open_distributed(*facts, readers=readers, least=min_hosts))

    replicas = definition.replicas
    count = workers or min(replicas, usable_cores())
    here = count == 1 or len(devices) > 1 or set(devices) - {"cpu"}
    spawns = engine == "processes" or not (engine == "inline" or here or workers is None)
    if spawns:
        WARM.prepare(definition, functions)  # first: it imports while the model is made here
    apart = engine == "processes" or (workers or 1) > 1
    framework = open_framework(definition, devices, allow=bool(options.allow), apart=apart)
    seen = begin(framework)
    records = Records(options, seen.progress, seen)
    if (named := framework.sharing.devices) or spawns:
        placement = _on_devices(definition, functions, named, engine, workers) if named else place(replicas, count)
        facts = definition, framework, placement, records, Deadline(deadline_seconds)
        return Processes(*facts, readers=beside(readers, placement.workers, usable_cores()))
    if engine == "inline" or here:
        ahead = ahead_here(definition, framework, readers) if readers else None
        return Inline(definition, framework, records, ahead=ahead)
    return cast("Engine", Auto(definition, framework, records, count, Deadline(deadline_seconds), readers, functions))


def _on_devices(
    definition: Definition, functions: Sequence[Any], devices: Sequence[str], engine: str, workers: int | None
) -> Placement:
    """The replicas of each worker, of which each has a device; the process that forks them is started."""
    if engine == "inline" or workers not in (None, len(devices)):
        given = "engine is 'inline'" if engine == "inline" else f"workers is {workers}"
        raise UsageError(
            f"{given}, but devices names {', '.join(devices)}, each of which is a worker; leave that out, or name as "
            "many devices as there are to be workers"
        )
    WARM.prepare(definition, functions)
    return place(definition.replicas, len(devices), copies=True)


def entered(options: Any, audit: Any, undo: contextlib.ExitStack) -> Any:
    """All processes of the torch.distributed world, if the engine that was asked for means them; else None.

    ``options``: as ``settle`` returns them. ``undo``: an error before the run begins is told to the others when this is
    left.
    """
    if options.engine != "distributed" and not (options.engine == "auto" and several()):
        return None
    if audit:
        raise UsageError("audit compares workers of one process or host in this version; leave it out over several")
    from phalanx.engines.hosts.world import World  # loads what speaks to networks

    world = World(options.deadline_seconds, options.lost_after, options.secret_file, tells=options.progress is True)
    undo.push(world.failed)
    return world


class Auto(Changing[Engine]):
    """Begins in this process, and moves to worker processes if that pays.

    Parameters
    ----------
    definition : Definition
    framework : Framework
    records : Records
        With the steps that were done before.
    workers : int
        How many workers to move to, at least 2.
    deadline : Deadline
    readers : int or None
        As ``ahead_here`` takes it.
    functions : sequence
        As ``open_engine`` takes them.
    """

    def __init__(
        self,
        definition: Definition,
        framework: Framework,
        records: Records,
        workers: int,
        deadline: Deadline,
        readers: int | None = 0,
        functions: Sequence[Any] = (),
    ) -> None:
        self._definition, self._functions = definition, functions
        self._framework = framework
        self._most = workers
        self._deadline = deadline
        self._readers = readers
        super().__init__(records, self._in_this_process)
        self._seconds: deque[float] = deque(maxlen=TRIAL)  # of a step, without what is between steps
        self._ends: deque[float] = deque(maxlen=TRIAL + 1)  # when steps were done
        self._left = WARM_UP + TRIAL  # steps until workers are judged
        self._alone = 0.0  # seconds from step to step without workers
        self._moving = framework.sharing.moving_seconds
        movable = framework.sharing.portable
        self._consider: Callable[[], None] | None = self._think_of_starting if movable else None

    def advance(self, batch: Any, horizon: int) -> StepReport:
        """Before a step the engine may change."""
        if self._consider is not None:
            self._consider()
        report = self.engine.advance(batch, horizon)
        if self._consider is not None and self.progress.span is not None:
            self._seconds.append(report.seconds)
            self._ends.append(self.progress.span[1])
        return report

    def _think_of_starting(self) -> None:
        """Start the process that forks workers as soon as that may pay."""
        if self._gain() > self._moving + (0.0 if WARM.awake else START_SECONDS):
            try:
                WARM.prepare(self._definition, self._functions)
                self._consider = self._think_of_moving
            except Exception as error:  # no process can be started here
                self._stay(error)

    def _think_of_moving(self) -> None:
        """Move to workers once they can start at once. Stay if the move is refused or no longer pays."""
        if not WARM.awake:
            return
        if self._gain() < self._moving:
            self._consider = None
            return
        self._alone = _pace(self._ends)
        try:  # Ctrl-C leaves all as it is; the next step tries again
            self.change(self._in_workers)
            self._consider = self._judge
        except Exception as error:  # the recipe cannot travel, the arena does not fit, or descriptors are short
            self._stay(error)

    def _stay(self, error: Exception) -> None:
        """Go on in this process, and say why; what a handler of a signal raised is the caller's."""
        if of_handler(error):
            raise error
        self._consider = None
        checks.warn(f"training goes on in this process (same answer), as it cannot move to workers: {safe_str(error)}")

    def _judge(self) -> None:
        """Move back if the workers are slower."""
        self._left -= 1
        if self._left < 0:
            self._consider = self._move_back if _pace(self._ends) > self._alone else None

    def _move_back(self) -> None:
        """Move back as soon as no step is ahead of the caller."""
        if self.engine.pause():
            self._consider = None
            self.change(self._in_this_process)

    def _in_this_process(self) -> Inline:
        facts = self._definition, self._framework
        return Inline(*facts, self._records, ahead=ahead_here(*facts, self._readers) if self._readers else None)

    def _in_workers(self) -> Processes:
        placement = place(self._definition.replicas, self._most)
        facts = self._definition, self._framework, placement, self._records, self._deadline
        return Processes(*facts, readers=beside(self._readers, self._most, usable_cores()))

    def _gain(self) -> float:
        """Seconds that workers might save in the remaining steps, if all computed at once without other costs."""
        done = len(self.progress.loss_history)
        if len(self._ends) < WARM_UP:
            return -math.inf
        updates = self._definition.updates
        remaining = done if updates is None else updates - done
        return remaining * statistics.median(self._seconds) * (1 - 1 / self._most)


def _pace(ends: Iterable[float]) -> float:
    """Seconds from the end of a step to the end of the next: all costs of a step, in any process."""
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))
