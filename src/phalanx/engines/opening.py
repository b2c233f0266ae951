"""Picks the engine of a run."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence

from phalanx.contracts import Course, Engine, Framework
from phalanx.definition import Definition
from phalanx.engines.auto import Auto
from phalanx.engines.deadline import Deadline
from phalanx.engines.inline import Inline
from phalanx.engines.launch import WARM
from phalanx.engines.processes import Processes
from phalanx.frameworks.opening import open_framework
from phalanx.hosts.presence import several
from phalanx.plan.placement import place

CAPABLE = hasattr(select, "poll")


def open_engine(
    definition: Definition,
    engine: str,
    workers: int | None,
    devices: Sequence[str],
    deadline_seconds: float | None,
    begin: Callable[[Framework], Course],
) -> Engine:
    """The engine that was asked for; "auto" without a number of workers measures.

    ``begin(framework)`` may give the framework the state of an earlier run, and tells what that had done.
    """
    if distributes(engine):
        from phalanx.engines.distributed import open_distributed  # loads what speaks to networks

        return open_distributed(definition, workers, processors(), deadline_seconds, begin)
    deadline = Deadline(deadline_seconds)
    count = workers or min(definition.replicas, usable_cores())
    here = count == 1 or set(devices) - {"cpu"} or not CAPABLE
    if engine == "inline" or (engine == "auto" and here):
        framework = open_framework(definition, devices)
        return Inline(definition, framework, begin(framework))
    if engine == "auto" and workers is None:
        framework = open_framework(definition, devices)
        return Auto(definition, framework, begin(framework), count, deadline)
    WARM.zygote()  # first: it imports while the model is made here
    framework = open_framework(definition, devices)
    return Processes(definition, framework, place(definition.replicas, count), begin(framework), deadline)


def distributes(engine: str) -> bool:
    """Whether this engine means all processes of a torch.distributed world."""
    return engine == "distributed" or (engine == "auto" and several())


def processors() -> list[int]:
    """Those that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many they are."""
    return len(processors())
