"""Ctrl-C, delivered only where nothing is held.

Python raises ``KeyboardInterrupt`` between any two bytecodes: also inside ``__enter__`` and ``__exit__`` of a context
manager, so that what it set stays set. A run goes on after Ctrl-C, so that must not happen to anything a run uses. The
rule: inside ``guarded`` a SIGINT is kept, and delivered at the next ``check``, or at the end. ``check`` stands between
replicas, between chunks of an evaluation, between steps, and in waits: where user code is not running and nothing of
ours is half done. User code that does not come to such a point is broken off after all (``breakable``): at another
Ctrl-C half a second after the first or later, or some seconds after it. Whoever allows that must not go on with what
user code left behind.

SIGTERM, which schedulers of clusters send before they take a machine back, only notes that the run is to end
(``on_sigterm``).

How signals are handled is a property of the process, so its state is the module's. Only the main thread handles
signals; in others all of this does nothing. A SIGINT without a Python handler (ignored, or the default) is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

PATIENCE_SECONDS = 10.0  # that user code has, after the first Ctrl-C, to come to a point where nothing is held
AGAIN_SECONDS = 0.5  # from when on another Ctrl-C says that this takes too long
SIGINT = int(signal.SIGINT)
HANDLERS: Any = getattr(signal, "_signal", signal)  # without what turns numbers into enums and back: 15 us a step


class _Process:
    """What this process knows of SIGINT.

    Attributes
    ----------
    before : callable
        The caller's handler, which gets what was kept.
    main : int
        The main thread.
    installed : bool
        Whether SIGINT comes here.
    pressed : int
        SIGINTs that are kept.
    opened : bool
        Whether SIGINT is the caller's at the moment.
    breakable, at_once : bool
        Whether user code is running that may be broken off, and whether the first SIGINT does.
    shields : int
        How many ``shielded`` blocks are open.
    breaks : int
        How often user code was broken off.
    """

    def __init__(self) -> None:
        self.before: Any = None
        self.installed = False
        self.thread = threading.get_ident()
        self.main = threading.main_thread().ident
        self.pressed = 0
        self.opened = self.breakable = self.at_once = False
        self.shields = 0
        self.breaks = 0
        self._frame: FrameType | None = None
        self._serial = 0  # of what was delivered; an alarm is for what was pressed before the next one
        self._late = False
        self._since = 0.0  # when the first of what is kept was pressed

    def received(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: keep it, unless user code had its time to finish."""
        if self.opened:
            self.opened = False  # first: the handler usually raises, and who is above in the stack must be guarded then
            self.before(number, frame)
            self.opened = True  # the handler did not raise
            return
        now, late = time.monotonic(), self._late  # late: our own alarm sent it, and nobody pressed anything
        self._late = False
        if not self.pressed:
            self._since = now
        if not late:
            self.pressed += 1
        self._frame = frame if self.pressed else None
        if self.breakable and self.pressed and (late or self.at_once or now - self._since > AGAIN_SECONDS):
            self._break_off()
        elif self.breakable and self.pressed == 1:
            alarm = threading.Timer(PATIENCE_SECONDS, self._ring, [self._serial])
            alarm.daemon = True
            alarm.start()

    def forked(self) -> None:
        """In the child of a fork: if another thread forked it, nobody is there who would deliver what is kept."""
        self.main = threading.get_ident()
        if self.installed and threading.get_ident() != self.thread:
            # The thread that installed the handler, and would put the caller's back, does not exist in the child.
            self.installed = self.breakable = self.opened = False
            self.shields = self.pressed = 0
            signal.signal(signal.SIGINT, self.before)

    def deliver(self) -> None:
        """Give what was kept to the caller's handler, which usually raises."""
        frame = self._frame
        self.take()
        self.before(signal.SIGINT, frame)

    def take(self) -> int:
        """Forget what was kept, and say how many there were."""
        self._frame = None  # it holds all that its function and those above know, as whole arenas
        self._serial += 1
        taken, self.pressed = self.pressed, 0  # nothing is handled within this line
        return taken

    def _break_off(self) -> None:
        self.breakable = False
        self.breaks += 1
        self.deliver()
        self.breaks -= 1  # the handler did not raise: nothing was broken off
        self.breakable = True

    def _ring(self, serial: int) -> None:
        """Wake the main thread, in the alarm's thread, if what was pressed is still kept."""
        if serial == self._serial and self.pressed and self.breakable:
            self._late = True
            # To the main thread itself: a signal to the process may reach another, and then no system call is woken.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


