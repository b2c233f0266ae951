"""Copies between devices, and buffers on them: nothing here waits for a device, unless the copy is to the CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.definition.data import map_tree
from phalanx.frameworks.torch.devices.contents import Versions
from phalanx.frameworks.torch.devices.exchange import copies, is_dense
from phalanx.frameworks.torch.devices.feed import can_pin
from phalanx.frameworks.torch.replica.buffers import Compared

Vector = Sequence[torch.Tensor | None]


def moved(vector: Vector, home: torch.device) -> list[torch.Tensor | None]:
    """The tensors on another device, small ones in one copy; those that are there already, as they are."""
    result = list(vector)
    there = [number for number, tensor in enumerate(vector) if tensor is not None]
    present = [tensor for tensor in vector if tensor is not None]
    # The host may read what comes to the CPU at once, so that copy is waited for.
    arrived = [tensor.to(home) for tensor in present] if home.type == "cpu" else copies(present, home)
    for number, tensor in zip(there, arrived, strict=True):
        result[number] = tensor
    return result


class Sender:
    """Sends batches to devices; to be kept until these have been waited for, since copies read its memory."""

    def __init__(self) -> None:
        self._pinned: list[torch.Tensor] = []

    def sent(self, batch: Any, device: torch.device) -> Any:
        """The batch with its tensors on the device."""
        pins = device.type != "cpu" and can_pin()
        return map_tree(functools.partial(self._leaf, device=device, pins=pins), batch)

    def _leaf(self, leaf: Any, device: torch.device, *, pins: bool) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        if leaf.device.type != "cpu":
            return leaf.to(device, non_blocking=device.type != "cpu")
        if pins:
            leaf = leaf.pin_memory()
            self._pinned.append(leaf)
        return leaf.to(device, non_blocking=pins)


class Unlooked:
    """Implements ``replica.buffers.Contents`` for a device: copies all, so that the host need not look at anything."""

    def __init__(self) -> None:
        self.settled = Versions().settled

    def unwritten(self, number: int, value: torch.Tensor, tensor: torch.Tensor | None, start: torch.Tensor) -> bool:
        """See ``Contents.unwritten``: that is not known."""
        return False

    def write(self, tensors: Sequence[torch.Tensor | None], starts: Sequence[torch.Tensor | None]) -> None:
        """See ``Contents.write``; what was expanded cannot be written, and is looked at."""
        for tensor, start in zip(tensors, starts, strict=True):
            if tensor is None or start is None or not tensor.numel():
                continue
            if is_dense(tensor):
                tensor.copy_(start)
            else:
                Compared().write([tensor], [start])

    def equal(self, tensors: Sequence[torch.Tensor | None], starts: Sequence[torch.Tensor | None]) -> None:
        """See ``Contents.equal``: nothing follows from it."""
