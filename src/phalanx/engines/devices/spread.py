"""What workers with devices tell each other on the device: losses, and what replicas left in buffers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.engines.devices.buckets import ALIGNED
from phalanx.engines.devices.transport import Transport
from phalanx.engines.flat import PATTERNS
from phalanx.frameworks.torch.arithmetic import copy_all
from phalanx.shared.layout import Spec


class Spread:
    """Losses, and what replicas left in buffers: every worker gets it of all replicas, in one all-gather.

    Parameters
    ----------
    specs : sequence of Spec
        What each buffer looks like.
    blocks : sequence of range
        The replicas of each worker, in order.
    rank : int
        This worker's position there.
    device : str
        Where buffers are.
    """

    def __init__(self, specs: Sequence[Spec], blocks: Sequence[range], rank: int, device: str) -> None:
        self._specs, self._blocks, self._rank, self._device = specs, blocks, rank, device
        self._views = functools.lru_cache(PATTERNS)(self._laid_out)

    def total(
        self, transport: Transport, changed: np.ndarray, mine: Mapping[int, Sequence[Any]], losses: Sequence[Any]
    ) -> tuple[list[list[Any]], list[Any]]:
        """For each replica its buffers, where ``changed[replica, buffer]`` says that it wrote them; and its losses.

        ``losses`` are equally many of each of this worker's replicas, one after another. Those that come lie on the
        device, as float64, one after another for all replicas. Nothing is waited for.
        """
        packed, whole, into, rows = self._views(changed.any(0).tobytes(), len(losses) // len(self._blocks[self._rank]))
        for home, loss in zip((loss for *_, own in into for loss in own), losses, strict=True):
            home.copy_(loss) if isinstance(loss, torch.Tensor) else home.fill_(loss)
        pairs = [
            (home, mine[replica][number])
            for replica, (*homes, _) in zip(self._blocks[self._rank], into, strict=True)
            for number, home in enumerate(homes)
            if home is not None and changed[replica, number] and replica in mine  # else it has no samples
        ]
        copy_all(pairs)
        transport.wait(transport.gather(whole, packed))
        return [row[:-1] for row in rows], [loss for row in rows for loss in row[-1]]

    def _laid_out(self, written: bytes, losses: int) -> tuple[torch.Tensor, torch.Tensor, list[Any], list[Any]]:
        """What this worker sends and what comes, as bytes; the same for each replica, as its buffers and its losses."""
        specs = [*self._specs, Spec((losses,), (1,), "float64", 8)]
        places, width = list[int | None](), 0
        for spec, sends in zip(specs, [*written, True], strict=True):
            places.append(width if sends else None)
            width += -(-spec.nbytes // ALIGNED) * ALIGNED * sends
        most = max(map(len, self._blocks))
        packed = torch.zeros(most * width, dtype=torch.uint8, device=self._device)
        whole = torch.zeros(len(self._blocks) * most * width, dtype=torch.uint8, device=self._device)

        def row(flat: torch.Tensor, number: int) -> list[torch.Tensor | None]:
            return [
                None if place is None else _at(flat, number * width + place, spec)
                for place, spec in zip(places, specs, strict=True)
            ]

        numbers = [rank * most + at for rank, block in enumerate(self._blocks) for at in range(len(block))]
        mine = [row(packed, number) for number in range(len(self._blocks[self._rank]))]
        return packed, whole, mine, [row(whole, number) for number in numbers]


def _at(flat: torch.Tensor, offset: int, spec: Spec) -> torch.Tensor:
    """A tensor in the memory of a flat one, ``offset`` bytes from its start."""
    dtype = getattr(torch, spec.dtype)
    home = torch.empty(0, dtype=dtype, device=flat.device)
    return home.set_(flat.untyped_storage(), offset // dtype.itemsize, spec.shape, spec.strides)
