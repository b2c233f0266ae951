"""What a step frees, the next one needs again: such memory stays with the process while a run is open.

A replica's gradients and activations are big blocks, and glibc maps and unmaps those one by one, so that each step
faults them in again: of a small resnet18 with R = 8, 160,000 pages a step, which took longer than its computing.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
DEFAULT_MAX = 65536  # blocks that glibc maps at most
HIGHEST = 32 << 20  # bytes: where glibc's own threshold for mapping ends up once a block of that size was freed


def keep_freed() -> None:
    """Big blocks that are freed stay with the process, instead of being faulted in again in each step (glibc)."""
    mallopt = _libc("mallopt")
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def give_back() -> None:
    """Return what is free now to the system, once (glibc)."""
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


class Kept:
    """Keeps what is freed while any run of the caller's process is open; afterwards it goes back to the system.

    Whoever set glibc's allocator by environment variables has decided, and nothing is changed.
    """

    def __init__(self) -> None:
        self._open = 0

    def begin(self) -> None:
        """A run begins."""
        self._open += 1
        if self._open == 1 and not _decided():
            keep_freed()

    def end(self) -> None:
        """It ended."""
        self._open -= 1
        mallopt = _libc("mallopt")
        if self._open == 0 and mallopt is not None and not _decided():
            mallopt(M_MMAP_MAX, DEFAULT_MAX)
            mallopt(M_MMAP_THRESHOLD, HIGHEST)
            mallopt(M_TRIM_THRESHOLD, 2 * HIGHEST)
            give_back()


RUNS = Kept()


def _decided() -> bool:
    return "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") and name.endswith("_") for name in os.environ
    )


def _libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
