"""Where everything of a torch run lies in an arena: the same in every process, as it follows from model and placement.

Only offsets; no memory is touched here. Whole storages are placed, not tensors, so that strides and shared memory
(ties, views, flattened weights) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from phalanx.plan.placement import Placement, dealt, most_held

Take = Callable[[int], int]
Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

ROOM_FACTOR = 8  # optimizers keep up to three states of up to twice the parameter's bytes; unused pages cost nothing
ROOM_BYTES = 4096
STATES = 2  # what memory is checked for: Adam's
OWNED = -1


@dataclass
class Layout:
    """Offsets into an arena.

    Attributes
    ----------
    owners : list of int
        The worker that folds and updates each parameter.
    gradients, buffers : list of (shape, strides, dtype)
        What gradients of each parameter, and buffers, look like.
    storages : list of (address, bytes, offset)
        The parameters' storages; the address is that in this process.
    keepers : list of int
        The worker that owns what lies in each storage.
    starts : list of int
        Each buffer as it is at the step's start.
    sets : list of list of list of int
        ``sets[worker][number][parameter]``: where a replica's gradient or a partial sum is published; OWNED where the
        worker keeps it to itself, because it owns the parameter.
    left : list of list of int
        ``left[replica][buffer]``: buffers as the replica left them.
    changed : int
        One byte per replica and buffer: whether it differs from the step's start.
    norms : int
        One norm per parameter.
    rooms : list of (offset, bytes)
        Each parameter's optimizer state.
    snapshot : (list of int, list of int, list of int)
        Offsets of copies, as of a step boundary: of the storages, the buffers' starts, the rooms.
    touched : int
        Bytes that will really be used, about.
    """

    owners: list[int]
    gradients: list[Spec]
    buffers: list[Spec]
    storages: list[tuple[int, int, int]] = field(init=False)
    keepers: list[int] = field(init=False)
    starts: list[int] = field(init=False)
    sets: list[list[list[int]]] = field(init=False)
    left: list[list[int]] = field(init=False)
    changed: int = field(init=False)
    norms: int = field(init=False)
    rooms: list[tuple[int, int]] = field(init=False)
    snapshot: tuple[list[int], list[int], list[int]] = field(init=False)
    touched: int = field(init=False)

    def owned(self, worker: int) -> list[int]:
        """The parameters that a worker folds and updates."""
        return [index for index, owner in enumerate(self.owners) if owner == worker]

    def signature(self) -> str:
        """Equal in two processes whose models fit together."""
        return repr((self.gradients, self.buffers, [size for _, size, _ in self.storages], self.owners))


def lay_out(
    parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], placement: Placement, whole: bool, take: Take
) -> Layout:
    """Give everything its place, handed out by ``take``. ``whole``: the first worker owns all parameters."""
    owners = [0] * len(parameters) if whole else owners_of(parameters, placement.workers)
    layout = Layout(owners, [_dense_spec(item) for item in parameters], [_dense_spec(item) for item in buffers])
    layout.storages = [(address, size, take(size)) for address, size in _storages(parameters).items()]
    keepers = {item.untyped_storage().data_ptr(): owner for item, owner in zip(parameters, owners, strict=True)}
    layout.keepers = [keepers[address] for address, _, _ in layout.storages]
    layout.starts = [take(bytes_in(spec)) for spec in layout.buffers]
    sizes = [bytes_in(spec) for spec in layout.gradients]
    layout.sets = [
        [
            [OWNED if owner == worker else take(size) for size, owner in zip(sizes, owners, strict=True)]
            for _ in range(most_held(placement.replicas, block))
        ]
        for worker, block in enumerate(placement.blocks)
    ]
    layout.left = [[take(bytes_in(spec)) for spec in layout.buffers] for _ in range(placement.replicas)]
    layout.changed = take(placement.replicas * len(layout.buffers))
    layout.norms = take(8 * len(parameters))
    layout.touched = take(0) + (2 * STATES + 2) * sum(sizes)
    rooms = [ROOM_FACTOR * size + ROOM_BYTES for size in sizes]
    layout.rooms = [(take(room), room) for room in rooms]
    layout.snapshot = (
        [take(size) for _, size, _ in layout.storages],
        [take(bytes_in(spec)) for spec in layout.buffers],
        [take(room) for room in rooms],
    )
    return layout


def owners_of(parameters: Sequence[torch.Tensor], workers: int) -> list[int]:
    """Deal whole storages to workers."""
    sizes = _storages(parameters)
    owner = dict(zip(sizes, dealt(list(sizes.values()), workers), strict=True))
    return [owner[parameter.untyped_storage().data_ptr()] for parameter in parameters]


def bytes_in(spec: Spec) -> int:
    """Bytes of a dense tensor."""
    shape, _, dtype = spec
    return torch.Size(shape).numel() * dtype.itemsize


def _storages(parameters: Sequence[torch.Tensor]) -> dict[int, int]:
    """Bytes of every storage, by address; in the order of the parameters."""
    return {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in parameters}


def _dense_spec(tensor: torch.Tensor) -> Spec:
    """Shape, strides and dtype that autograd gives a gradient: the tensor's own if it is dense, else row by row."""
    steps = [(length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if sum(steps) + 1 == tensor.numel():
        return tuple(tensor.shape), tensor.stride(), tensor.dtype
    return tuple(tensor.shape), torch.empty(tensor.shape, device="meta").stride(), tensor.dtype
