"""Where this process is: whether it is one of several, which processors it may use, who looks at what it shows."""

from __future__ import annotations

import os
import sys

from torch import distributed as dist


def several() -> bool:
    """Whether torch.distributed, or what started this process, knows of more than one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def rank() -> int:
    """Number of this process in its world; 0 if there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0")) if several() else 0


def processors() -> list[int]:
    """Those that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many they are."""
    return len(processors())


def shows(progress: bool | str) -> bool:
    """Whether there is to be a progress bar; "auto": if stderr is a terminal."""
    return sys.stderr is not None and (progress is True or (progress == "auto" and sys.stderr.isatty()))
