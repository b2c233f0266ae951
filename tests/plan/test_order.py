"""The sample order of an epoch. ``python tests/plan/test_order.py`` prints the pinned vectors anew."""

import collections
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan import keys
from phalanx.plan.orders import ALGORITHM, Plan, epoch_orders

VECTORS = {
    "splitmix64-argsort-1": {
        (0, 0, 2): [1, 0],
        (0, 0, 10): [5, 7, 3, 9, 6, 2, 8, 4, 1, 0],
        (0, 1, 2): [0, 1],
        (0, 1, 10): [8, 9, 6, 2, 4, 5, 0, 1, 7, 3],
        (0, 1000, 2): [1, 0],
        (0, 1000, 10): [7, 2, 3, 8, 1, 9, 4, 0, 5, 6],
        (18446744073709551613, 0, 2): [0, 1],
        (18446744073709551613, 0, 10): [0, 6, 1, 8, 9, 7, 3, 2, 4, 5],
        (18446744073709551613, 1, 2): [0, 1],
        (18446744073709551613, 1, 10): [8, 7, 2, 0, 9, 4, 6, 1, 5, 3],
        (18446744073709551613, 1000, 2): [1, 0],
        (18446744073709551613, 1000, 10): [7, 8, 2, 1, 5, 4, 9, 6, 0, 3],
    }
}

seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 2**40)


def vectors(shift=0):
    """Orders by (seed, epoch, samples) that pin the named algorithm. ``shift`` moves the seeds."""
    corners = itertools.product([0, 2**64 - 3], [0, 1, 1000], [2, 10])
    return {ALGORITHM: {case: order(case[0] + shift, *case[1:]) for case in corners}}


def epoch_order(seed, epoch, samples):
    return epoch_orders(seed, range(epoch, epoch + 1), samples)[0]


def planned(seed, samples, batch, *, shuffle=True):
    """A plan over so many samples."""
    return Plan(samples, 1, batch, 0, seed, shuffle, drop_last=False, seeder=None)


def test_several_epochs_at_once_are_the_single_ones():
    """A block of epochs has the orders that its epochs have alone."""
    block = epoch_orders(3, range(7, 12), 31)
    alone = [epoch_order(3, epoch, 31) for epoch in range(7, 12)]
    assert block.tolist() == [order.tolist() for order in alone]


def order(seed, epoch, samples):
    return epoch_order(seed, epoch, samples).tolist()


def test_vectors_are_pinned():
    """The orders are those of the first release: to change them is to change every answer."""
    assert vectors() == VECTORS


def test_vectors_notice_other_orders():
    """Negative twin: other seeds have other orders of ten samples."""
    shifted = vectors(shift=2)[ALGORITHM]
    assert all(shifted[case] != pinned for case, pinned in VECTORS[ALGORITHM].items() if case[2] == 10)


def covers_once(indices, samples):
    """Whether ``indices`` has every index from 0 to ``samples`` exactly once."""
    return indices.dtype == np.int64 and np.sort(indices).tobytes() == np.arange(samples, dtype=np.int64).tobytes()


def test_a_large_epoch_has_each_sample_once():
    """A million samples too: no ties, nothing lost."""
    assert covers_once(epoch_order(3, 5, 1_000_000), 1_000_000)


def test_an_order_that_repeats_or_leaves_out_is_noticed():
    """Negative twin: drawing with replacement, a missing sample, and another dtype are refused."""
    assert not covers_once(np.random.default_rng(0).integers(0, 50, 50), 50)
    assert not covers_once(np.arange(49), 50)
    assert not covers_once(np.arange(50, dtype=np.int32), 50)


def by_hand(seed, epoch, samples):
    """``splitmix64-argsort-1`` in plain integers: sample i gets output i of the stream; sort by it."""
    state = keys.key(seed, keys.ORDER_STREAM, epoch)
    return sorted(range(samples), key=lambda i: keys.splitmix64((state + i * keys.GOLDEN) % 2**64))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(seed=seeds, epoch=epochs, samples=st.integers(0, 200))
