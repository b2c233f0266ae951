"""Makes ``torch.distributed.init_process_group("phalanx")`` work where phalanx is installed.

torch calls ``register`` when it is imported (its "torch.backends" entry points), so this is a module of its own: it
takes microseconds, and loads phalanx only when a group is made.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make the name known to torch.distributed, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and "phalanx" not in dist.Backend.backend_list:
        dist.Backend.register_backend("phalanx", create, extended_api=True, devices=["cpu"])


def create(options: Any, backend_options: Any) -> Any:
    """Make a group."""
    from phalanx.backend import create as made

    return made(options, backend_options)
