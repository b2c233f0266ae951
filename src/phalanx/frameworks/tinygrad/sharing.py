"""Why a tinygrad state is not shared with worker processes."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from phalanx.errors import UsageError
from phalanx.frameworks import arithmetic
from phalanx.plan.placement import Placement
from phalanx.seams.sharing import Arrays


@dataclass(frozen=True)
class Sharing:
    """Implements ``seams.sharing.Sharing`` for tinygrad: it refuses.

    Attributes
    ----------
    count : int
        How many entries a gradient has.
    """

    count: int
    portable: ClassVar[bool] = False
    arrays: ClassVar[Arrays] = arithmetic
    moving_seconds: ClassVar[float] = 0.0

    def lay_out(self, placement: Placement, take: Callable[[int], int], known: Any = None) -> Any:
        """Refuse."""
        _refuse()

    def caller_state(self, layout: Any) -> Any:
        """Refuse."""
        _refuse()

    def worker_state(self, layout: Any, arena: mmap.mmap, worker: int) -> Any:
        """Refuse."""
        _refuse()

    def move(self, layout: Any, places: Any) -> None:
        """Refuse."""
        _refuse()

    def look(self, layout: Any, arena: mmap.mmap, resting: Sequence[int]) -> Any:
        """Refuse."""
        _refuse()


def _refuse() -> NoReturn:
    raise UsageError(
        "the model is tinygrad's, which computes in one process: workers share weights in host memory, which its "
        "devices would copy in every step; leave workers out, and name several devices instead: devices=['CL:0', "
        "'CL:1'] (same answer)"
    )
