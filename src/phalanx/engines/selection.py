"""Picks the engine of a run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.engines.auto import Auto
from phalanx.engines.inline import Inline
from phalanx.engines.processes.driver import Processes
from phalanx.engines.processes.starter import CAPABLE, WARM
from phalanx.engines.reading.pool import ahead_here
from phalanx.engines.reading.streams import dealer as dealer
from phalanx.engines.recovery.deadline import Deadline
from phalanx.errors import UsageError
from phalanx.frameworks.registry import as_factory, open_framework
from phalanx.plan.audit import Audit
from phalanx.plan.placement import place
from phalanx.plan.tally import MOST
from phalanx.seams import Engine, Framework, RunState
from phalanx.surroundings.presence import processors, several, usable_cores


def open_engine(
    definition: Definition,
    engine: str,
    workers: int | None,
    devices: Sequence[str],
    deadline_seconds: float | None,
    begin: Callable[[Framework], RunState],
    *,
    allow: bool | None = False,
    audit: Audit | None = None,
    max_failures: int = MOST,
    readers: int | None = 0,
) -> Engine:
    """The engine that was asked for; "auto" without a number of workers measures.

    ``allow``: on accelerators, operations without a deterministic kernel, too; what is computed twice may differ. None:
    neither, and nothing is computed twice.
    ``readers``: how many; None: as many as pay.
    ``begin(framework)`` may give the framework the state of an earlier run, and tells what that had done.
    """
    if distributes(engine):
        if audit is not None:
            raise UsageError("audit compares workers of one process or host in this version; leave it out over several")
        from phalanx.engines.hosts.driver import open_distributed  # loads what speaks to networks

        return open_distributed(
            definition, workers, devices, processors(), deadline_seconds, begin, allow=bool(allow), readers=readers
        )

    def begun() -> RunState:
        run_state = begin(framework)
        run_state.audit, run_state.allow, run_state.max_failures = audit, allow, max_failures
        return run_state

    deadline = Deadline(deadline_seconds)
    count = workers or min(definition.replicas, usable_cores())
    here = count == 1 or len(devices) > 1 or set(devices) - {"cpu"} or not CAPABLE
    if engine == "processes" or not (engine == "inline" or here or workers is None):
        WARM.prepare(definition)  # first: it imports while the model is made here
        framework = open_framework(definition, devices)
        placement = place(definition.replicas, count)
        return Processes(definition, framework, placement, begun(), deadline, readers=readers)
    framework = open_framework(definition, devices, allow=bool(allow))
    if engine == "inline" or here or framework.lanes is not None:
        facts = definition, framework, begun()
        return Inline(*facts, ahead=ahead_here(definition, framework, readers) if CAPABLE else None)
    return Auto(definition, framework, begun(), count, deadline, readers)


@contextlib.contextmanager
def open_trained(definition: Definition, model: Any) -> Iterator[tuple[Definition, Engine]]:
    """A recipe with this model, already trained, and an engine that computes its outputs in this process."""
    training = ("data", "steps", "epochs", "scheduler", "schedule_every", "schedule_on", "phases")
    left_out: dict[str, Any] = dict.fromkeys(training)
    recipe = dataclasses.replace(definition, **left_out, modes="as_made", make_model=as_factory(model))
    engine = open_engine(recipe, "inline", 1, (), None, lambda _: RunState())
    try:
        yield recipe, engine
    finally:
        engine.close()


def distributes(engine: str) -> bool:
    """Whether this engine means all processes of a torch.distributed world."""
    return engine == "distributed" or (engine == "auto" and several())
