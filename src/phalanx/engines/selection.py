"""Picks the engine of a run."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.engines.auto import Auto
from phalanx.engines.inline import Inline
from phalanx.engines.processes.driver import Processes
from phalanx.engines.processes.launch import WARM
from phalanx.engines.recovery.deadline import Deadline
from phalanx.errors import UsageError
from phalanx.frameworks.registry import as_factory, open_framework
from phalanx.plan.audit import Audit
from phalanx.plan.placement import place
from phalanx.seams import Engine, Framework, RunState
from phalanx.surroundings.presence import processors, several, usable_cores

CAPABLE = hasattr(select, "poll")


def open_engine(
    definition: Definition,
    engine: str,
    workers: int | None,
    devices: Sequence[str],
    deadline_seconds: float | None,
    begin: Callable[[Framework], RunState],
    *,
    allow: bool = False,
    audit: Audit | None = None,
) -> Engine:
    """The engine that was asked for; "auto" without a number of workers measures.

    ``allow``: on accelerators, operations without a deterministic kernel, too.
    ``begin(framework)`` may give the framework the state of an earlier run, and tells what that had done.
    """
    if distributes(engine):
        if audit is not None:
            raise UsageError("audit compares workers of one process or host in this version; leave it out over several")
        from phalanx.engines.hosts.driver import open_distributed  # loads what speaks to networks

        return open_distributed(definition, workers, devices, processors(), deadline_seconds, begin, allow=allow)
    deadline = Deadline(deadline_seconds)
    count = workers or min(definition.replicas, usable_cores())
    here = count == 1 or len(devices) > 1 or set(devices) - {"cpu"} or not CAPABLE
    if engine == "processes" or not (engine == "inline" or here or workers is None):
        WARM.zygote()  # first: it imports while the model is made here
        framework = open_framework(definition, devices)
        placement = place(definition.replicas, count)
        return Processes(definition, framework, placement, begin(framework), deadline, audit=audit)
    framework = open_framework(definition, devices, allow=allow)
    if engine == "inline" or here or framework.lanes is not None:
        return Inline(definition, framework, begin(framework), audit=audit)
    return Auto(definition, framework, begin(framework), count, deadline, audit)


def trained(model: Any) -> Any:
    """A ``make_model`` that returns this model, or a copy."""
    return as_factory(model)


def distributes(engine: str) -> bool:
    """Whether this engine means all processes of a torch.distributed world."""
    return engine == "distributed" or (engine == "auto" and several())
