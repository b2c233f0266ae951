"""Single parameters of a state in an arena, each with what the optimizer keeps of it: what an audit looks at."""

from __future__ import annotations

import mmap
from typing import Any

from phalanx.seams.sharing import Arrays, WorkerState
from phalanx.shared.audit_room import AuditRoom
from phalanx.shared.layout import Layout


class Parts:
    """The parameters, whoever owns them.

    Parameters
    ----------
    local : WorkerState
    arrays : Arrays
    layout : Layout
    arena : mmap.mmap
    worker : int
    """

    def __init__(self, local: WorkerState, arrays: Arrays, layout: Layout, arena: mmap.mmap, worker: int) -> None:
        self._local = local
        self._arrays = arrays
        self._layout = layout
        self._arena = arena
        self._worker = worker
        self._present = memoryview(arena)[layout.present :]

    @property
    def rehearses(self) -> bool:
        """Whether an update can be done once more, on copies, by a worker that does not own the parameter."""
        return self._local.rehearses

    def after(self, parameter: int, room: AuditRoom) -> list[Any]:
        """What the mean gradient in ``room`` makes of copies of what is kept there: a parameter and its state."""
        pieces = room.kept(parameter)
        weight, made = self._local.rehearsed(parameter, *pieces, room.mean(parameter), room.norm)
        return [weight, *(value for _, value in sorted(made.items()))]

    def now(self, parameter: int) -> list[Any]:
        """A parameter and its optimizer state as they are, by the number of the piece."""
        return [self._local.weight(parameter), *(home for _, home in sorted(self._pieces(parameter).items()))]

    def keep(self, parameter: int, room: AuditRoom) -> None:
        """Copy them there."""
        room.keep(parameter, self._local.weight(parameter), self._pieces(parameter))

    def cut(self, array: Any, start: int, end: int) -> Any:
        """A stretch of an array's elements, in row order."""
        return self._arrays.cut(array, start, end)

    def _pieces(self, parameter: int) -> dict[int, Any]:
        places = zip(self._layout.contents.state, self._layout.state[self._worker], strict=True)
        return {
            number: self._arrays.view(self._arena, offset, piece.spec)
            for number, (piece, offset) in enumerate(places)
            if piece.parameter == parameter and self._present[number]
        }
