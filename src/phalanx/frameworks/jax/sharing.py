"""What stands for the sharing of a state with other processes, which jax recipes do not have yet."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, NoReturn

from phalanx.errors import UsageError
from phalanx.plan.placement import Placement


class Alone:
    """Implements ``contracts.Sharing`` by refusing: one process computes all replicas.

    Attributes
    ----------
    count : int
        How many entries a gradient has.
    """

    portable = False

    def __init__(self, count: int) -> None:
        self.count = count

    def lay_out(self, placement: Placement, take: Callable[[int], int]) -> NoReturn:
        """See ``contracts.Sharing.lay_out``."""
        _refuse()

    def mirror(self, layout: Any, arena: mmap.mmap) -> NoReturn:
        """See ``contracts.Sharing.mirror``."""
        _refuse()

    def shard(self, layout: Any, arena: mmap.mmap, worker: int) -> NoReturn:
        """See ``contracts.Sharing.shard``."""
        _refuse()


def _refuse() -> NoReturn:
    raise UsageError(
        "worker processes compute torch models only in this version; leave workers and engine out for parameters in "
        "jax arrays, or use engine='inline' (same answer)"
    )
