"""Where workers live. ``inline``: this process; ``processes``: this host; ``hosts``: several. ``selection`` picks one.

``recovery`` is what ``processes`` does when workers die.
"""

from __future__ import annotations

import sys


def close() -> None:
    """End the process that starts workers and is kept for the next run. The next run starts another."""
    starter = sys.modules.get("phalanx.engines.processes.starter")
    if starter is not None:
        starter.WARM.close()
