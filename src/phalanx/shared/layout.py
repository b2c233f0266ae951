"""Where everything lies in the arena of a run, one stretch of shared memory: the same in every process.

It follows from the model and the placement alone. Only offsets; no memory is touched here, and no framework is known:
what an array looks like is said in a ``Spec``. Weights are placed as whole storages, not array by array, so that
strides and shared memory (ties, views, flattened weights) stay as they are.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.plan.fold import Placement, dealt, most_held, remaining
from phalanx.seams import Sharing
from phalanx.shared.counters import NOTE, RING, Counters, float_count, word_count
from phalanx.shared.memory import Carver

Take = Callable[[int], int]

SHARED = -1  # the parameter of optimizer state that belongs to none: every worker keeps a copy of its own
WORD = 8  # bytes
OWNED = -1  # the offset of what a worker keeps to itself, because it owns the parameter


class Spec(NamedTuple):
    """What an array looks like.

    Attributes
    ----------
    shape : tuple of int
    strides : tuple of int
        In elements.
    dtype : str
        The framework's own name of it.
    itemsize : int
        Bytes of an element.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense array."""
        return self.elements * self.itemsize


class StatePiece(NamedTuple):
    """An array of the optimizer's state.

    Attributes
    ----------
    parameter : int
        Whose it is; SHARED if it belongs to no single parameter.
    name : str
        What the framework finds it by, among those of the parameter.
    spec : Spec
    """

    parameter: int
    name: str
    spec: Spec


@dataclass(frozen=True)
class Contents:
    """What the state of a run consists of.

    Attributes
    ----------
    gradients, buffers : list of Spec
        What the gradient of each parameter looks like, and each buffer.
    storages : list of int
        Bytes of the memory in which parameters lie; parameters that share memory have one storage.
    storage_of : list of int
        The storage of each parameter.
    state : list of StatePiece
        All pieces that optimizer state may have; some are made in a later step, or never.
    frozen : list of int
        Storages that no update writes, as far as can be told when the run begins.
    private : int
        Bytes that workers take beside the arena, about.
    """

    gradients: list[Spec]
    buffers: list[Spec]
    storages: list[int]
    storage_of: list[int]
    state: list[StatePiece]
    frozen: list[int] = field(default_factory=list)
    private: int = 0

    def owners(self, workers: int) -> list[int]:
        """The worker that folds and updates each parameter: whole storages are dealt, by size."""
        owners = dealt(self.storages, workers)
        return [owners[storage] for storage in self.storage_of]


class Copies(NamedTuple):
    """Where a snapshot lies: see the attributes of ``Layout`` with these names."""

    weights: list[int]
    starts: list[int]
    state: list[list[int]]
    present: int


@dataclass
class Layout:
    """Offsets into an arena.

    Attributes
    ----------
    contents : Contents
    owners : list of int
        The worker that folds and updates each parameter.
    copies : bool
        Whether workers have copies of the state. Then an owner only writes its part here, when that is asked for.
    weights : list of int
        The parameters' storages.
    keepers : list of int
        The worker that owns what lies in each storage.
    frozen : dict
        Where frozen storages lie, by their number, in a memory of ``base`` bytes beside the arena: each begins a page.
    thawed : int
        8 bytes per storage: the step after the one that first updated it, if it was frozen; else 0.
    starts : list of int
        Each buffer as it is at the step's start.
    sets : list of list of list of int
        ``sets[worker][number][parameter]``: where a replica's gradient or a partial sum is published for the owner of
        the parameter; OWNED where that is the worker itself.
    left : list of list of int
        ``left[replica][buffer]``: buffers as the replica left them.
    changed : int
        One byte per replica and buffer: whether it differs from the step's start.
    norms : int
        8 bytes per parameter: its owner's part of the gradient's norm.
    state : list of list of int
        ``state[worker]``: pieces of optimizer state; all workers have one place for a piece that is not SHARED.
    present : int
        One byte per piece of optimizer state: whether there is one.
    snapshot : Copies
        Copies of weights, buffers and optimizer state, as of a step boundary.
    touched : int
        Bytes that workers will use, about.
    """

    contents: Contents
    owners: list[int]
    copies: bool
    weights: list[int]
    keepers: list[int]
    frozen: dict[int, int]
    base: int
    thawed: int
    starts: list[int]
    sets: list[list[list[int]]]
    left: list[list[int]]
    changed: int
    norms: int
    state: list[list[int]]
    present: int
    snapshot: Copies
    touched: int = 0

    def owned(self, worker: int) -> list[int]:
        """The parameters that a worker folds and updates."""
        return [index for index, owner in enumerate(self.owners) if owner == worker]

    def kept(self, worker: int) -> list[int]:
        """The pieces of optimizer state that a worker keeps: those of the parameters that it owns, and its copies."""
        return [
            number
            for number, piece in enumerate(self.contents.state)
            if piece.parameter == SHARED or self.owners[piece.parameter] == worker
        ]

    def signature(self) -> str:
        """Equal in two processes whose models fit together."""
        return repr((self.contents, self.owners))


def lay_out(contents: Contents, owners: Sequence[int], placement: Placement, take: Take) -> Layout:
    """Give everything its place, handed out by ``take``."""
    keepers = dict(zip(contents.storage_of, owners, strict=True))
    base = Carver(mmap.PAGESIZE)
    buffers = [spec.nbytes for spec in contents.buffers]
    sizes = [spec.nbytes for spec in contents.gradients]
    layout = Layout(
        contents,
        list(owners),
        placement.copies,
        weights=list(map(take, contents.storages)),
        keepers=[keepers[number] for number in range(len(contents.storages))],
        frozen={number: base.take(contents.storages[number]) for number in contents.frozen},
        base=base.size,
        thawed=take(WORD * len(contents.storages)),
        starts=list(map(take, buffers)),
        sets=[
            [
                [OWNED if owner == worker else take(size) for size, owner in zip(sizes, owners, strict=True)]
                for _ in range(0 if placement.copies else most_held(placement.replicas, block))
            ]
            for worker, block in enumerate(placement.blocks)
        ],
        left=[list(map(take, buffers)) for _ in range(placement.replicas)],
        changed=take(placement.replicas * len(buffers)),
        norms=take(WORD * len(sizes)),
        state=_state_rows(contents.state, placement.workers, take),
        present=take(len(contents.state)),
        snapshot=Copies(
            list(map(take, contents.storages)),
            list(map(take, buffers)),
            _state_rows(contents.state, placement.workers, take),
            take(len(contents.state)),
        ),
    )
    layout.touched = take(0) + contents.private - _untouched(layout)
    return layout


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of an array that lies row by row."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _untouched(layout: Layout) -> int:
    """Bytes of the places in the arena for what is frozen: weights and optimizer state with their copies, gradients."""
    contents = layout.contents
    frozen = {index for index, storage in enumerate(contents.storage_of) if storage in layout.frozen}
    twice = [contents.storages[number] for number in contents.frozen]
    twice += [piece.spec.nbytes for piece in contents.state if piece.parameter in frozen]
    rows = [row for rows in layout.sets for row in rows]
    return 2 * sum(twice) + sum(contents.gradients[at].nbytes for row in rows for at in frozen if row[at] != OWNED)


def _state_rows(state: Sequence[StatePiece], workers: int, take: Take) -> list[list[int]]:
    """The offsets of all pieces, for each worker."""
    first = [take(piece.spec.nbytes) for piece in state]
    pairs = list(zip(state, first, strict=True))
    others = [
        [take(piece.spec.nbytes) if piece.parameter == SHARED else offset for piece, offset in pairs]
        for _ in range(1, workers)
    ]
    return [first, *others]


class ArenaPlan:
    """Where everything lies, for one placement of one model.

    Parameters
    ----------
    sharing : Sharing
    placement : Placement
    known : Contents, optional
        Of the caller's process, which found out what the state consists of.

    Attributes
    ----------
    layout : Any
        The framework's part.
    nodes : list of (level, index)
        All partial sums that workers publish, in replica order.
    publishers : list of int
        Who publishes each of them.
    size : int
        Bytes of the arena; most of it is never touched.
    """

    def __init__(self, sharing: Sharing, placement: Placement, known: Contents | None = None) -> None:
        carver = Carver()
        self._placement = placement
        self._words = carver.take(WORD * word_count(placement.workers))
        self._floats = carver.take(WORD * float_count(placement.workers, placement.replicas))
        self.nodes: list[tuple[int, int]] = []
        self.publishers: list[int] = []
        for worker in placement.order:
            nodes = remaining(placement.replicas, placement.blocks[worker])
            self.nodes += nodes
            self.publishers += [worker] * len(nodes)
        self.layout = sharing.lay_out(placement, carver.take, known)
        self.layout.touched -= NOTE * (placement.replicas + RING)  # of named losses, which few recipes have
        self._flag_bytes = (1 + len(self.layout.owners)) * len(self.nodes)
        self._flags = carver.take(self._flag_bytes)
        self.size = carver.size

    def counters(self, arena: mmap.mmap, role: int) -> Counters:
        """The counters in a mapped arena, as the process with this role is to use them: ``PARENT``, or a worker."""
        workers, replicas = self._placement.workers, self._placement.replicas
        words = memoryview(arena)[self._words :][: WORD * word_count(workers)].cast("q")
        floats = memoryview(arena)[self._floats :][: WORD * float_count(workers, replicas)].cast("d")
        return Counters(words, floats, workers, replicas, role)

    def flags(self, arena: mmap.mmap) -> memoryview:
        """Per partial sum: which vector of its publisher holds it (0: none, else counted from 1), and its entries."""
        return memoryview(arena)[self._flags :][: self._flag_bytes]
