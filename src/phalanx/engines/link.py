"""What a step needs of other workers, in two parts: a board, on which all say what all must know, and who adds.

So workers of one host or of many, with devices or without, are pairs of parts; ``linked`` puts them together. Sums of
several processes publish on ``Shared`` which gradients there are, and wait there.

========================  ==========================================  ===========================
workers                   board                                       sums
========================  ==========================================  ===========================
this process              ``Alone``                                   ``Folded``, ``FoldedOnLanes``
processes                 ``Shared``                                  ``Owned``
processes of many hosts   ``Network``, over ``Shared``                ``Owned``, ``AddedAcross``
devices                   ``Shared``                                  ``Exchanged``
devices of many hosts     ``Network``, over ``Shared``                ``Exchanged``
========================  ==========================================  ===========================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from phalanx.definition.data import Share
from phalanx.seams.records import Part, Vector


class Board(Protocol):
    """What all workers must know of a step, and where they wait for each other."""

    def begin(self) -> None:
        """Replicas are computed from here on."""

    def pushed(self) -> None:
        """Another replica is done; raises to leave the step."""

    def share(self, said: Sequence[bytes]) -> list[bytes]:
        """Meet once the outputs of all replicas are computed; from the texts of those here to those of all R."""
        ...

    def gather(self, parts: Sequence[Part]) -> list[Part]:
        """Meet once all replicas are computed; from the parts of those here to those of all R, in order."""
        ...

    def all_true(self, opinion: bool) -> bool:
        """Whether this is true in all workers."""
        ...


class Sums(Protocol):
    """Who adds gradients, and who updates with the sum."""

    def begin(self, step: int, shares: Sequence[Share], *, early: bool) -> None:
        """Forget what an earlier step left. ``early``: gradients may travel while others are computed."""

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        """As of ``seams.Link``."""

    def close(self, parts: Sequence[Part]) -> Sequence[Part]:
        """No replica follows: say which sums there are. Returns the parts as the board can tell them."""
        ...

    def mean(self, weight: float, parts: Sequence[Part]) -> Vector:
        """As of ``seams.Link``; ``parts``: those of all R."""
        ...

    def norm(self, gradient: Vector, parts: list[Part]) -> tuple[float, list[Part]]:
        """As of ``seams.Link``."""
        ...

    def commit(self, step: int, gradient: Vector | None, parts: Sequence[Part]) -> None:
        """As of ``seams.Link``; ``parts``: those of all R."""

    def leave(self) -> None:
        """Give up what is under way on a device, before anybody reads it: without a peer it may never end."""


class Link:
    """Implements ``seams.Link``.

    Parameters
    ----------
    hosted : sequence of int
        The replicas computed here, in order.
    board : Board
    sums : Sums

    Attributes
    ----------
    overlaps : bool
        Whether this step may send gradients while others are computed.
    leave : callable
        As of ``sums``.
    """

    def __init__(self, hosted: Sequence[int], board: Board, sums: Sums) -> None:
        self.hosted = hosted
        self.overlaps = False
        self.leave = sums.leave
        self.all_true = board.all_true
        self._board, self._sums = board, sums
        self._parts: list[Part] = []

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        self._sums.begin(step, shares, early=self.overlaps)
        self._board.begin()

    def share(self, said: Iterable[bytes]) -> list[bytes]:
        mine = list[bytes]()
        for text in said:
            mine.append(text)
            self._board.pushed()
        return self._board.share(mine)

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        self._sums.push(replica, samples, gradient, buffers)
        self._board.pushed()

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        self._parts = self._board.gather(self._sums.close(parts))
        return self._parts

    def mean(self, weight: float) -> Vector:
        return self._sums.mean(weight, self._parts)

    def norm(self, gradient: Vector, parts: list[Part]) -> tuple[float, list[Part]]:
        return self._sums.norm(gradient, parts)

    def commit(self, step: int, gradient: Vector | None) -> None:
        self._sums.commit(step, gradient, self._parts)
