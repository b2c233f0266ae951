"""Holds Ctrl-C back while a state is between two steps, so that what the caller finds is always a whole one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupts(contextlib.AbstractContextManager[None]):
    """Watches SIGINT inside the (re-entrant) context; passes it on at once, except within ``held``.

    Only in the main thread and only where SIGINT has a Python handler, which gets what was held back.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._held = False
        self._caught: FrameType | None = None
        self._handler: Any = None

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._received)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """SIGINT waits until the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self._caught is not None:
                frame, self._caught = self._caught, None
                self._handler(signal.SIGINT, frame)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._caught = frame
        else:
            self._handler(number, frame)
