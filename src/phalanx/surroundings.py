"""Contexts around a run: Ctrl-C held back while a state is between two steps, and entering only once when nested."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Any


class Interrupts(contextlib.AbstractContextManager["Interrupts"]):
    """Watches SIGINT inside the context: passes it on at once, but keeps it back from ``hold`` to ``release``.

    Only in the main thread and only where SIGINT has a Python handler, which gets what was held back.
    """

    def __init__(self) -> None:
        self._held = False
        self._caught: FrameType | None = None
        self._handler: Any = None

    def __enter__(self) -> Interrupts:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None

    def hold(self) -> None:
        """From here on SIGINT waits."""
        self._held = True

    def release(self) -> None:
        """Deliver what was held back, if anything was."""
        self._held = False
        if self._caught is not None:
            frame, self._caught = self._caught, None
            self._handler(signal.SIGINT, frame)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._caught = frame
        else:
            self._handler(number, frame)


class Reentrant(contextlib.AbstractContextManager[None]):
    """Contexts that are entered together: only the outermost ``with`` enters and leaves them."""

    def __init__(self, *contexts: contextlib.AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._depth = 0
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self._depth == 0:
            with contextlib.ExitStack() as exits:
                for context in self._contexts:
                    exits.enter_context(context)
                self._exits = exits.pop_all()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._exits.close()
