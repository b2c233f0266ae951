"""Buffers on a device: the rule of ``replica.buffers``, without reading anything back.

Small buffers are taken to be written by every forward pass: no counter of torch's tells (batch norm writes its
statistics uncounted), and comparing would wait for the device. Whether replicas left equal bytes is found out, and
decided, on the device. Large ones, such as masks, are taken to be constants as long as autograd's counter says so, and
are compared from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.frameworks.torch.arithmetic import FOREACH
from phalanx.frameworks.torch.devices.exchange import is_dense
from phalanx.frameworks.torch.replica.buffers import Compared, bytes_of, mean_of, same_bytes

SMALL_BYTES = 1 << 18
FIRST, EVERY = 8, 256  # looks at a large buffer: so many at first, and again from so many to so many
Mark = tuple[int | None, int | None, int]  # versions of a buffer and of its start, and which start


class Versions:
    """Implements ``Contents``."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []  # as of when buffers and starts were equal
        self._looks: dict[int, int] = {}  # how often a large buffer was looked at

    def unwritten(self, number: int, value: torch.Tensor, tensor: torch.Tensor | None, start: torch.Tensor) -> bool:
        """See ``Contents.unwritten``."""
        if value is not tensor or start.nbytes <= SMALL_BYTES or self._marks[number] != _mark(tensor, start):
            return False
        self._looks[number] = looks = self._looks.get(number, -1) + 1
        return looks % EVERY > FIRST or same_bytes(value, start)

    def write(self, tensors: Sequence[torch.Tensor | None], starts: Sequence[torch.Tensor | None]) -> None:
        """See ``Contents.write``."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, (tensor, start) in enumerate(zip(tensors, starts, strict=True)):
            if tensor is None or start is None or not tensor.numel():
                continue
            if not is_dense(tensor):  # expanded memory cannot be written, so it is looked at
                Compared().write([tensor], [start])
            elif start.nbytes <= SMALL_BYTES or self._marks[number] != _mark(tensor, start):
                pairs.append((tensor, start))
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


def _mark(tensor: torch.Tensor | None, start: torch.Tensor | None) -> Mark:
    return None if tensor is None else tensor._version, None if start is None else start._version, id(start)
