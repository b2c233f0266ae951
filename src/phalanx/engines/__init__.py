"""Where workers live. ``inline``: this process; ``processes``: this host; ``hosts``: several. ``selection`` picks one.

``recovery`` is what ``processes`` does when workers die.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from phalanx.surroundings import system


def openers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``entered`` and ``open_engine`` of this system: where there are no workers, every run is in its own process."""
    if system.has_workers():
        from phalanx.engines.selection import entered, open_engine
    else:
        from phalanx.engines.here import entered, open_engine
    return entered, open_engine


def close() -> None:
    """End the process that starts workers and is kept for the next run. The next run starts another."""
    starter = sys.modules.get("phalanx.engines.processes.starter")
    if starter is not None:
        starter.WARM.close()
