"""Ctrl-C, delivered only where nothing is half done; a second one at once.

Python raises ``KeyboardInterrupt`` between any two bytecodes: also inside ``__enter__`` and ``__exit__`` of a context
manager, so that what it set stays set. A run may go on after Ctrl-C, so that must not happen to anything a run uses.
So inside ``guarded`` a SIGINT is kept, and one of two states says until when:

* Inside ``held`` something is half done: a step whose observers have not all been called, or what ends a run. The first
  SIGINT waits for its end. A second one does not wait: whoever it breaks off must not go on in this process.
* Elsewhere the first SIGINT is delivered at the next ``check``, in ``user_code``, or at the end of the block.

``check`` stands in waits and between two pieces of work. ``user_code`` may take for ever, so there a SIGINT that needs
not wait breaks it off.

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
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from phalanx.surroundings import system

SIGINT = int(signal.SIGINT)
HANDLERS: Any = getattr(signal, "_signal", signal)  # without what turns numbers into enums and back: 15 us a step
HINT = b"\nphalanx: Ctrl-C comes when this step is done; press it again to stop at once\n"


class _Process:
    """What this process knows of SIGINT.

    Attributes
    ----------
    before : callable
        The caller's handler, which gets what was kept.
    main : int or None
        The main thread.
    installed : bool
        Whether SIGINT comes here.
    pressed : int
        SIGINTs that are kept.
    held : int
        How many ``held`` blocks are open.
    breakable : bool
        Whether user code is running.
    broken : int
        How often user code, or what was held, was broken off.
    """

    def __init__(self) -> None:
        self.before: Any = None
        self.installed = self.breakable = False
        self.main = threading.main_thread().ident
        self.pressed = self.held = self.broken = 0
        self._frame: FrameType | None = None

    def received(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT."""
        self.pressed += 1
        self._frame = frame
        if self.breakable and self.due:
            self.deliver()
        elif self.pressed == 1 and self.held and os.isatty(2):
            os.write(2, HINT)  # not through sys.stderr, which the main thread may be writing to

    @property
    def due(self) -> bool:
        """Whether something is kept that need not wait."""
        return self.pressed > self.held

    def deliver(self) -> None:
        """Give what was kept to the caller's handler, which usually raises."""
        frame, breakable, broken = self._frame, self.breakable, self.broken
        self.breakable = False  # first: the handler usually raises, and the callers must be guarded then
        self.take()
        self.broken += breakable or self.held > 0
        self.before(signal.SIGINT, frame)
        self.breakable, self.broken = breakable, broken  # the handler did not raise: nothing was broken off

    def take(self) -> int:
        """Forget what was kept, and say how many there were."""
        self._frame = None  # a frame keeps all that its function and the callers hold, such as whole arenas
        taken, self.pressed = self.pressed, 0  # no signal is handled within this line
        return taken

    def forked(self) -> None:
        """In the child of a fork SIGINT is the caller's again: the thread that forked may guard nothing."""
        self.main = threading.get_ident()
        if self.installed:
            self.installed = self.breakable = False
            self.held = self.pressed = 0
            signal.signal(signal.SIGINT, self.before)


PROCESS = _Process()
system.after_fork(PROCESS.forked)


class guarded(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Inside, SIGINT is kept until ``check`` or the end of the block; may be nested, also in user code.

    Parameters
    ----------
    leaving : bool
        Whether Ctrl-C is what is being dealt with: then what was kept is dropped at the end, not delivered once more.
    """

    def __init__(self, *, leaving: bool = False) -> None:
        self._leaving = leaving
        self._mine = self._within = False  # whether this block set the handler; whether user code is around it

    def __enter__(self) -> None:
        # Until the handler is set Ctrl-C may raise here: nothing is held yet.
        if not _here():
            return
        if PROCESS.installed:
            self._within, PROCESS.breakable = PROCESS.breakable, False
            return
        before = HANDLERS.getsignal(SIGINT)
        if callable(before):
            PROCESS.take()  # SIGINTs that broke off the end of another block
            PROCESS.held = 0
            PROCESS.before = before
            HANDLERS.signal(SIGINT, PROCESS.received)
            self._mine = PROCESS.installed = True

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._within and not isinstance(error, KeyboardInterrupt):  # which another must not overtake
            PROCESS.breakable = True
            check()
        if not self._mine:
            return
        # The order of what follows is the point. `installed` goes first, while the handler is still there. If the
        # handler went first, Ctrl-C could raise before `installed` is cleared. It would stay set, and no later block
        # would set the handler: Ctrl-C would raise anywhere again. A SIGINT up to the change of handlers is counted,
        # and `take` finds it after that. To count before that lost a Ctrl-C of these few lines, or let it come out of
        # the next call. A test presses Ctrl-C at each line of these blocks, so try a change with it. Not covered:
        # other threads, and a SIGINT that is ignored or has no Python handler.
        self._mine = PROCESS.installed = False
        before = PROCESS.before
        if HANDLERS.getsignal(SIGINT) == PROCESS.received:  # else user code chose another, which stays
            HANDLERS.signal(SIGINT, before)
        # Only now: from here on no SIGINT is kept that nobody would deliver.
        if PROCESS.take() and not self._leaving and not isinstance(error, KeyboardInterrupt):
            before(signal.SIGINT, None)


class held(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Inside something is half done: the first SIGINT waits for the end of the block, a second one does not.

    A block inside another waits for one SIGINT more: what ends a run after a second one is not broken off by the next.
    """

    def __enter__(self) -> None:
        if threading.get_ident() == PROCESS.main:
            PROCESS.held += 1

    def __exit__(self, *_: object) -> None:
        if PROCESS.held and threading.get_ident() == PROCESS.main:
            PROCESS.held -= 1


class user_code(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Inside, user code runs. What it leaves behind when it is broken off must not be used any more."""

    def __init__(self) -> None:
        self._broken: int | None = None

    def __enter__(self) -> None:
        if PROCESS.installed and threading.get_ident() == PROCESS.main:
            self._broken = PROCESS.broken
            PROCESS.breakable = True
            if PROCESS.pressed:
                check()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._broken is not None:
            PROCESS.breakable = False
            if PROCESS.broken != self._broken and error is None:
                raise KeyboardInterrupt("user code swallowed it")


def check() -> None:
    """Deliver a SIGINT that need not wait any longer; call it where nothing is half done, and in every wait."""
    if PROCESS.pressed and PROCESS.due and _here():
        PROCESS.deliver()


def of_handler(error: BaseException) -> bool:
    """Whether a handler of a signal raised it: then it says nothing of the code that it broke into."""
    handlers: list[Any] = list(map(HANDLERS.getsignal, signal.valid_signals()))
    calls = [getattr(handler, "func", vars(type(handler)).get("__call__", handler)) for handler in handlers]
    codes = {getattr(handler, "__code__", None) for handler in (*handlers, *calls)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


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
    return threading.get_ident() == PROCESS.main
