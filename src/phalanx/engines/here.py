"""The engine in the caller's own process: of a trained model, and of every run where there are no workers."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from phalanx.definition import checks
from phalanx.definition.fields import SAMPLING, Definition
from phalanx.engines.inline import Inline
from phalanx.errors import UsageError
from phalanx.frameworks.registry import as_factory, open_framework
from phalanx.seams import Engine, Framework
from phalanx.seams.records import Progress, Records, RunOptions, Seen
from phalanx.surroundings.presence import several

NEED_LINUX = "worker processes need Linux, and this is {}; leave that out: a run here has the same bits"


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
    **_: Any,
) -> Engine:
    """As ``selection.open_engine``, for a system without workers.

    Raises
    ------
    UsageError
        Workers were asked for.
    """
    if (workers or 1) > 1 or engine == "processes":
        given = f"workers is {workers}" if (workers or 1) > 1 else "engine is 'processes'"
        raise UsageError(f"{given}, but {NEED_LINUX.format(sys.platform)}")
    if readers:
        checks.warn(f"readers is {readers}, but {NEED_LINUX.format(sys.platform)}")
    framework = open_framework(definition, devices, allow=bool(options.allow), apart=False)
    if framework.sharing.devices:
        raise UsageError(f"devices is {list(devices)}, but {NEED_LINUX.format(sys.platform)}")
    seen = begin(framework)
    return cast("Engine", Inline(definition, framework, Records(options, seen.progress, seen)))


@contextlib.contextmanager
def open_trained(definition: Definition, model: Any) -> Iterator[tuple[Definition, Engine]]:
    """A recipe with this model, already trained, and an engine that computes its outputs in this process."""
    training = ("data", "steps", "epochs", "scheduler", "schedule_every", "schedule_on", "phases", *SAMPLING)
    left_out: dict[str, Any] = dict.fromkeys(training)
    recipe = dataclasses.replace(definition, **left_out, modes="as_made", make_model=as_factory(model))
    engine = open_engine(recipe, "inline", 1, (), None, lambda _: Seen(Progress()), RunOptions(allow=None))
    try:
        yield recipe, engine
    finally:
        engine.close()


def entered(options: Any, audit: Any, undo: contextlib.ExitStack) -> None:
    """As ``selection.entered``: no other processes take part here.

    Raises
    ------
    UsageError
        A launcher started several.
    """
    if options.engine == "distributed" or (options.engine == "auto" and several()):
        raise UsageError(f"this process is one of several of a launcher, but {NEED_LINUX.format(sys.platform)}")
