"""What replicas are fed with: data as torch reads it, and batches, with the random generators that go with them.

Batches for a device are read and copied there while it computes.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate as default_collate

from phalanx.definition import generators
from phalanx.definition.data import Columns, Samples, Share, Source, map_tree
from phalanx.definition.fields import Definition
from phalanx.frameworks.torch.accelerators import can_pin
from phalanx.frameworks.torch.environment import StaticShapes
from phalanx.plan.orders import Indices
from phalanx.seams.records import Todo
from phalanx.shared.layout import row_major
from phalanx.surroundings import interrupts

SELECTED = (  # dtypes of which index_select has rows of any shape
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


class Feed:
    """Reads batches for a model on the CPU.

    Parameters
    ----------
    definition : Definition
    model : torch.nn.Module
        Its generators are seeded, too.
    shapes : StaticShapes
    """

    def __init__(self, definition: Definition, model: torch.nn.Module, shapes: StaticShapes) -> None:
        self.collate = definition.collate_fn or default_collate
        self.collates = definition.collate_fn is None  # batches are made here, and nobody else writes them
        self.settle = shapes.settle  # what is compiled from here on is compiled for the sizes at hand
        self._owned = definition.generators
        self._models = generators.find({"model": model})

    def batch(self, key: int | None, share: Share) -> Any:
        """A share's samples, with all generators seeded for what follows; None: they go on from where they are."""
        self.settle()
        if key is not None:
            samples = share.read()
            self.seed(key)
        else:
            with generators.kept(self._owned):  # reading seeds them, here or where it was read ahead
                samples = share.read()
        return share.batch(samples, self.collate)

    def seed(self, key: int) -> None:
        """Seed every generator that user code may draw from."""
        generators.seed(key, self._owned)
        if self._models:
            generators.reseed(self._models, key)

    def remembered(self) -> list[Callable[[], Any]]:
        """Functions that put every generator that user code may draw from back into the state that it has now."""
        return generators.remembered({**(self._owned or {}), **self._models})


class DeviceFeed:
    """Reads batches for one device, also ahead of time.

    Parameters
    ----------
    host : Feed
        Reads them; any object with its methods will do.
    device : torch.device
    ahead : bool
        Whether batches may be collated ahead of time. User code that collates may draw random numbers, and those come
        before the ones of forward.
    """

    def __init__(self, host: Any, device: torch.device, *, ahead: bool) -> None:
        self._host = host
        self._device = device
        self._accelerated = device.type != "cpu"
        self._may_read_ahead = ahead
        self._ready: dict[tuple[int, str], Any] = {}  # batches of the next step, by key and origin
        self._sources: list[torch.Tensor] = []  # pinned memory that copies of this step and the next may still read
        self._older: list[torch.Tensor] = []
        self._pins = self._accelerated and can_pin()
        self._collates = getattr(host, "collates", True)

    def measured(self, key: int, share: Share) -> Any:
        """A chunk of an evaluation; without pinned memory, of which nobody would know when it may be given back."""
        return self._copied(self._host.batch(key, share), pins=False)

    def batch(self, key: int | None, share: Share) -> Any:
        """A share's samples on the device, as ``Feed.batch`` has them on the host."""
        if key is None or (key, share.origin) not in self._ready:
            return self._copied(self._host.batch(key, share))
        self._host.settle()
        self._host.seed(key)
        return self._ready.pop((key, share.origin))

    def read_ahead(self, todo: Todo) -> None:
        """Read the batch of a replica of the next step, and begin to copy it to the device.

        An error of user code is ignored here: it is raised again in the batch's own step, with its address.
        """
        address = todo.key, todo.share.origin
        if self._may_read_ahead and address not in self._ready:
            with contextlib.suppress(Exception), interrupts.user_code():
                samples = todo.share.read()
                self._ready[address] = self._copied(todo.share.batch(samples, self._host.collate))

    def begin(self, todo: Sequence[Todo]) -> None:
        """Begin another step: the host has waited for all that was begun before the last one.

        Batches that were read ahead, but are not of ``todo``, are dropped.
        """
        wanted = {(item.key, item.share.origin) for item in todo}
        self._ready = {address: batch for address, batch in self._ready.items() if address in wanted}
        self._older, self._sources = self._sources, []

    def forget(self) -> None:
        """Drop all that was read ahead."""
        self._ready.clear()

    def _copied(self, batch: Any, *, pins: bool = True) -> Any:
        if not self._accelerated:
            return batch
        return map_tree(functools.partial(self._to_device, pins=pins), batch, PackedSequence)

    def _to_device(self, leaf: Any, *, pins: bool = True) -> Any:
        if isinstance(leaf, PackedSequence):  # whose sizes stay on the host
            packed: Any = leaf
            return packed.to(self._device)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        pins = pins and self._pins and leaf.device.type == "cpu"
        if pins and leaf.is_pinned() and not self._collates:  # user code may write there again at once
            pins = False
        if pins:
            leaf = (leaf.contiguous() if 0 in leaf.stride() else leaf).pin_memory()  # itself, if it is already
            self._sources.append(leaf)
        return leaf.to(self._device, non_blocking=pins)


def opened(source: Source, *, pins: bool = False) -> Source:
    """A source whose columns are tensors, in the same memory where that can be; ``pins``: its rows are for a device."""
    if isinstance(source, Samples):
        return source
    columns = tuple(map(_column, source.arrays))
    return Columns(columns, source.rebuild, functools.partial(_rows, tuple(map(_selectable, columns)), pins))


def _rows(
    selectable: Sequence[bool], pins: bool, columns: Sequence[torch.Tensor], indices: Indices
) -> list[torch.Tensor]:
    """Rows of each column, with the strides that indexing gives; ``index_select`` takes a third of the time."""
    rows = torch.from_numpy(indices)
    pairs = zip(selectable, columns, strict=True)
    select = _pinned if pins else torch.index_select
    return [select(column, 0, rows) if selected else column[rows] for selected, column in pairs]


def _pinned(column: torch.Tensor, axis: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a column, in pinned memory at once: they are not copied there afterwards."""
    home = torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype, device="cpu", pin_memory=True)
    return torch.index_select(column, axis, rows, out=home)


def _selectable(column: torch.Tensor) -> bool:
    """Whether ``index_select`` does what indexing does: for a plain tensor in host memory, laid out row by row.

    Indexing keeps the order of other strides, also those of axes of length 1, and knows more dtypes.
    """
    mere = type(column) is torch.Tensor and column.layout == torch.strided and not column.requires_grad
    known = mere and column.device.type == "cpu" and column.dtype in SELECTED
    return known and column.stride() == row_major(tuple(column.shape))


def _column(array: Any) -> torch.Tensor:
    """A column as a tensor over the same memory, read-only arrays and memory maps too: columns are never written.

    torch has no negative or odd strides, as reversed views and fields of records have: those are copied.
    """
    if isinstance(array, torch.Tensor):
        return array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            return torch.from_numpy(np.asarray(array))
        except ValueError:
            return torch.from_numpy(np.array(array))
