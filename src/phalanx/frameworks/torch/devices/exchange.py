"""What devices of one process do with each other's gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.frameworks.torch import arithmetic
from phalanx.frameworks.torch.arithmetic import Gradient
from phalanx.plan.placement import Placement
from phalanx.seams import Todo

FOREACH: Any = torch


class Exchange:
    """Implements ``seams.Lanes``: who owns which parameter, and copies to and from owners.

    Copies between devices are torch's own: each waits for what both devices were given before, the host for nothing.

    Parameters
    ----------
    placement : Placement
        Which device computes which replicas.
    devices : sequence of torch.device
    owners : sequence of int
        The number of the device that updates each parameter.
    """

    def __init__(self, placement: Placement, devices: Sequence[torch.device], owners: Sequence[int]) -> None:
        self.placement = placement
        self._homes = devices
        self._owners = owners
        self._following: Callable[[], Sequence[Todo]] | None = None

    def moved(self, entry: int, gradient: torch.Tensor) -> torch.Tensor:
        """See ``seams.Lanes.moved``."""
        return gradient.to(self._homes[self._owners[entry]], non_blocking=True)

    def expect(self, following: Callable[[], Sequence[Todo]]) -> None:
        """See ``seams.Lanes.expect``."""
        self._following = following

    def following(self) -> Sequence[Todo]:
        """What was said to be computed next, once; nothing if that was not said."""
        following, self._following = self._following, None
        return [] if following is None else following()

    def spread(self, parameters: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy every parameter from its owner to the other devices; ``parameters`` are those of each device."""
        with torch.no_grad():
            for index, owner in enumerate(self._owners):
                for number, copies in enumerate(parameters):
                    if number != owner:
                        copies[index].copy_(parameters[owner][index], non_blocking=True)


class DeviceArithmetic:
    """Implements ``seams.Arithmetic``: as on the CPU, with one kernel for many tensors where that moves no bit."""

    def add(self, left: Gradient, right: Gradient) -> Gradient:
        """See ``seams.Arithmetic.add``."""
        pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
        if pairs:
            FOREACH._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
        return [b if a is None else a for a, b in zip(left, right, strict=True)]

    def scale(self, vector: Gradient, factor: float) -> Gradient:
        """See ``seams.Arithmetic.scale``."""
        return arithmetic.scale(vector, factor)

    def divide(self, vector: Gradient, divisor: float) -> Gradient:
        """See ``seams.Arithmetic.divide``."""
        return arithmetic.divide(vector, divisor)

    def finite(self, vector: Gradient) -> bool:
        """See ``seams.Arithmetic.finite``."""
        return arithmetic.finite(vector)

    def read(self, scalars: Sequence[Any]) -> list[float]:
        """See ``seams.Arithmetic.read``: one copy from each device."""
        found = [0.0 if isinstance(scalar, torch.Tensor) else scalar for scalar in scalars]
        homes: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, scalar in enumerate(scalars):
            if isinstance(scalar, torch.Tensor):
                homes.setdefault((scalar.device, scalar.dtype), []).append(number)
        for numbers in homes.values():
            for number, value in zip(numbers, torch.stack([scalars[n] for n in numbers]).tolist(), strict=True):
                found[number] = value
        return found
