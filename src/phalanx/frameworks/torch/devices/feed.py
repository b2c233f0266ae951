"""Batches for a device: read and copied there while it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.definition.batches import as_batch
from phalanx.definition.data import Share, map_tree
from phalanx.frameworks.torch.replica.feed import Feed
from phalanx.seams.records import Todo
from phalanx.surroundings import interrupts


class DeviceFeed:
    """Reads batches for one device, also ahead of time.

    Parameters
    ----------
    host : Feed
        Reads them.
    device : torch.device
    ahead : bool
        Whether batches may be collated ahead of time. User code that collates may draw random numbers, and those come
        before the ones of forward.
    """

    def __init__(self, host: Feed, device: torch.device, *, ahead: bool) -> None:
        self._host = host
        self._device = device
        self._accelerated = device.type != "cpu"
        self._may_read_ahead = ahead
        self._ready: dict[tuple[int, str], Any] = {}  # batches of the next step, by key and origin
        self._sources: list[torch.Tensor] = []  # pinned memory that copies of this step and the next may still read
        self._older: list[torch.Tensor] = []
        self._pins = self._accelerated and can_pin()

    def batch(self, key: int | None, share: Share) -> Any:
        """See ``Feed.batch``; on the device."""
        if key is None or (key, share.origin) not in self._ready:
            return self._copied(self._host.batch(key, share))
        self._host.settle()
        self._host.seed(key)
        return self._ready.pop((key, share.origin))

    def read_ahead(self, todo: Todo) -> None:
        """Read the batch of a replica of the next step, and begin to copy it to the device.

        What user code raises here it will raise again in its own step, where it gets its address.
        """
        address = todo.key, todo.share.origin
        if self._may_read_ahead and address not in self._ready:
            with contextlib.suppress(Exception), interrupts.user_code():
                samples = todo.share.read(todo.share.samples)
                self._ready[address] = self._copied(as_batch(samples, todo.share, self._host.collate))

    def begin(self, todo: Sequence[Todo]) -> None:
        """Another step: the host has waited for all that was begun before the last one.

        What was read ahead for other batches than those of ``todo`` is not asked for any more.
        """
        wanted = {(item.key, item.share.origin) for item in todo}
        self._ready = {address: batch for address, batch in self._ready.items() if address in wanted}
        self._older, self._sources = self._sources, []

    def forget(self) -> None:
        """Nothing that was read ahead will be asked for."""
        self._ready.clear()

    def _copied(self, batch: Any) -> Any:
        return map_tree(self._to_device, batch) if self._accelerated else batch

    def _to_device(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self._pins and leaf.device.type == "cpu":
            leaf = leaf.pin_memory()
            self._sources.append(leaf)
        return leaf.to(self._device, non_blocking=self._pins)


def can_pin() -> bool:
    """Whether torch has pinned memory here."""
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:
        return False
    return True
