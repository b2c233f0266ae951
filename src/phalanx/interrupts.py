"""Ctrl-C, delivered only where nothing is held.

Python raises ``KeyboardInterrupt`` between any two bytecodes: also inside ``__enter__`` and ``__exit__`` of a context
manager, so that what it set stays set. A run goes on after Ctrl-C, so that must not happen to anything a run uses. The
rule: inside ``guarded`` a SIGINT is kept, and delivered at the next ``check``, or at the end. ``check`` stands between
replicas, between chunks of an evaluation, between steps, and in waits: where user code is not running and nothing of
ours is half done. User code that does not come to such a point is broken off after all (``breakable``): at the second
Ctrl-C, or some seconds after the first. Whoever allows that must not go on with what user code left behind.

How signals are handled is a property of the process, so its state is the module's. Only the main thread handles
signals; in others all of this does nothing. A SIGINT without a Python handler (ignored, or the default) is left alone.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Any

PATIENCE_SECONDS = 10.0  # that user code has, after the first Ctrl-C, to come to a point where nothing is held


class _Process:
    """What this process knows of SIGINT.

    Attributes
    ----------
    before : callable
        The caller's handler, which gets what was kept.
    pressed : int
        SIGINTs that are kept.
    breakable : bool
        Whether user code is running that may be broken off.
    shields : int
        How many ``shielded`` blocks are open.
    """

    def __init__(self) -> None:
        self.before: Any = None
        self.pressed = 0
        self.breakable = False
        self.shields = 0
        self._frame: FrameType | None = None
        self._late = threading.Event()

    def received(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: keep it, unless user code had its time to finish."""
        late, self._frame = self._late.is_set(), frame
        if late:
            self._late.clear()
            if not self.pressed:  # it was delivered meanwhile: this is the alarm for it, not another Ctrl-C
                return
        else:
            self.pressed += 1
        if self.breakable and (late or self.pressed > 1):
            self.deliver()
        elif self.breakable:
            self.set_alarm()

    def deliver(self) -> None:
        """Give what was kept to the caller's handler, which usually raises."""
        self.pressed, self.breakable = 0, False
        frame, self._frame = self._frame, None
        self.before(signal.SIGINT, frame)

    def set_alarm(self) -> None:
        """See to it that user code does not run for ever after a Ctrl-C."""
        alarm = threading.Timer(PATIENCE_SECONDS, self._ring)
        alarm.daemon = True
        alarm.start()

    def _ring(self) -> None:
        if self.pressed and self.breakable:
            self._late.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


_PROCESS = _Process()


class guarded(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Inside, SIGINT is kept until ``check`` or the end of the block; may be nested.

    Parameters
    ----------
    leaving : bool
        Whether Ctrl-C is what is being dealt with: then what was kept is dropped at the end, not delivered once more.
    """

    def __init__(self, *, leaving: bool = False) -> None:
        self._leaving = leaving
        self._outer: Any = None
        self._mine = False

    def __enter__(self) -> None:
        # Until signal.signal() returns, Ctrl-C may raise here: nothing is held yet. After it, nothing raises.
        before = signal.getsignal(signal.SIGINT) if _here() else None
        if callable(before) and before != _PROCESS.received:
            self._outer, _PROCESS.before = _PROCESS.before, before
            signal.signal(signal.SIGINT, _PROCESS.received)
            self._mine = True

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._mine:
            return
        self._mine = False
        before, frame = _PROCESS.before, None
        pressed = _PROCESS.pressed and not self._leaving and not isinstance(error, KeyboardInterrupt)
        _PROCESS.pressed, _PROCESS.before = 0, self._outer
        signal.signal(signal.SIGINT, before)
        if pressed:
            before(signal.SIGINT, frame)


class opened(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Inside, user code runs between steps (a callback): SIGINT is the caller's, at once."""

    def __enter__(self) -> None:
        self._mine = _here() and signal.getsignal(signal.SIGINT) == _PROCESS.received
        if self._mine:
            check()
            signal.signal(signal.SIGINT, _PROCESS.before)

    def __exit__(self, *_: object) -> None:
        if self._mine:  # the caller may have chosen another handler meanwhile
            _PROCESS.before = signal.getsignal(signal.SIGINT)
            if callable(_PROCESS.before):
                signal.signal(signal.SIGINT, _PROCESS.received)


class breakable(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Inside, user code runs that may be broken off, if what it leaves behind is not used any more."""

    def __enter__(self) -> None:
        if _here():
            check()
            _PROCESS.breakable = True

    def __exit__(self, *_: object) -> None:
        if _here():
            _PROCESS.breakable = False


class shielded(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Inside, ``check`` delivers nothing; whatever is waited for has to have a bound of its own."""

    def __enter__(self) -> None:
        if _here():
            _PROCESS.shields += 1

    def __exit__(self, *_: object) -> None:
        if _here():
            _PROCESS.shields -= 1


def check() -> None:
    """Deliver a SIGINT that was kept; call it where nothing is held, and in every wait."""
    if _PROCESS.pressed and not _PROCESS.shields and _here():
        _PROCESS.deliver()


def pressed() -> int:
    """How many SIGINTs are kept: somebody wants this to end soon."""
    return _PROCESS.pressed


def _here() -> bool:
    return threading.current_thread() is threading.main_thread()
