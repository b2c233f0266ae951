"""Placement: wherever the blocks are cut and whoever hosts them, folding them and then what remains is the one fold."""

import functools
import itertools
import math
import random

import numpy as np
import pytest

from phalanx.plan.fold import Fold, Placement, added, fold_values, most_held, place, remaining

MOST = 8
ADVERSARIAL = (1e16, 1.0, -1e16, 3.0, -1.0, 0.3, 2.0**-60, -0.0)


def blocks_of(replicas):
    """Every way to cut so many replicas into contiguous blocks."""
    for cuts in itertools.product((False, True), repeat=replicas - 1):
        edges = [0, *(place for place, cut in enumerate(cuts, 1) if cut), replicas]
        yield [range(start, end) for start, end in itertools.pairwise(edges)]


def subsets(replicas):
    return itertools.product((True, False), repeat=replicas)


def bracket(left, right):
    return f"({left}+{right})"


def both(left, right):
    """Adds numbers, and spells the additions beside them."""
    return left[0] + right[0], bracket(left[1], right[1])


def bits(pair):
    return None if pair is None else (pair[0].hex(), pair[1])


def tree(replicas, level, index, values):
    """The sum over one node, written from the top down: that of its left half, then that of its right half."""
    start = index << level
    if start >= replicas:
        return None
    if level == 0:
        return values[index]
    left, right = (tree(replicas, level - 1, 2 * index + side, values) for side in (0, 1))
    if left is None or right is None:
        return right if left is None else left
    return both(left, right)


def top(replicas):
    return math.ceil(math.log2(replicas))


def handed_over(replicas, blocks, values, add):
    """All partial sums of all blocks with their nodes, each block folded by itself."""
    nodes, sums = [], []
    for block in blocks:
        fold = Fold(replicas, add)
        for replica in block:
            fold.push(replica, values[replica])
        sums += [partial.value for partial in fold.partials()]
        assert [(partial.level, partial.index) for partial in fold.partials()] == remaining(replicas, block)
        nodes += remaining(replicas, block)
    return nodes, sums


def in_blocks(replicas, blocks, values, add=both, order=added):
    """Blocks folded one by one, then the additions over what they handed over; None if all is absent."""
    nodes, sums = handed_over(replicas, blocks, values, add)
    present = [position for position, value in enumerate(sums) if value is not None]
    for into, source in order(replicas, nodes, present):
        sums[into] = add(sums[into], sums[source])
    return sums[present[0]] if present else None


def span(replicas, node):
    """The replicas below a node."""
    level, index = node
    return range(index << level, min((index + 1) << level, replicas))


@pytest.mark.cases(4)
@pytest.mark.parametrize("replicas", range(1, MOST + 1))
def test_any_blocks_and_any_absences_give_the_one_fold(replicas):
    """Numbers whose sum depends on the order, and the spelled order itself, come out alike for every cut."""
    cuts = list(blocks_of(replicas))
    assert len(cuts) == 2 ** (replicas - 1)
    for there in subsets(replicas):
        values = [(ADVERSARIAL[r], str(r)) if here else None for r, here in enumerate(there)]
        expected = bits(fold_values(values, both))
        assert expected == bits(tree(replicas, top(replicas), 0, values))
        for blocks in cuts:
            assert bits(in_blocks(replicas, blocks, values)) == expected, (blocks, there)


@pytest.mark.cases(4)
@pytest.mark.parametrize("replicas", [9, 11, 13, 16, 17, 31, 32, 33, 64, 100])
def test_many_replicas_in_random_blocks(replicas):
    """The same for counts that are too large to try everything."""
    draw = random.Random(replicas)
    for _ in range(200):
        edges = sorted(draw.sample(range(1, replicas), draw.randrange(replicas)))
        blocks = [range(start, end) for start, end in itertools.pairwise([0, *edges, replicas])]
        values = [
            (draw.gauss(0, 10 ** draw.randrange(9)), str(r)) if draw.random() < 0.8 else None for r in range(replicas)
        ]
        assert bits(in_blocks(replicas, blocks, values)) == bits(fold_values(values, both))


def test_these_numbers_show_the_order():
    """Added from left to right instead, or with zeros for what is absent, the same numbers give another sum."""
    values = [(number, "") for number in ADVERSARIAL]
    for replicas in (4, 5, 6, 7, 8):
        straight = functools.reduce(both, values[:replicas])
        assert straight[0] != fold_values(values[:replicas], both)[0]
    assert fold_values([-0.0, None], float.__add__).hex() != fold_values([-0.0, 0.0], float.__add__).hex()