def test_the_order_is_the_named_algorithm(seed, epoch, samples):
    """Numpy's wrapping arithmetic gives the order that plain integers give."""
    assert order(seed, epoch, samples) == by_hand(seed, epoch, samples)


def test_another_algorithm_is_noticed():
    """Negative twin: the same stream one output further on sorts the samples otherwise."""
    late = [i - 1 for i in by_hand(0, 0, 51) if i]
    assert order(0, 0, 50) != late


@settings(deadline=None, max_examples=50, derandomize=True)
@given(seed=seeds, epoch=epochs, samples=st.integers(1, 50))
def test_without_shuffle_the_order_is_the_data(seed, epoch, samples):
    """Unshuffled epochs are 0, 1, 2, .. whatever seed and epoch."""
    assert planned(seed, samples, samples, shuffle=False).indices(epoch).tolist() == list(range(samples))


def distinct(points):
    """How many different orders of 30 samples the (seed, epoch) points have."""
    return len({epoch_order(seed, epoch, 30).tobytes() for seed, epoch in points})


def test_epochs_and_seeds_have_orders_of_their_own():
    """Neighbouring and far seeds and epochs never share an order, nor does (s, e) share with (e, s)."""
    points = list(itertools.product([*range(20), 2**32, 2**63, 2**64 - 1], [*range(20), 2**32, 2**40]))
    assert distinct(points) == len(points)


def test_seed_plus_epoch_would_be_noticed():
    """Negative twin: the usual ``seed + epoch`` makes epoch 1 of one seed epoch 0 of the next."""
    points = [(seed + epoch, 0) for seed, epoch in itertools.product(range(20), range(20))]
    assert distinct(points) < len(points)


def unevenness(orders):
    """Chi-squared statistic of how often each of the 120 orders of five samples comes; 119 expected if even."""
    counts = collections.Counter(map(tuple, orders))
    expected = len(orders) / 120
    return sum((counts[each] - expected) ** 2 for each in itertools.permutations(range(5))) / expected


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_orders_are_even(seed):
    """Over 4,000 epochs of five samples all 120 orders come about equally often."""
    assert unevenness([order(seed, epoch, 5) for epoch in range(4000)]) < 220


def test_uneven_orders_are_noticed():
    """Negative twin: the classical wrong shuffle (swap each with any) and mere rotations are far off."""
    random = np.random.default_rng(0)
    swapped = []
    for _ in range(4000):
        cards = list(range(5))
        for i, j in enumerate(random.integers(0, 5, 5)):
            cards[i], cards[j] = cards[j], cards[i]
        swapped.append(cards)
    assert unevenness(swapped) > 220
    assert unevenness([np.roll(range(5), turn).tolist() for turn in range(4000)]) > 220


@settings(deadline=None, max_examples=100, derandomize=True)
@given(seed=seeds, samples=st.integers(1, 400), batch=st.integers(1, 400), data=st.data())
def test_any_step_in_any_order(seed, samples, batch, data):
    """Steps may be asked for in any order, of several epochs in turn; what they were is theirs."""
    plan = planned(seed, samples, batch)
    for step in data.draw(st.lists(st.integers(0, 3 * plan.steps_per_epoch), max_size=6)):
        epoch, number = divmod(step, plan.steps_per_epoch)
        found = plan.indices(step)
        assert found.tolist() == order(seed, epoch, samples)[number * batch : (number + 1) * batch]
        found[:] = -1


def test_without_shuffle_a_long_epoch_takes_no_memory():
    """Nothing is made of an epoch's length where samples keep their order."""
    plan = planned(0, 10**15, 32, shuffle=False)
    tracemalloc.start()
    try:
        assert [len(plan.indices(step)) for step in (0, 10**15 // 64, 10**15 // 32)] == [32, 32, 32]
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    print("VECTORS =", vectors())
