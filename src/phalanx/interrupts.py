"""Holds Ctrl-C back while a state is between two steps, so that what the caller finds is always a whole one."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Held:
    """A context in which SIGINT waits; it is delivered to its own handler right after. Main thread only."""

    def __init__(self) -> None:
        self._caught: tuple[int, FrameType | None] | None = None
        self._handler: signal._HANDLER = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._remember)

    def __exit__(self, *_: object) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
            if self._caught is not None:
                self._handler(*self._caught)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._caught = (number, frame)
