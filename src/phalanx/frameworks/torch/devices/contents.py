"""Buffers on a device: the rule of ``replica.buffers``, without reading anything back.

Whether forward wrote a buffer is told by autograd's version counter, which the host has; whether replicas left equal
bytes is found out, and decided, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.frameworks.torch.replica.buffers import bytes_of, mean_of, same_bytes

FOREACH: Any = torch
Mark = tuple[int | None, int | None, int]  # versions of a buffer and of its start, and which start


class Versions:
    """Implements ``Contents`` by version counters.

    The first time a buffer seems to be unwritten, its bytes are compared, to see whether the counter tells the truth:
    what is written through ``.data`` is not counted.
    """

    def __init__(self) -> None:
        self._marks: list[Mark] = []  # as of when buffers and starts were equal
        self._hidden: set[int] = set()  # buffers that are written without being counted
        self._verified: set[int] = set()

    def unwritten(self, number: int, value: torch.Tensor, tensor: torch.Tensor | None, start: torch.Tensor) -> bool:
        """See ``Contents.unwritten``."""
        if value is not tensor or self._may_differ(number, tensor, start):
            return False
        if number not in self._verified:
            self._verified.add(number)
            if not same_bytes(value, start):
                self._hidden.add(number)
        return number not in self._hidden

    def write(self, tensors: Sequence[torch.Tensor | None], starts: Sequence[torch.Tensor | None]) -> None:
        """See ``Contents.write``."""
        pairs = [
            (tensor, start)
            for number, (tensor, start) in enumerate(zip(tensors, starts, strict=True))
            if tensor is not None and start is not None and self._may_differ(number, tensor, start)
        ]
        if pairs:
            FOREACH._foreach_copy_([tensor for tensor, _ in pairs], [start for _, start in pairs])
        self.equal(tensors, starts)

    def equal(self, tensors: Sequence[torch.Tensor | None], starts: Sequence[torch.Tensor | None]) -> None:
        """See ``Contents.equal``."""
        self._marks = [_mark(*pair) for pair in zip(tensors, starts, strict=True)]

    def settled(self, values: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        """See ``Contents.settled``; which of the two it is, is decided on the device."""
        first = values[0]
        others = [value for value in values[1:] if value is not first]
        if not others or not (first.is_floating_point() or first.is_complex()):
            return first
        mine = bytes_of(first)
        alike = torch.stack([torch.eq(mine, bytes_of(other)).all() for other in others]).all()
        return torch.where(alike, first, mean_of(values, weights))

    def _may_differ(self, number: int, tensor: torch.Tensor | None, start: torch.Tensor) -> bool:
        return number in self._hidden or self._marks[number] != _mark(tensor, start)


def _mark(tensor: torch.Tensor | None, start: torch.Tensor | None) -> Mark:
    return None if tensor is None else tensor._version, None if start is None else start._version, id(start)
