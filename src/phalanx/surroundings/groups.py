"""The control groups around this process: what a container may use, where that is less than the machine has."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
from collections.abc import Iterator

MOUNTED = pathlib.Path("/sys/fs/cgroup")


def around(controller: str) -> Iterator[pathlib.Path]:
    """Folders of the groups around this process, the innermost first: of version 2, and of version 1's controller.

    In a container the path that the kernel tells may be one of the host, which is not there. The mount's root then is
    the container's own group, so it comes last in any case.
    """
    try:
        lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, own = line.split(":", 2)
        if not names or controller in names.split(","):
            top = MOUNTED / controller if names else MOUNTED
            group = top / own.lstrip("/")
            yield from (folder for folder in [group, *group.parents] if folder.is_relative_to(top))


def processors() -> list[int]:
    """The processors that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many processors this process may keep busy: those that it may run on, or fewer under a quota of time."""
    return max(1, math.floor(min([len(processors()), *_quotas()])))


def _quotas() -> Iterator[float]:
    """Processors that each group has time for, where it has a limit."""
    for folder in around("cpu"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit, and the root has no file
            share, period = (folder / "cpu.max").read_text().split()
            yield int(share) / int(period)
        with contextlib.suppress(OSError):
            share, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if share > 0:  # -1 is no limit
                yield share / period
