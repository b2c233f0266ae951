"""Room in an arena for what an audit computes again: a slice of each replica's gradient, and what one update takes."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

from phalanx.seams.sharing import Arrays
from phalanx.shared.layout import Contents, Layout, Spec

ELEMENTS = 1 << 14  # of a slice
WIDEST = 8  # bytes of an element


class AuditRoom:
    """What workers leave for the one that audits them; each piece has one writer at a time, between two barriers.

    Parameters
    ----------
    arrays : Arrays
    arena : mmap.mmap
    offset : int
    contents : Contents
    replicas : int
        R.
    """

    def __init__(self, arrays: Arrays, arena: mmap.mmap, offset: int, contents: Contents, replicas: int) -> None:
        self.sizes = [spec.elements for spec in contents.gradients]
        self._arrays = arrays
        self._arena = arena
        self._contents = contents
        flags = replicas + 1 + len(contents.state)
        self._norm = memoryview(arena)[offset : offset + WIDEST].cast("d")
        self._flags = memoryview(arena)[offset + WIDEST : offset + WIDEST + flags]
        self._rows = offset + _padded(WIDEST + flags)
        self._whole = self._rows + replicas * ELEMENTS * WIDEST
        self._replicas = replicas

    @staticmethod
    def size(contents: Contents, replicas: int) -> int:
        """Bytes that it takes; most of them are never touched where audits are seldom or gradients small."""
        state = [0] * len(contents.gradients)
        for piece in contents.state:
            if piece.parameter >= 0:
                state[piece.parameter] += _padded(piece.spec.nbytes)
        pairs = zip(contents.gradients, state, strict=True)
        largest = max((2 * _padded(spec.nbytes) + more for spec, more in pairs), default=0)
        flags = replicas + 1 + len(contents.state)
        return _padded(WIDEST + flags) + replicas * ELEMENTS * WIDEST + largest

    def cut(self, parameter: int, start: int, entry: Any) -> Any:
        """A slice of a gradient: the elements of ``parameter`` from ``start`` on, in row order."""
        return self._arrays.cut(entry, start, min(start + ELEMENTS, self.sizes[parameter]))

    def leave(self, replica: int, parameter: int, start: int, entry: Any) -> None:
        """By whoever computed it: a replica's gradient of the parameter; None: it has none."""
        self._flags[replica] = entry is not None
        if entry is not None:
            self._row(replica, parameter, start)[...] = self.cut(parameter, start, entry)

    def left(self, parameter: int, start: int) -> list[Any]:
        """The slices of all replicas, None where one has none; they may be written."""
        rows = range(self._replicas)
        return [self._row(replica, parameter, start) if self._flags[replica] else None for replica in rows]

    def leave_mean(self, parameter: int, entry: Any) -> None:
        """By the owner: the mean gradient of the parameter; None: it has none."""
        self._flags[self._replicas] = entry is not None
        if entry is not None:
            self._mean(parameter)[...] = entry

    def mean(self, parameter: int) -> Any:
        """The mean gradient of the parameter, or None."""
        return self._mean(parameter) if self._flags[self._replicas] else None

    def keep(self, parameter: int, weight: Any, pieces: Mapping[int, Any]) -> None:
        """By the auditor: a parameter and its optimizer state as they are before the update."""
        places = self._places(parameter)
        places.pop(-1)[...] = weight
        for number, place in places.items():
            self._flags[self._replicas + 1 + number] = number in pieces
            if number in pieces:
                place[...] = pieces[number]

    def kept(self, parameter: int) -> tuple[Any, dict[int, Any]]:
        """The same; not to be written."""
        places = self._places(parameter)
        weight = places.pop(-1)
        return weight, {number: place for number, place in places.items() if self._flags[self._replicas + 1 + number]}

    @property
    def norm(self) -> float:
        """By the auditor: of the whole mean gradient, before clipping."""
        return self._norm[0]

    @norm.setter
    def norm(self, value: float) -> None:
        self._norm[0] = value

    def _places(self, parameter: int) -> dict[int, Any]:
        """Where a parameter (-1) and each piece of its optimizer state lie."""
        spec = self._contents.gradients[parameter]
        offset = self._whole + _padded(spec.nbytes)
        found: dict[int, Any] = {-1: self._arrays.view(self._arena, offset, spec)}
        offset += _padded(spec.nbytes)
        for number, piece in enumerate(self._contents.state):
            if piece.parameter == parameter:
                found[number] = self._arrays.view(self._arena, offset, piece.spec)
                offset += _padded(piece.spec.nbytes)
        return found

    def _mean(self, parameter: int) -> Any:
        return self._arrays.view(self._arena, self._whole, self._contents.gradients[parameter])

    def _row(self, replica: int, parameter: int, start: int) -> Any:
        spec = self._contents.gradients[parameter]
        count = min(ELEMENTS, spec.elements - start)
        offset = self._rows + replica * ELEMENTS * WIDEST
        return self._arrays.view(self._arena, offset, Spec((count,), (1,), spec.dtype, spec.itemsize))


class Parts:
    """Single parameters, whoever owns them, each with what the optimizer keeps of it: what an audit looks at.

    Parameters
    ----------
    local : SharedState
    arrays : Arrays
    layout : Layout
    arena : mmap.mmap
    worker : int
    """

    def __init__(self, local: Any, arrays: Arrays, layout: Layout, arena: mmap.mmap, worker: int) -> None:
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


def _padded(size: int) -> int:
    return -(-size // 64) * 64
