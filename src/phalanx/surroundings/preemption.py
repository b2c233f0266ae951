"""SIGTERM, as schedulers of clusters send it before they take a machine back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def on_sigterm(terminate: Callable[[], None] | None) -> Iterator[None]:
    """Call ``terminate`` when SIGTERM comes, if there is something to call and this is the main thread.

    A handler that was there before is called too, and is there again afterwards.
    """
    if terminate is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before, owner = signal.getsignal(signal.SIGTERM), os.getpid()

    def received(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child ends as it would without us
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        terminate()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, received)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
