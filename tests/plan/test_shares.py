"""Shares and their weights: the cuts of ``numpy.array_split``, and exact ones."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.shares import share_bounds, share_weights

MOST_SAMPLES = 40
MOST_REPLICAS = 17
SMALL = list(itertools.product(range(MOST_SAMPLES + 1), range(1, MOST_REPLICAS + 1)))


def numpy_bounds(samples, replicas):
    """Where ``numpy.array_split`` cuts."""
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(samples), replicas)]).tolist()
    return list(itertools.pairwise([0, *ends]))


def chunk_bounds(samples, replicas):
    """A wrong deal: ``torch.chunk`` and others round the size up, and give the last ones what is left."""
    size = -(-samples // replicas)
    return [(min(r * size, samples), min((r + 1) * size, samples)) for r in range(replicas)]


def sizes(bounds):
    return [end - start for start, end in bounds]


def test_shares_are_those_of_array_split():
    """Every cut of up to 40 samples into up to 17 shares is numpy's."""
    for samples, replicas in SMALL:
        assert share_bounds(samples, replicas) == numpy_bounds(samples, replicas)


def test_another_way_to_cut_is_noticed():
    """Negative twin: shares of rounded-up size are numpy's only sometimes."""
    same = [case for case in SMALL if chunk_bounds(*case) == numpy_bounds(*case)]
    assert 0 < len(same) < len(SMALL)
    assert chunk_bounds(5, 4) == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert share_bounds(5, 4) == [(0, 2), (2, 3), (3, 4), (4, 5)]


def is_even_deal(bounds, samples, replicas):
    """R runs, end to end, from 0 to ``samples``, larger ones first, no two sizes further apart than 1."""
    ends = [end for _, end in bounds]
    return (
        len(bounds) == replicas
        and [start for start, _ in bounds] == [0, *ends[:-1]]
        and ends[-1] == samples
        and sizes(bounds) == sorted(sizes(bounds), reverse=True)
        and max(sizes(bounds)) - min(sizes(bounds)) <= 1
    )


@pytest.mark.long
@settings(deadline=None, max_examples=100, derandomize=True)
@given(samples=st.integers(0, 10**12), replicas=st.integers(1, 500))
def test_shares_are_even_at_any_size(samples, replicas):
    """Shares cover the batch once, in order, and differ by at most one sample."""
    assert is_even_deal(share_bounds(samples, replicas), samples, replicas)


def test_an_uneven_deal_is_noticed():
    """Negative twin: a gap, an overlap, a missing end, a missing share, a late large share, an uneven one."""
    assert is_even_deal([(0, 2), (2, 3)], 3, 2)
    assert not is_even_deal([(0, 2), (3, 4)], 4, 2)
    assert not is_even_deal([(0, 2), (1, 3)], 3, 2)
    assert not is_even_deal([(0, 1), (1, 2)], 3, 2)
    assert not is_even_deal([(0, 2), (2, 3)], 3, 3)
    assert not is_even_deal([(0, 1), (1, 3)], 3, 2)
    assert not is_even_deal(chunk_bounds(5, 4), 5, 4)


def test_equal_shares_weigh_exactly_one():
    """Equal shares weigh 1.0, so nothing is scaled; an empty one beside them weighs 0.0 and is skipped."""
    for size, replicas in itertools.product(range(1, MOST_SAMPLES + 1), range(1, MOST_REPLICAS + 1)):
        assert share_weights(sizes(share_bounds(size * replicas, replicas))) == [1.0] * replicas
    for samples in range(1, MOST_REPLICAS):
        weights = share_weights(sizes(share_bounds(samples, MOST_REPLICAS)))
        assert weights == [1.0] * samples + [0.0] * (MOST_REPLICAS - samples)


def test_shares_of_the_total_would_not_weigh_exactly_one():
    """Negative twin: ``n_r / n`` times R, the usual formula, misses 1.0 by rounding, as for 49 replicas."""
    assert 1 / 49 * 49 != 1.0
    assert share_weights([1] * 49) == [1.0] * 49


@settings(deadline=None, max_examples=100, derandomize=True)
@given(counts=st.lists(st.integers(0, 2**53), min_size=1, max_size=17).filter(any))
def test_weights_are_correctly_rounded_ratios_to_the_largest(counts):
    """Each weight is the float nearest to ``n_r / n_max``, in replica order."""
    assert share_weights(counts) == [float(Fraction(count, max(counts))) for count in counts]


def test_another_reference_is_noticed():
    """Negative twin: weights relative to the first, or to the mean, are others."""
    counts = [2, 3, 3]
    assert share_weights(counts) != [count / counts[0] for count in counts]
    assert share_weights(counts) != [count * len(counts) / sum(counts) for count in counts]


@pytest.mark.parametrize("replicas", range(1, MOST_REPLICAS + 1))
def test_weights_of_a_short_batch_never_exceed_one(replicas):
    """The largest share weighs exactly 1.0, whatever the batch; no other weighs more."""
    for samples in range(1, MOST_SAMPLES + 1):
        weights = share_weights(sizes(share_bounds(samples, replicas)))
        assert weights[0] == 1.0
        assert weights == sorted(weights, reverse=True)
