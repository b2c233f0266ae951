"""Memory ordering between processes: in which order others see what one of them writes into shared memory.

A processor may let others see plain writes in another order than they were made, and may read ahead of its own writes.
x86 never swaps two writes or two reads; it only delays a write past a later read. Others, as ARM, may swap any two.
Python has no memory barrier of its own, so what is needed is had from instructions that contain one.
"""

from __future__ import annotations

import os
import platform
import threading
from typing import Final

ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")  # writes are seen as they are made, and reads not swapped
LOCK: Final = threading.Lock()


def order() -> None:
    """What was written before is seen before what is written after, and read before what is read after.

    x86 processors do that by themselves, so that this costs a call there.
    """
    if not ORDERED:
        through_kernel()


def fence() -> None:
    """What was written before is seen before what is read after.

    Two processes that each write a flag and then read the other's need it: without it, both may miss the other's. x86
    does not promise that either, but for atomic instructions: taking a lock is one.
    """
    if ORDERED:
        with LOCK:
            pass
    else:
        through_kernel()


def through_kernel() -> None:
    """Order memory by a round trip through a pipe of our own: on its way the kernel has to do it."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b".")
        os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)
