"""What a forked child lets go of: it inherits its parent's descriptors and finalizers, but not its parent's runs.

A child that keeps a socket keeps alive who waits for its end, and one that runs the parent's finalizers ends the
parent's workers. So whatever holds descriptors or processes of a run registers here, and leaves when it finds itself
in a child of ``os.fork``. A child that wants to train then begins with nothing, as a new process does.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Owned(Protocol):
    """Something that belongs to the process that made it."""

    def leave(self) -> None:
        """Close the descriptors that this child inherited, and touch nothing that is the parent's; raises nothing."""
        ...


_OWNED: weakref.WeakSet[Owned] = weakref.WeakSet()


def own(owned: Owned) -> None:
    """Have ``owned`` leave in every child that this process forks from here on; in a child's own children it does not.

    What a child goes on using, such as a lock, owns itself anew when it leaves.
    """
    _OWNED.add(owned)


def _leave_all() -> None:
    inherited = list(_OWNED)
    _OWNED.clear()
    for owned in inherited:
        with contextlib.suppress(Exception):
            owned.leave()


if hasattr(os, "register_at_fork"):  # where processes can be forked
    os.register_at_fork(after_in_child=_leave_all)
