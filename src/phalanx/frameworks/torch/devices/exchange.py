"""What devices of one process do with each other's gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.frameworks.torch import arithmetic
from phalanx.frameworks.torch.arithmetic import FOREACH, Gradient
from phalanx.frameworks.torch.devices.accelerators import watched
from phalanx.frameworks.torch.replica.buffers import Left, bytes_of
from phalanx.frameworks.torch.replica.lane import Lane
from phalanx.plan.placement import Placement
from phalanx.seams import Todo

SMALL_BYTES = 1 << 18  # of a tensor that is not worth a copy of its own


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
    lanes : sequence of Lane
        What each device computes with.
    """

    def __init__(
        self, placement: Placement, devices: Sequence[torch.device], owners: Sequence[int], lanes: Sequence[Lane]
    ) -> None:
        self.placement = placement
        self._lanes = lanes
        self._homes = devices
        self._places = [devices[owner] for owner in owners]
        self._owned = {owner: [n for n, other in enumerate(owners) if other == owner] for owner in sorted(set(owners))}
        self.following: Callable[[], Sequence[Todo]] | None = None

    def moved(self, vector: Gradient) -> Gradient:
        """See ``seams.Lanes.moved``."""
        with watched(self._homes):
            return placed(vector, self._places)

    @property
    def sizes(self) -> list[int]:
        """See ``engines.hosts.link``."""
        return [start.nbytes for start in self._lanes[0].buffers.starts]

    @property
    def blanks(self) -> list[torch.Tensor]:
        """See ``engines.hosts.link``."""
        return [arithmetic.blank(arithmetic.spec_of(parameter)) for parameter in self._lanes[0].parameters]

    def home(self, vector: Gradient) -> Gradient:
        """See ``engines.hosts.link``; waits for the devices."""
        return [None if entry is None else entry.cpu() for entry in vector]

    def outward(self, left: Sequence[torch.Tensor]) -> list[bytes | None]:
        """See ``engines.hosts.link``."""
        unwritten = {id(start) for lane in self._lanes for start in lane.buffers.starts}
        return [None if id(value) in unwritten else bytes_of(value.cpu()).numpy().tobytes() for value in left]

    def inward(self, pieces: Sequence[bytes | bytearray | None]) -> Left:
        """See ``engines.hosts.link``."""
        found: Left = []
        for piece, start in zip(pieces, self._lanes[0].buffers.starts, strict=True):
            if piece is None:
                found.append(start)
            else:
                value = torch.frombuffer(bytearray(piece), dtype=start.dtype).reshape(start.shape)
                found.append(value.to(start.device))
        return found

    def take_following(self) -> Sequence[Todo]:
        """What was said to be computed next, once; nothing if that was not said."""
        following, self.following = self.following, None
        return [] if following is None else following()

    def spread(self) -> None:
        """Copy every parameter from its owner to the other devices."""
        parameters = [lane.parameters for lane in self._lanes]
        with torch.no_grad():
            for owner, entries in self._owned.items():
                updated = [parameters[owner][number] for number in entries]
                for lane, home in enumerate(self._homes):
                    if lane != owner:
                        FOREACH._foreach_copy_([parameters[lane][number] for number in entries], copies(updated, home))


def placed(vector: Gradient, homes: Sequence[torch.device | None]) -> Gradient:
    """The entries on these devices, small ones of one device in one copy; None: where they are."""
    result = list(vector)
    for home in dict.fromkeys(homes):
        if home is not None:
            numbers = [number for number, other in enumerate(homes) if other == home and vector[number] is not None]
            arrived = copies([vector[number] for number in numbers], home)  # type: ignore[misc]
            for number, tensor in zip(numbers, arrived, strict=True):
                result[number] = tensor
    return result


def copies(tensors: Sequence[torch.Tensor], home: torch.device) -> list[torch.Tensor]:
    """The tensors on another device, small ones in one copy; those that are there already, as they are.

    The host may read what comes to the CPU at once, so such a copy is waited for.
    """
    free = home.type != "cpu"
    result = list(tensors)
    small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.device == home:
            continue
        if tensor.nbytes <= SMALL_BYTES and is_dense(tensor):
            small.setdefault((tensor.device, tensor.dtype), []).append(number)
        else:
            result[number] = tensor.to(home, non_blocking=free)
    for numbers in small.values():
        flat = torch.cat([tensors[number].detach().as_strided((tensors[number].numel(),), (1,)) for number in numbers])
        arrived = flat.to(home, non_blocking=free)
        for number, piece in zip(numbers, arrived.split([tensors[n].numel() for n in numbers]), strict=True):
            result[number] = piece.as_strided(tensors[number].shape, tensors[number].stride(), piece.storage_offset())
    return result


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side from its first, in any order."""
    steps = [(length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.numel() > 0 and sum(steps) + 1 == tensor.numel()


class DeviceArithmetic:
    """Implements ``seams.Arithmetic``: as on the CPU, with one kernel for many tensors where that moves no bit."""

    def add(self, left: Gradient, right: Gradient) -> Gradient:
        """See ``seams.Arithmetic.add``."""
        homes: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for a, b in zip(left, right, strict=True):
            if a is not None and b is not None:
                mine, theirs = homes.setdefault(a.device, ([], []))
                mine.append(a)
                theirs.append(b)
        for mine, theirs in homes.values():
            FOREACH._foreach_add_(mine, theirs)
        return [b if a is None else a for a, b in zip(left, right, strict=True)]

    scale = staticmethod(arithmetic.scale)
    divide = staticmethod(arithmetic.divide)
    finite = staticmethod(arithmetic.finite)
    checksum = staticmethod(arithmetic.checksum)

    def read(self, scalars: Sequence[Any]) -> list[float]:
        """See ``seams.Arithmetic.read``: one copy from each device."""
        found = [0.0 if isinstance(scalar, torch.Tensor) else scalar for scalar in scalars]
        homes: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, scalar in enumerate(scalars):
            if isinstance(scalar, torch.Tensor):
                homes.setdefault((scalar.device, scalar.dtype), []).append(number)
        for (home, _), numbers in homes.items():
            with watched([home]):
                values = torch.stack([scalars[number] for number in numbers]).tolist()
            for number, value in zip(numbers, values, strict=True):
                found[number] = value
        return found
