"""Picks the engine of a run."""

from __future__ import annotations

import os

from phalanx.contracts import Engine
from phalanx.definition import Definition
from phalanx.engines.inline import Inline
from phalanx.engines.launch import WARM
from phalanx.engines.processes import Processes
from phalanx.frameworks.opening import open_framework
from phalanx.plan.placement import place


def open_engine(definition: Definition, engine: str, workers: int | None, device: str | None) -> Engine:
    """The engine that was asked for; "auto" with one worker, or one replica, is this process."""
    if engine == "inline" or (engine == "auto" and workers in (None, 1)):
        return Inline(definition, open_framework(definition, device))
    count = workers or min(definition.replicas, usable_cores())
    zygote = WARM.zygote()  # first: it imports while the model is made here
    return Processes(definition, open_framework(definition, device), place(definition.replicas, count), zygote)


def usable_cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
