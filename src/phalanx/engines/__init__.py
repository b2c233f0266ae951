"""Where workers live. ``inline``: this process; ``processes``: this host; ``hosts``: several. ``selection`` picks one.

``recovery`` is what ``processes`` does when workers fall.
"""

from __future__ import annotations

import sys


def close() -> None:
    """End what is kept warm for the next run: a process that starts workers. The next run starts another."""
    starter = sys.modules.get("phalanx.engines.processes.starter")
    if starter is not None:
        starter.WARM.close()
