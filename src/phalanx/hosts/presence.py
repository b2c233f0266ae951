"""Whether this process is one of several, before anything is opened."""

from __future__ import annotations

import os

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
