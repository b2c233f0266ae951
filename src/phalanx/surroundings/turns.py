"""Turns of threads at what a whole process shares, and contexts that are entered only once when nested.

Random generators, thread counts and modes belong to the process, not to a run. Two runs in two threads of one process
take turns with them: step by step, in the order in which they came.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from phalanx.surroundings import interrupts, presence

P = ParamSpec("P")
T = TypeVar("T")
SLICE_SECONDS = 0.1  # between two looks at Ctrl-C while waiting


class Turns(contextlib.AbstractContextManager["Turns"]):
    """A lock for one thread at a time, first come, first served; the same thread may enter it again.

    ``threading.RLock`` promises no order: a thread that releases and takes it again at once keeps the others waiting.
    Here threads stand in line, and the first has its turn. A thread that leaves wakes the one that is first then.
    """

    def __init__(self) -> None:
        self._owner = self._depth = 0
        self._line: deque[threading.Event] = deque()
        presence.own(self)

    def leave(self) -> None:
        """In the child of a fork there is one thread: what others held or waited for is free."""
        presence.own(self)  # the child uses it, too
        if self._owner == threading.get_ident():
            self._line = deque([self._line[0]])
        else:
            self._owner = self._depth = 0
            self._line = deque()

    @property
    def mine(self) -> bool:
        """Whether this thread has its turn."""
        return self._owner == threading.get_ident()

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a turn."""
        return len(self._line) > 1

    def __enter__(self, check: Callable[[], object] = interrupts.check) -> Turns:
        """Wait for the turn, and call ``check`` now and then meanwhile."""
        me = threading.get_ident()
        if self._owner != me:
            turn = threading.Event()
            self._line.append(turn)
            try:
                while self._line[0] is not turn:
                    if not turn.wait(SLICE_SECONDS):
                        check()
            except BaseException:  # Ctrl-C: its turn may have come meanwhile
                self._leave_line(turn)
                raise
            self._owner = me
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._pass_on()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, others may have a turn, though this thread is in the middle of its own; else nothing changes."""
        if not self.mine:
            yield
            return
        depth, self._depth = self._depth, 0
        self._pass_on()
        try:
            yield
        finally:
            self.__enter__(check=bool)  # whatever comes: what follows relies on the turn
            self._depth = depth

    def _pass_on(self) -> None:
        self._owner = 0
        self._leave_line(self._line[0])

    def _leave_line(self, turn: threading.Event) -> None:
        self._line.remove(turn)
        with contextlib.suppress(IndexError):  # nobody waits
            self._line[0].set()


ALONE = Turns()  # a thread inside may change generators and modes of the process, and restores them before leaving


def verb(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Make a method wait until no other thread is in one; Ctrl-C comes where nothing is held."""

    @functools.wraps(method)
    def call(owner: Any, *arguments: P.args, **options: P.kwargs) -> T:
        turn = owner.turn
        if turn.mine:  # called by another verb
            return method(owner, *arguments, **options)
        with interrupts.guarded(), turn:
            return method(owner, *arguments, **options)

    return call


def alone(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function take its turn with what belongs to the process; Ctrl-C comes where nothing is held."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        with interrupts.guarded(), ALONE:
            return function(*arguments, **options)

    return call


class Anew(contextlib.AbstractContextManager[None]):
    """A context that is made anew each time it is entered; it cannot be nested."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._make = make
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._exits.enter_context(self._make())

    def __exit__(self, *_: object) -> None:
        self._exits.close()


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