def straight(replicas, nodes, present):
    """The fault: partial sums are added as they stand, from left to right."""
    first, *others = present
    return [(first, other) for other in others]


def test_a_wrong_order_of_additions_is_seen():
    """Additions from left to right are told from the right ones, in symbols and in numbers, for R of 4 and more."""
    for replicas in range(1, MOST + 1):
        values = [(number, str(r)) for r, number in enumerate(ADVERSARIAL[:replicas])]
        singles = [range(r, r + 1) for r in range(replicas)]
        right, wrong = (bits(in_blocks(replicas, singles, values, order=order)) for order in (added, straight))
        assert (right == wrong) is (replicas < 4)
        assert replicas < 4 or right[0] != wrong[0]


@pytest.mark.parametrize("replicas", range(1, MOST + 1))
def test_additions_use_up_everything_but_the_first(replicas):
    """Every position that is there but the first is added somewhere, once, and never looked at again."""
    for blocks in blocks_of(replicas):
        nodes = [node for block in blocks for node in remaining(replicas, block)]
        for there in subsets(len(nodes)):
            present = [position for position, here in enumerate(there) if here]
            used = set()
            for into, source in added(replicas, nodes, present):
                assert into < source
                assert {into, source} <= set(present) - used
                used.add(source)
            assert used == set(present[1:])


@pytest.mark.parametrize("replicas", range(1, 18))
def test_a_block_hands_over_the_largest_whole_nodes(replicas):
    """What remains covers the block once, in order; no two of it are a whole node together; it is little."""
    for start in range(replicas):
        for end in range(start + 1, replicas + 1):
            nodes = remaining(replicas, range(start, end))
            assert [r for node in nodes for r in span(replicas, node)] == list(range(start, end))
            assert len(nodes) <= max(1, 2 * math.log2(replicas))
            for level, index in nodes:
                whole = span(replicas, (level + 1, index // 2))
                assert level == top(replicas) or whole.start < start or whole.stop > end


def test_one_worker_hands_over_the_sum():
    """With all replicas in one block nothing is left to add."""
    for replicas in range(1, 33):
        (node,) = remaining(replicas, range(replicas))
        assert node == (top(replicas), 0)
        assert added(replicas, [node], [0]) == added(replicas, [node], []) == []


def held_by_hand(replicas, block):
    """The most vectors at once: those handed over if the worker stopped there, and the one that just came."""
    most, held = 0, []
    for replica in block:
        held.append(range(replica, replica + 1))
        most = max(most, len(held))
        level = 0
        while level < top(replicas):
            level += 1
            whole = span(replicas, (level, replica >> level))
            inside = [span for span in held if whole.start <= span.start and span.stop <= whole.stop]
            if sum(map(len, inside)) == len(whole):
                held = [span for span in held if span not in inside] + [whole]
    return most


@pytest.mark.parametrize("replicas", range(1, 18))
def test_a_worker_holds_few_vectors(replicas):
    """As many as a count by hand says, and no more than twice the logarithm of R."""
    for start in range(replicas):
        for end in range(start + 1, replicas + 1):
            block = range(start, end)
            assert most_held(replicas, block) == held_by_hand(replicas, block) <= 2 * top(replicas) + 1
            assert most_held(replicas, block) >= len(remaining(replicas, block))


@pytest.mark.parametrize("replicas", range(1, 14))
def test_blocks_are_cut_as_numpy_does(replicas):
    """``place`` covers all replicas once, in sizes that differ by at most one, larger ones first."""
    for workers in range(1, replicas + 1):
        placement = place(replicas, workers)
        assert (placement.replicas, placement.workers) == (replicas, workers)
        cut = np.array_split(np.arange(replicas), workers)
        assert [list(block) for block in placement.blocks] == [part.tolist() for part in cut]
        assert placement.order == list(range(workers))


def test_the_order_of_workers_is_that_of_their_replicas():
    """Whoever hosts which block, partial sums are merged in the order of replicas."""
    blocks = [range(1), range(1, 5), range(5, 7), range(7, 8)]
    values = [(number, str(r)) for r, number in enumerate(ADVERSARIAL)]
    for shuffled in itertools.permutations(blocks):
        placement = Placement(8, shuffled)
        assert [placement.blocks[worker] for worker in placement.order] == blocks
        in_order = [placement.blocks[worker] for worker in placement.order]
        assert bits(in_blocks(8, in_order, values)) == bits(fold_values(values, both))
