"""Processes whose parents ended: a process may adopt those that descend from it, and end them. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import sys
import time
from collections.abc import Collection

PR_SET_CHILD_SUBREAPER = 36
MOST_SECONDS = 2.0  # that a process may take to be gone once it was killed; some wait for hardware
NAP_SECONDS = 0.001


def adopt() -> None:
    """From here on, processes below this one become its children when their parents end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end(spared: Collection[int]) -> None:
    """Kill all children but those that are ``spared``, and what comes here because they end, in turn."""
    deadline = time.monotonic() + MOST_SECONDS
    while (left := children().difference(spared)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(PermissionError):  # a program that runs as somebody else
                os.kill(pid, signal.SIGKILL)  # our child, and not waited for: the pid is safe
        waiting = [os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in left]
        if any(waiting):
            time.sleep(NAP_SECONDS)


def children() -> set[int]:
    """The children of this process, those that ended included; none where /proc does not tell."""
    found = set[int]()
    for file in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found.update(map(int, file.read_text().split()))
    return found
