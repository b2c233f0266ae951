"""Buffers on a device: the rule of ``frameworks.torch.buffers``, without reading anything back.

Whether forward wrote a buffer is told by autograd's version counter, which the host has; whether replicas left equal
bytes is found out, and decided, on the device.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.frameworks.torch.buffers import Buffers, Left, bytes_of, mean_of, same_bytes

FOREACH: Any = torch


class DeviceBuffers(Buffers):
    """The buffers of one device's model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._hidden: set[int] = set()  # written in ways that no version counter notices, as through ``.data``
        self._verified = False
        self._note_clean()

    def renew(self) -> None:
        """See ``Buffers.renew``."""
        super().renew()
        self._note_clean()

    def left(self) -> Left:
        """See ``Buffers.left``; the first time, bytes are compared to see whether version counters tell the truth."""
        found = super().left()
        self._verified = True
        return found

    def move_from(self, owner: Buffers, written: Sequence[int]) -> None:
        """Take those with the numbers ``written`` of the step's start from another device's buffers."""
        for number in written:
            self.starts[number].copy_(owner.starts[number], non_blocking=True)
        self._write(self._start)
        self._dirty = False

    def _unwritten(self, number: int, value: torch.Tensor, start: torch.Tensor) -> bool:
        if value is not self._tensors[number] or number in self._hidden or self._clean[number] != self._state(number):
            return False
        if not self._verified and not same_bytes(value, start):
            self._hidden.add(number)
            return False
        return True

    def _write(self, values: Sequence[torch.Tensor | None]) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for number, ((_, module, name), tensor, value) in enumerate(
            zip(self._places, self._tensors, values, strict=True)
        ):
            module._buffers[name] = tensor
            written = number in self._hidden or self._clean[number] != self._state(number)
            if tensor is not None and value is not None and written:
                targets.append(tensor)
                sources.append(value)
        if targets:
            with torch.no_grad():
                FOREACH._foreach_copy_(targets, sources)
        self._note_clean()

    def _note_clean(self) -> None:
        """All buffers equal the step's start now: note the versions of both."""
        self._clean = [self._state(number) for number in range(len(self._tensors))]

    def _state(self, number: int) -> tuple[int, int, int]:
        tensor, start = self._tensors[number], self._start[number]
        return (
            -1 if tensor is None else tensor._version,
            -1 if start is None else start._version,
            id(start),
        )

    @staticmethod
    def _settled(values: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        """The first one's bytes where all have the same, else the mean; which of the two is decided on the device."""
        first = values[0]
        others = [value for value in values[1:] if value is not first]
        if not others or not (first.is_floating_point() or first.is_complex()):
            return first
        mine = bytes_of(first)
        same = [torch.eq(mine, bytes_of(other)).all() for other in others]
        alike = same[0]
        for more in same[1:]:
            alike = operator.and_(alike, more)
        return torch.where(alike, first, mean_of(values, weights))
