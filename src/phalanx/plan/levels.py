"""Among whom sums are added up, level by level: workers of a host, hosts of a group, then those of equal position.

Any cut is exact. What a group cannot add up goes on as it is, as nodes of the fold's tree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.plan.fold import Node, covers, remaining
from phalanx.plan.shares import share_bounds

# So many hosts do not send to all others any more. By benchmarks/exchange_model.py --processor 5 two levels are faster
# from 6 hosts on for sums of many pieces, from 20 on for small ones. At 16 they lose nothing.
MANY = 16


class Level(NamedTuple):
    """Workers among which sums are added up: those of a host, of a group of hosts, or of equal position in all groups.

    Attributes
    ----------
    ranks : sequence of int
        Who they are. None where this worker has no part, as it had no slice a level before.
    position : int
        Which of them this worker is.
    adders : int
        So many of them add up: the first ones. A group that is larger than others has one more, which only sends its
        sums, and gets the result.
    whole : bool
        Whether each adds up whole sums, and not a slice of them, so that nothing has to be gathered.
    counts : list of int
        The sums that each of them has.
    sums : list of (Node, list of int)
        Each of their sums: its node of the fold's tree, and of which workers' sums, counted over all, it is made.
    groups : list of list of int
        Which of the sums are added up to each one that is left here.
    """

    ranks: Sequence[int]
    position: int
    adders: int
    whole: bool
    counts: list[int]
    sums: list[tuple[Node, list[int]]]
    groups: list[list[int]]

    @property
    def slices(self) -> int:
        """Into how many slices sums are cut."""
        return 1 if self.whole else self.adders

    @property
    def adds(self) -> bool:
        """Whether this worker adds up anything."""
        return self.position < self.adders


class Unit(NamedTuple):
    """What is added up at a level: a worker at first, then groups.

    Attributes
    ----------
    block : range
        Its replicas.
    owners : list of int
        Workers that have a slice of its sums each.
    sums : list of (Node, list of int)
        As those of a level.
    """

    block: range
    owners: list[int]
    sums: list[tuple[Node, list[int]]]


def levels(
    replicas: int, blocks: Sequence[range], rank: int, groups: Sequence[int] = (1,), *, at_once: bool = False
) -> list[Level]:
    """Among whom a worker exchanges sums, in order.

    ``groups``: into how many groups workers are cut, and these into at the next level, one after another; the last is
    1. Any cut is exact, as nodes of the fold's tree that a group cannot add up go on as they are.
    ``at_once``: two with one sum each send it whole, at the last level, in one round, which is as much traffic.
    """
    found, numbers = list[Level](), itertools.count()
    units = [
        Unit(block, [worker], [(node, [next(numbers)]) for node in remaining(replicas, block)])
        for worker, block in enumerate(blocks)
    ]
    for count in groups:
        whole = at_once and count == 1 and [len(unit.sums) for unit in units] == [1, 1]
        cut = [units[begin:end] for begin, end in share_bounds(len(units), count)]
        adders, units = min(map(len, cut)), list[Unit]()
        mine = Level((), 0, adders, whole, [], [], [])
        for group in cut:
            block = range(group[0].block.start, group[-1].block.stop)
            counts, sums = [len(unit.sums) for unit in group], [each for unit in group for each in unit.sums]
            tops = remaining(replicas, block)
            below = [[at for at, (node, _) in enumerate(sums) if covers(top, node)] for top in tops]
            for ranks in zip(*(unit.owners for unit in group), strict=True):
                if rank in ranks:
                    mine = Level(ranks, ranks.index(rank), adders, whole, counts, sums, below)
            made_of = [[number for at in of for number in sums[at][1]] for of in below]
            owners = [owner for unit in group[:adders] for owner in unit.owners]
            units.append(Unit(block, owners, list(zip(tops, made_of, strict=True))))
        found.append(mine)
    return found


def grouped(count: int) -> tuple[int, ...]:
    """Into how many groups so many hosts are cut, which add up among them first; ``(1,)``: they are few.

    The number decides alone, so all take it alike. Groups are about as many as each has members, of which a power of 2
    is best, as a branch of the tree leaves one sum. Where groups cannot be equal, some have a member more, which costs
    bytes: 1 / members of a group. So there are half as many.
    """
    root = math.isqrt(count)
    even = [groups for groups in range(root // 2 + 1, root + 1) if count % groups == 0]
    if count < (MANY if even else 2 * MANY):
        return (1,)
    return max(even, key=lambda groups: ((count // groups).bit_count() == 1, groups), default=(root + 1) // 2), 1
