"""Placement: which worker hosts which replicas, and what follows from it for the fold. Pure arithmetic.

A worker hosts a contiguous block, folds what lies whole inside it, and hands over the partial sums that remain. Where
the blocks are cut moves work and bytes, never bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.plan.fold import Fold, Partial
from phalanx.plan.shares import share_bounds

Node = tuple[int, int]  # (level, index) in the fold's tree


@dataclass(frozen=True)
class Placement:
    """Blocks of replicas, one per worker, that together cover all R once, or one host's part of them.

    Attributes
    ----------
    replicas : int
        R.
    blocks : tuple of range
        The replicas of each worker; in any order among the workers, none of them empty.
    """

    replicas: int
    blocks: tuple[range, ...]

    @property
    def workers(self) -> int:
        """W."""
        return len(self.blocks)

    @property
    def whole(self) -> bool:
        """Whether all replicas are placed; of several hosts, each has a part."""
        return sum(map(len, self.blocks)) == self.replicas

    @property
    def order(self) -> list[int]:
        """Workers by the replicas that they host: the order in which their partial sums are merged."""
        return sorted(range(self.workers), key=lambda worker: self.blocks[worker].start)


def place(replicas: int, workers: int) -> Placement:
    """Deal R replicas to W workers, 1 <= W <= R, in blocks as ``numpy.array_split`` cuts them."""
    return Placement(replicas, tuple(range(start, end) for start, end in share_bounds(replicas, workers)))


def remaining(replicas: int, block: range) -> list[Node]:
    """The nodes of the fold's tree that a block folds into: what its worker hands over, in replica order."""
    fold: Fold[int] = Fold(replicas, lambda left, _: left)
    for replica in block:
        fold.push(replica, replica)
    return [(partial.level, partial.index) for partial in fold.partials()]


def covers(top: Node, node: Node) -> bool:
    """Whether a node of the fold's tree lies below another, or is that one."""
    return node[0] <= top[0] and node[1] >> (top[0] - node[0]) == top[1]


def most_held(replicas: int, block: range) -> int:
    """How many values a worker holds at most while it folds its block, the one that just came included."""
    fold: Fold[int] = Fold(replicas, lambda left, _: left)
    most = 0
    for replica in block:
        most = max(most, len(fold.partials()) + 1)
        fold.push(replica, replica)
    return most


def dealt(sizes: Sequence[int], workers: int) -> list[int]:
    """An owner for each of these sizes: the largest first, each to the worker that has least so far."""
    load = [0] * workers
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = min(range(workers), key=load.__getitem__)
        load[owners[number]] += sizes[number] + 1
    return owners


def additions(replicas: int, nodes: Sequence[Node], present: Iterable[int]) -> list[tuple[int, int]]:
    """The additions that fold partial sums, in order, as (into, from) positions in ``nodes``.

    Parameters
    ----------
    replicas : int
        R.
    nodes : sequence of (level, index)
        All partial sums, in replica order.
    present : iterable of int
        Positions whose value is there; the others are skipped. The total ends up in the first of them.
    """
    done, fold = _added(replicas, nodes, present)
    fold.total()
    return done


def added(replicas: int, nodes: Sequence[Node], present: Iterable[int]) -> list[tuple[int, int]]:
    """The same for nodes that need not cover all replicas: what can be added among them."""
    return _added(replicas, nodes, present)[0]


def hosts(replicas: int, count: int, workers: int) -> tuple[tuple[range, ...], tuple[Placement, ...]]:
    """The block of each of ``count`` hosts, and how its ``workers`` share that."""
    blocks = tuple(range(start, end) for start, end in share_bounds(replicas, count))
    placements = tuple(
        Placement(
            replicas, tuple(range(block.start + a, block.start + b) for a, b in share_bounds(len(block), workers))
        )
        for block in blocks
    )
    return blocks, placements


def _added(replicas: int, nodes: Sequence[Node], present: Iterable[int]) -> tuple[list[tuple[int, int]], Fold[int]]:
    there = set(present)
    done: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        done.append((left, right))
        return left

    fold: Fold[int] = Fold(replicas, add)
    fold.merge(
        Partial(level, index, position if position in there else None) for position, (level, index) in enumerate(nodes)
    )
    return done, fold
