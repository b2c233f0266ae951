"""A torch.distributed backend for CPU tensors on one host: ``init_process_group("phalanx")``.

Ranks share memory instead of sockets; sums are taken in rank order, so they are the same on every run and every rank.
"""

from __future__ import annotations

from typing import Any

import phalanx_backend
from phalanx.backend.group import Group
from phalanx.backend.memory import join
from phalanx.errors import PeerError

__all__ = ["Group", "PeerError", "create"]


def create(options: Any, _: Any) -> Group:
    """Make a group; torch.distributed calls this on every rank of it."""
    memory = join(options.store, options.group_rank, options.group_size)
    memory.names = tuple(options.global_ranks_in_group) or memory.names
    return Group(memory, options.timeout.total_seconds())


phalanx_backend.register()  # torch does so too, unless that was switched off