_PROCESS = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_PROCESS.forked)


class guarded(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Inside, SIGINT is kept until ``check`` or the end of the block; may be nested.

    Parameters
    ----------
    leaving : bool
        Whether Ctrl-C is what is being dealt with: then what was kept is dropped at the end, not delivered once more.
    """

    def __init__(self, *, leaving: bool = False) -> None:
        self._leaving = leaving
        self._outer: tuple[Any, bool] = None, False
        self._mine = self._within = False  # whether this block set the handler; whether it is in an opened one

    def __enter__(self) -> None:
        # Until the handler is set, or the opened block closed, Ctrl-C may raise here: nothing is held yet.
        if not _here() or (_PROCESS.installed and not _PROCESS.opened):
            return
        before = HANDLERS.getsignal(SIGINT)
        if before == _PROCESS.received:
            self._within = _PROCESS.opened
            _PROCESS.opened = False
        elif callable(before):
            if not _PROCESS.installed:
                _PROCESS.take()  # what the end of another block was broken off with
            self._outer = _PROCESS.before, _PROCESS.installed
            _PROCESS.before = before
            HANDLERS.signal(SIGINT, _PROCESS.received)
            _PROCESS.thread = threading.get_ident()
            self._mine = _PROCESS.installed = True

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not (self._mine or self._within):
            return
        before = _PROCESS.before
        if self._mine:
            self._mine = False
            _PROCESS.before, _PROCESS.installed = self._outer
            if before is not None:  # None: user code set a handler that is not Python's, which cannot be set again
                HANDLERS.signal(SIGINT, before)
        # Only now, so that nothing can be kept any more that nobody would hear of.
        due = _PROCESS.take() and not self._leaving and not isinstance(error, KeyboardInterrupt)
        if due and callable(before):
            before(signal.SIGINT, None)
        if self._within:  # an exception leaves the opened block too, so that it stays closed then
            _PROCESS.opened = True


class opened(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Inside, user code runs between steps (a callback): SIGINT is the caller's, at once.

    The first one that raises closes the block: the exception is on its way out, and must not be overtaken by another
    before everything is guarded again.
    """

    def __init__(self) -> None:
        self._mine = False

    def __enter__(self) -> None:
        self._mine = _here() and _PROCESS.installed
        if self._mine:
            check()
            _PROCESS.opened = True

    def __exit__(self, *_: object) -> None:
        _PROCESS.opened = False
        before = signal.getsignal(signal.SIGINT) if self._mine else None
        if callable(before) and before != _PROCESS.received:  # user code chose another handler
            _PROCESS.before = before
            signal.signal(signal.SIGINT, _PROCESS.received)


class breakable(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Inside, user code runs that may be broken off, if what it leaves behind is not used any more.

    Parameters
    ----------
    at_once : bool
        Whether the first SIGINT does that, because nobody goes on from here: while a run is being made.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._breaks: int | None = None

    def __enter__(self) -> None:
        if _PROCESS.installed and not _PROCESS.shields and threading.get_ident() == _PROCESS.main:
            if _PROCESS.pressed:
                _PROCESS.deliver()
            self._breaks = _PROCESS.breaks
            _PROCESS.at_once = self._at_once
            _PROCESS.breakable = True

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._breaks is not None:
            _PROCESS.breakable = False
            if _PROCESS.breaks != self._breaks and error is None:
                raise KeyboardInterrupt("user code swallowed it")


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


def breaks() -> int:
    """How often user code was broken off in this process; if that changes, its state may be half done."""
    return _PROCESS.breaks


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


def _here() -> bool:
    return threading.get_ident() == _PROCESS.main
