"""A worker's own memory: what a step frees, the next one needs again; what building the state freed, nobody does."""

from __future__ import annotations

import ctypes
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


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


def _libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
