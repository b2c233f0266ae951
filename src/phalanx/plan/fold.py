"""The fold: R values added in one fixed order, whoever adds them and whenever they arrive; and who hosts which of them.

The order is pairwise by stride doubling: ``(0,1) (2,3) ..``, then ``(0,2) (4,6) ..``, and so on. The replica
count alone decides it. It is a binary tree over ``0 .. R-1``: the node at ``level`` and ``index`` covers
replicas ``index << level`` up to ``(index + 1) << level``, cut at R. Whoever holds both children of a node
adds them, left + right; so any contiguous block of replicas folds what lies whole inside it, hands over the
few partial sums that remain, and the final bits do not depend on where the blocks were cut.

An absent value (None) is skipped, not added as zero: ``x + nothing = x`` (adding +0 would turn -0 into +0).

A worker hosts such a block. Where the blocks are cut moves work and bytes, never bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from phalanx.plan.shares import share_bounds

T = TypeVar("T")
Node = tuple[int, int]  # (level, index) in the fold's tree


@dataclass(slots=True)
class Partial(Generic[T]):
    """The sum over one node of the tree; ``value`` is None where every replica below it was absent."""

    level: int
    index: int
    value: T | None


class Fold(Generic[T]):
    """Adds values as they come, in replica order, keeping about ``log2 R`` partial sums.

    Parameters
    ----------
    replicas : int
        R, at least 1.
    add : callable
        ``add(left, right) -> sum``. It may write into ``left`` only when ``left`` is itself a sum.
    """

    def __init__(self, replicas: int, add: Callable[[T, T], T]) -> None:
        self._replicas = replicas
        self._add = add
        self._stack: list[Partial[T]] = []

    def push(self, replica: int, value: T | None) -> None:
        """Add one replica's value (None: absent). Each replica is pushed once, in ascending order."""
        self._push(0, replica, value)

    def merge(self, partials: Iterable[Partial[T]]) -> None:
        """Add the partial sums of the block of replicas that follows the ones seen so far."""
        for partial in partials:
            self._push(partial.level, partial.index, partial.value)

    def partials(self) -> list[Partial[T]]:
        """The partial sums that remain, in replica order: what a block hands over."""
        return list(self._stack)

    def total(self) -> T | None:
        """The sum over all R replicas; None if all were absent."""
        if len(self._stack) != 1 or self._stack[0].index != 0 or 1 << self._stack[0].level < self._replicas:
            raise ValueError(f"fold over {self._replicas} replicas is not complete: {self._stack}")
        return self._stack[0].value

    def _push(self, level: int, index: int, value: T | None) -> None:
        stack = self._stack
        if index << level >= self._replicas:
            raise ValueError(f"replica {index << level} was pushed into a fold over {self._replicas}")
        if stack and (stack[-1].index + 1) << stack[-1].level != index << level:
            raise ValueError(f"replica {index << level} was pushed out of order")
        while 1 << level < self._replicas:
            if index % 2 == 0:
                if (index + 1) << level < self._replicas:
                    break  # the right sibling is still to come
            elif stack and stack[-1].level == level:
                left = stack.pop().value
                value = left if value is None else value if left is None else self._add(left, value)
            else:
                break  # the left sibling belongs to an earlier block
            level, index = level + 1, index // 2
        stack.append(Partial(level, index, value))


def fold_values(values: Sequence[T | None], add: Callable[[T, T], T]) -> T | None:
    """Fold values that are all at hand: the definition itself, stride by stride; None if all are absent."""
    folded = list(values)
    stride = 1
    while stride < len(folded):
        for left in range(0, len(folded) - stride, 2 * stride):
            mine, other = folded[left], folded[left + stride]
            folded[left] = other if mine is None else mine if other is None else add(mine, other)
        stride *= 2
    return folded[0]


def fold_mean(
    weighted: Sequence[Any], weights: Sequence[float], add: Callable[[Any, Any], Any], number: Any = float
) -> Any:
    """The sum of values times their weights, over the sum of the weights as a ``number``."""
    return fold_values(weighted, add) / number(fold_values(weights, operator.add))


@dataclass(frozen=True)
class Placement:
    """Blocks of replicas, one per worker, that together cover all R once, or one host's part of them.

    Attributes
    ----------
    replicas : int
        R.
    blocks : tuple of range
        The replicas of each worker; in any order among the workers, none of them empty.
    copies : bool
        Whether each worker has the whole state, on a device of its own, and updates all of it.
    """

    replicas: int
    blocks: tuple[range, ...]
    copies: bool = False

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


def place(replicas: int, workers: int, *, copies: bool = False) -> Placement:
    """Deal R replicas to W workers, 1 <= W <= R, in blocks as ``numpy.array_split`` cuts them."""
    return Placement(replicas, tuple(range(start, end) for start, end in share_bounds(replicas, workers)), copies)


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


def added(replicas: int, nodes: Sequence[Node], present: Iterable[int]) -> list[tuple[int, int]]:
    """The additions that fold partial sums as far as they can be, in order, as (into, from) positions in ``nodes``.

    Parameters
    ----------
    replicas : int
        R.
    nodes : sequence of (level, index)
        Partial sums, in replica order.
    present : iterable of int
        Positions whose value is there; the others are skipped. The total ends up in the first of them.
    """
    there = set(present)
    done: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        done.append((left, right))
        return left

    fold: Fold[int] = Fold(replicas, add)
    fold.merge(
        Partial(level, index, position if position in there else None) for position, (level, index) in enumerate(nodes)
    )
    return done


def hosts(replicas: int, count: int, workers: int) -> tuple[tuple[range, ...], tuple[Placement, ...]]:
    """The block of each of ``count`` hosts, and how its ``workers`` share that."""
    blocks = place(replicas, count).blocks
    return blocks, tuple(
        Placement(replicas, tuple(block[a:b] for a, b in share_bounds(len(block), workers))) for block in blocks
    )
