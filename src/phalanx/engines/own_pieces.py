"""The fold of a slice and the whole update, done once more by a process that is alone, in its own memory."""

from __future__ import annotations

import math
import zlib
from typing import Any

from phalanx.engines.auditing import summed, summed_fold
from phalanx.engines.ballots import Ballot, compare
from phalanx.plan.audit import Audit, Piece, What
from phalanx.seams import Framework
from phalanx.seams.sharing import Vector
from phalanx.seams.snapshots import Captured
from phalanx.shared.audit_room import ELEMENTS


class OwnPieces:
    """Implements ``auditing.Pieces`` for the calling process: nobody else is there, so that it does everything twice.

    Parameters
    ----------
    audit : Audit
    framework : Framework
    ballot : Ballot
    """

    def __init__(self, audit: Audit, framework: Framework, ballot: Ballot) -> None:
        self._audit = audit
        self._framework = framework
        self._ballot = ballot
        self._parameters: list[str] = []
        self._rehearses = framework.sharing.portable

    def aim(self, step: int) -> None:
        """See ``auditing.Pieces.aim``."""
        if not self._parameters:
            self._parameters = list(self._framework.export(step, copy=False, digest=False).params)
        self._step = step
        self._piece = Piece(0, 0)
        self._slices: list[Any] = []
        self._held: Any = None

    def push(self, replica: int, gradient: Vector | None) -> None:
        """See ``auditing.Pieces.push``: what was added to the left neighbour's already is that very entry."""
        if gradient is not None and not any(entry is not None for entry in self._slices):
            sizes = [0 if entry is None else math.prod(entry.shape) for entry in gradient]
            self._piece = self._audit.piece(self._step, sizes, ELEMENTS)
        entry = None if gradient is None else gradient[self._piece.parameter]
        self._slices.append(self._cut(gradient))
        if entry is not None and entry is self._held:
            self._slices[-2:] = self._slices[-1], None
        self._held = entry

    def spare(self) -> None:
        """See ``auditing.Pieces.spare``: what is computed next is put nowhere that matters."""

    def folded(self, gradient: Vector, weight: float) -> None:
        """See ``auditing.Pieces.folded``."""
        self._second = summed_fold(self._framework.arithmetic, self._slices, weight)
        self._ballot.vote(What.FOLD, summed([self._cut(gradient)]))
        self._mean = [None if entry is None else _copied(entry) for entry in gradient]

    def compare_folds(self, norm: float) -> None:
        """See ``auditing.Pieces.compare_folds``; from here on the state is kept as it is before the update."""
        self._compare(What.FOLD)
        self._before = self._framework.capture(copy=True) if self._rehearses else None

    def updated(self) -> None:
        """See ``auditing.Pieces.updated``: buffers are settled once, and are no part of it.

        Raises
        ------
        CorruptionError
            The update came out differently; the state is that of before it.
        """
        if self._before is None:
            return
        framework, before = self._framework, self._before
        self._before, after = None, framework.capture(copy=True)
        framework.adopt(before)
        framework.update(self._step, self._mean, None)
        again = framework.capture(copy=False)
        self._second = self._sum(again)
        again.release()
        self._ballot.vote(What.UPDATE, self._sum(after))
        framework.adopt(after if self._ballot.votes(What.UPDATE)[0] == self._second else before)
        self._compare(What.UPDATE)

    def _cut(self, gradient: Vector | None) -> Any:
        """A copy of the slice; None where there is no gradient."""
        parameter, start = self._piece
        entry = None if gradient is None else gradient[parameter]
        return None if entry is None else _copied(entry.reshape(-1)[start : start + ELEMENTS])

    def _sum(self, state: Captured) -> int:
        """A checksum over parameters and optimizer state."""
        tensors = [state.weights[name] for name in self._parameters if name in state.weights]
        total = 0
        for tensor in [*tensors, *state.training.values()]:
            total = zlib.crc32(bytes(tensor.content), total)
        return total

    def _compare(self, what: What) -> None:
        compare(self._ballot, what, 0, (0, 0), self._second, step=self._step, piece=self._piece)


def _copied(entry: Any) -> Any:
    return entry.clone() if hasattr(entry, "clone") else entry.copy()
