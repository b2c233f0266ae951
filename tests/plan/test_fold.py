"""The fold: one order, whoever adds. The oracle is written from the prose of the design, not from the code."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.fold import Fold, Partial
from tests.orders import triples

MOST = 17
WIDTH = 3
BRACKETS = {
    1: "0",
    2: "(0+1)",
    3: "((0+1)+2)",
    4: "((0+1)+(2+3))",
    5: "(((0+1)+(2+3))+4)",
    6: "(((0+1)+(2+3))+(4+5))",
    7: "(((0+1)+(2+3))+((4+5)+6))",
    8: "(((0+1)+(2+3))+((4+5)+(6+7)))",
    9: "((((0+1)+(2+3))+((4+5)+(6+7)))+8)",
    11: "((((0+1)+(2+3))+((4+5)+(6+7)))+((8+9)+10))",
}


def plus(left, right):
    with np.errstate(all="ignore"):
        return left + right


def bracket(left, right):
    return f"({left}+{right})"


def bits(vector):
    """Dtype and bytes; every NaN counts as the same NaN, because hardware chooses its payload."""
    if vector is None:
        return None
    return vector.dtype.str, np.where(np.isnan(vector), vector.dtype.type(np.nan), vector).tobytes()


def naive(values, add=plus):
    """Stride doubling, as the design says it: (0,1) (2,3) .., then (0,2) (4,6) .., absent ones skipped."""
    sums, stride = list(values), 1
    while stride < len(sums):
        for left in range(0, len(sums) - stride, 2 * stride):
            right = left + stride
            if sums[left] is None:
                sums[left] = sums[right]
            elif sums[right] is not None:
                sums[left] = add(sums[left], sums[right])
        stride *= 2
    return sums[0]


def direct(values, add=plus):
    fold = Fold(len(values), add)
    for replica, value in enumerate(values):
        fold.push(replica, value)
    return fold.total()


def block(values, start, end, add=plus, fold=Fold):
    """What the worker that hosts replicas ``start`` to ``end`` hands over."""
    worker = fold(len(values), add)
    for replica in range(start, end):
        worker.push(replica, values[replica])
    return worker.partials()


def in_blocks(values, cuts, add=plus, fold=Fold):
    """Each block folds its own replicas; a last fold merges what they hand over, in order."""
    final = fold(len(values), add)
    for start, end in itertools.pairwise([0, *sorted(cuts), len(values)]):
        final.merge(block(values, start, end, add, fold))
    return final.total()


def all_cuts(replicas):
    """Every way to cut ``replicas`` into contiguous blocks."""
    inner = range(1, replicas)
    return itertools.chain.from_iterable(itertools.combinations(inner, size) for size in range(replicas))


def wild(replicas, seed=0, dtype=np.float32):
    """Vectors over many magnitudes, so that almost every change of order changes bits."""
    random = np.random.default_rng(seed)
    return [
        (random.normal(size=WIDTH) * 10.0 ** random.integers(-3, 4, size=WIDTH)).astype(dtype) for _ in range(replicas)
    ]


def telling(replicas):
    """Vectors whose sums are others in any other order of additions."""
    return list(np.array(triples(replicas), np.float32).reshape(replicas, -1))


class LeftToRight:
    """A wrong fold: a running sum, so that the bits depend on where the blocks were cut."""

    def __init__(self, replicas, add):
        self.add = add
        self.sums = []

    def push(self, replica, value):
        self.merge([value])

    def merge(self, values):
        for value in values:
            self.sums = [value if not self.sums else self.add(self.sums[0], value)]

    def partials(self):
        return self.sums

    def total(self):
        return self.sums[0]


def awkward(dtype):
    """Single numbers that are hard to add: zeros of both signs, subnormals, ties, overflows, infinities, NaN."""
    limits, number = np.finfo(dtype), np.dtype(dtype).type
    one = number(1)
    positive = [
        number(0),
        limits.smallest_subnormal,
        limits.smallest_normal - limits.smallest_subnormal,
        limits.smallest_normal,
        limits.eps,
        limits.epsneg,
        number(0.1),
        one / number(3),
        one,
        one + limits.eps,
        one / limits.eps,
        one / limits.eps + one,
        number(1e30),
        limits.max / number(2),
        limits.max,
        number(math.inf),
    ]
    return st.sampled_from([*positive, *(-value for value in positive)]) | st.floats(width=np.dtype(dtype).itemsize * 8)


ELEMENTS = {dtype: awkward(dtype) for dtype in (np.float32, np.float64)}


@st.composite
def gradients(draw, replicas):
    """One vector or None per replica."""
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    vector = st.lists(ELEMENTS[dtype], min_size=WIDTH, max_size=WIDTH).map(lambda row: np.array(row, dtype))
    return draw(st.lists(st.none() | vector | vector, min_size=replicas, max_size=replicas))


@st.composite
def cut_gradients(draw):
    """Gradients of some replicas, a list of cuts, and a coarser list of cuts."""
    values = draw(gradients(draw(st.integers(1, MOST))))
    fine = [cut for cut in range(1, len(values)) if draw(st.booleans())]
    return values, fine, [cut for cut in fine if draw(st.booleans())]


# The order


@pytest.mark.parametrize("replicas", BRACKETS)
def test_the_order_is_the_written_one(replicas):
    """Brackets written by hand are what the fold, and the oracle of these tests, both do."""
    names = [str(replica) for replica in range(replicas)]
    assert direct(names, bracket) == BRACKETS[replicas]
    assert naive(names, bracket) == BRACKETS[replicas]


@pytest.mark.parametrize("replicas", range(1, 13))
def test_every_cut_gives_the_same_brackets(replicas):
    """Not only the bits: every way to cut the replicas into blocks makes the very same additions."""
    expected = naive(range(replicas), bracket)
    assert {in_blocks(range(replicas), cuts, bracket) for cuts in all_cuts(replicas)} == {expected}


def test_brackets_notice_another_order():
    """Negative twin: a running sum makes other additions, and others again for other cuts."""
    made = {in_blocks(range(5), cuts, bracket, LeftToRight) for cuts in all_cuts(5)}
    assert in_blocks(range(5), [], bracket, LeftToRight) != BRACKETS[5]
    assert len(made) > 1


# Equal bits


@pytest.mark.cases(6)
@pytest.mark.parametrize("replicas", range(1, MOST + 1))
@settings(deadline=None, max_examples=12, derandomize=True)
@given(data=st.data())
def test_any_number_of_workers_has_the_bits_of_one(replicas, data):
    """For every W from 1 to R, blocks of any sizes end in the bits of the direct fold and of the oracle."""
    values = data.draw(gradients(replicas))
    cuts = data.draw(st.permutations(range(1, replicas)))
    expected = bits(naive(values))
    assert bits(direct(values)) == expected
    for workers in range(1, replicas + 1):
        assert bits(in_blocks(values, cuts[: workers - 1])) == expected


@pytest.mark.parametrize("replicas", range(1, 8))
def test_every_cut_and_every_absence_has_the_same_bits(replicas):
    """Small R exhaustively: all ways to cut, times all sets of absent replicas (all absent included)."""
    values = wild(replicas)
    for present in itertools.product([False, True], repeat=replicas):
        some = [value if here else None for value, here in zip(values, present, strict=True)]
        expected = bits(naive(some))
        assert all(bits(in_blocks(some, cuts)) == expected for cuts in all_cuts(replicas))


def test_an_exhaustive_check_notices_a_running_sum():
    """Negative twin: the same comparison fails for workers that add left to right."""
    values = telling(7)
    expected = bits(naive(values))
    wrong = [cuts for cuts in all_cuts(7) if bits(in_blocks(values, cuts, fold=LeftToRight)) != expected]
    assert wrong
    assert len({bits(in_blocks(values, cuts, fold=LeftToRight)) for cuts in all_cuts(7)}) > 1


@settings(deadline=None, max_examples=100, derandomize=True)
@given(case=cut_gradients())
def test_blocks_of_blocks_have_the_same_bits(case):
    """Hosts may fold what their workers hand over, and hand over what remains: two levels, same bits."""
    values, fine, coarse = case
    final = Fold(len(values), plus)
    for first, last in itertools.pairwise([0, *coarse, len(values)]):
        host = Fold(len(values), plus)
        for start, end in itertools.pairwise([first, *(cut for cut in fine if first < cut < last), last]):
            host.merge(block(values, start, end))
        final.merge(host.partials())
    assert bits(final.total()) == bits(naive(values))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(case=cut_gradients())
def test_a_worker_may_fold_its_own_and_then_merge(case):
    """Pushing some replicas and merging the blocks of others into one fold gives the same bits."""
    values, cuts, pushed = case
    final = Fold(len(values), plus)
    for start, end in itertools.pairwise([0, *cuts, len(values)]):
        if start in (0, *pushed):
            for replica in range(start, end):
                final.push(replica, values[replica])
        else:
            final.merge(block(values, start, end))
    assert bits(final.total()) == bits(naive(values))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(case=cut_gradients())
def test_partial_sums_may_travel(case):
    """A partial sum is its level, index and value: one rebuilt from copies of them does as well."""
    values, cuts, _ = case
    final = Fold(len(values), plus)
    for start, end in itertools.pairwise([0, *cuts, len(values)]):
        for partial in block(values, start, end):
            value = None if partial.value is None else partial.value.copy()
            final.merge([Partial(partial.level, partial.index, value)])
    assert bits(final.total()) == bits(naive(values))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(case=cut_gradients())
def test_adding_into_sums_leaves_the_inputs_alone(case):
    """An ``add`` that writes into left sums, never into inputs, changes no input and no bit of the total."""
    values, cuts, _ = case
    before = [bits(value) for value in values]
    sums = []

    def into_sums(left, right):
        if not any(left is earlier for earlier in sums):
            left = left.copy()
            sums.append(left)
        with np.errstate(all="ignore"):
            return np.add(left, right, out=left)

    total = in_blocks(values, cuts, into_sums)
    assert [bits(value) for value in values] == before
    assert bits(total) == bits(naive(values))


def test_bits_tell_what_equality_does_not():
    """Negative twin of every comparison here: one ulp, the sign of a zero, a dtype, a NaN's place, an absence."""
    one = np.ones(2, np.float32)
    assert bits(one) == bits(one.copy())
    assert bits(one) != bits(np.nextafter(one, np.float32(2)))
    assert bits(one) != bits(one.astype(np.float64))
    assert bits(0 * one) != bits(-0.0 * one)
    assert bits(np.array([np.nan, 1])) != bits(np.array([1, np.nan]))
    assert bits(np.array([np.nan, 1])) == bits(np.array([-np.nan, 1]))
    assert bits(0 * one) != bits(None)


# Other orders


@pytest.mark.parametrize("replicas", range(1, MOST + 1))
def test_a_running_sum_differs_from_four_replicas_on(replicas):
    """Negative twin: adding left to right is this order up to three replicas, and other bits beyond."""
    values = telling(replicas)
    assert (bits(in_blocks(values, [], fold=LeftToRight)) != bits(direct(values))) == (replicas > 3)


@pytest.mark.parametrize("replicas", range(1, MOST + 1))
def test_order_of_arrival_differs_from_three_replicas_on(replicas):
    """Negative twin: the same fold over replicas as they arrive has other bits (two may swap, + commutes)."""
    values = telling(replicas)
    assert (bits(direct([*values[1:], values[0]])) != bits(direct(values))) == (replicas > 2)


def test_summing_per_worker_first_differs():
    """Negative twin: workers that add all they host, and then fold their sums, give each W an answer of its own."""
    values = telling(8)
    cuts = {1: [], 2: [4], 3: [3, 6], 4: [2, 4, 6], 5: [2, 4, 6, 7]}
    answers = {}
    for workers, edges in cuts.items():
        blocks = itertools.pairwise([0, *edges, 8])
        answers[workers] = bits(direct([direct(values[start:end]) for start, end in blocks]))
    assert answers[1] == answers[2] == answers[4] == bits(naive(values))  # aligned blocks: subtrees of the fold
    assert answers[3] != answers[1]


# Absent replicas


@pytest.mark.parametrize("replicas", range(1, MOST + 1))
def test_all_absent_is_absent(replicas):
    """Nothing plus nothing is nothing, for one worker and for one worker per replica."""
    assert direct([None] * replicas) is None
    assert in_blocks([None] * replicas, range(1, replicas)) is None


@pytest.mark.parametrize("replicas", range(1, MOST + 1))
def test_a_lone_value_comes_out_as_it_is(replicas):
    """The only present replica's value is the total: the same object, never added to anything."""
    value = np.array([-0.0, np.nan], np.float32)
    for present in range(replicas):
        values = [value if replica == present else None for replica in range(replicas)]
        assert direct(values) is value
        assert in_blocks(values, range(1, replicas)) is value


def test_absent_is_skipped_not_added_as_zero():
    """-0.0 survives absent neighbours; its negative twin, +0.0 in their place, is caught by bits and only by them."""
    minus = np.array([-0.0], np.float32)
    for replicas in range(2, MOST + 1):
        for present in range(replicas):
            values = [minus if replica == present else None for replica in range(replicas)]
            filled = [np.zeros(1, np.float32) if value is None else value for value in values]
            assert bits(direct(values)) == bits(minus)
            assert bits(direct(filled)) != bits(minus)
            assert direct(filled) == minus


# Memory and work


def kept(replicas, start):
    """The most partial sums a worker holds that begins at ``start`` and goes on to the end."""
    fold = Fold(replicas, lambda left, right: left + right)
    most = 0
    for replica in range(start, replicas):
        fold.push(replica, 1)
        most = max(most, len(fold.partials()))
    return most


@pytest.mark.parametrize("replicas", range(1, 65))
def test_few_partial_sums_are_kept(replicas):
    """At most 2 log2 R + 1 for any block, and log2 R + 1 for one that starts at replica 0."""
    assert max(kept(replicas, start) for start in range(replicas)) <= 2 * math.log2(replicas) + 1
    assert kept(replicas, 0) <= math.log2(replicas) + 1


def test_the_bound_on_partial_sums_can_be_exceeded():
    """Negative twin: keeping every value breaks the bound, and dropping the factor of two would break it too."""
    assert len(range(64)) > 2 * math.log2(64) + 1
    assert max(kept(64, start) for start in range(64)) > math.log2(64)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(case=cut_gradients())
def test_no_addition_is_made_twice_or_for_nothing(case):
    """Values that are present are added exactly once each, wherever the cuts are."""
    values, cuts, _ = case
    made = []

    def counting(left, right):
        made.append(None)
        return plus(left, right)

    in_blocks(values, cuts, counting)
    assert len(made) == max(0, sum(value is not None for value in values) - 1)


def test_what_was_handed_over_is_a_list_of_its_own():
    """Emptying the list that ``partials`` returned takes nothing from the fold."""
    fold = Fold(2, plus)
    fold.push(0, 1)
    fold.partials().clear()
    fold.push(1, 2)
    assert fold.total() == 3


# Errors


@pytest.mark.parametrize("replicas", range(1, 10))
def test_every_replica_but_the_next_is_refused(replicas):
    """Out of order, skipped, or pushed twice: refused at any point, and the fold goes on unharmed."""
    for start in range(replicas):
        fold = Fold(replicas, bracket)
        for replica in range(start, replicas):
            fold.push(replica, str(replica))
            for wrong in set(range(replicas)) - {replica + 1}:
                with pytest.raises(ValueError):
                    fold.push(wrong, "wrong")
        expected = block([str(replica) for replica in range(replicas)], start, replicas, bracket)
        assert fold.partials() == expected


def test_absent_replicas_are_pushed_too():
    """Leaving a replica out is an error, not a way to say that it is absent."""
    fold = Fold(3, plus)
    fold.push(0, 1)
    with pytest.raises(ValueError):
        fold.push(2, 3)
    fold.push(1, None)
    fold.push(2, 3)
    assert fold.total() == 4


@pytest.mark.parametrize("replicas", range(2, 9))
def test_blocks_are_merged_in_order_and_once(replicas):
    """A block that is merged twice, too early or after a gap is refused."""
    for cut in range(1, replicas):
        values = range(replicas)
        first, second = block(values, 0, cut), block(values, cut, replicas)
        for wrong in (first, block(values, cut - 1, replicas), block(values, cut + 1, replicas)):
            final = Fold(replicas, plus)
            final.merge(first)
            if wrong:
                with pytest.raises(ValueError):
                    final.merge(wrong)
        late = Fold(replicas, plus)
        late.merge(second)
        with pytest.raises(ValueError):
            late.merge(first)


@pytest.mark.parametrize("replicas", range(1, MOST + 1))
def test_a_total_needs_every_replica(replicas):
    """An incomplete fold has no total, whichever block is missing, even if all that came is absent."""
    for value in (None, 1):
        for start, end in itertools.combinations_with_replacement(range(replicas + 1), 2):
            fold = Fold(replicas, plus)
            fold.merge(block([value] * replicas, start, end))
            if (start, end) == (0, replicas):
                fold.total()
            else:
                with pytest.raises(ValueError):
                    fold.total()


@pytest.mark.parametrize("replicas", range(1, MOST + 1))
def test_a_replica_too_many_never_reaches_a_total(replicas):
    """Replicas beyond the count cannot slip into the sum, nor stand for it."""
    for there, extra in itertools.product((0, replicas), range(replicas, 2 * MOST + 2)):
        with pytest.raises(ValueError):
            total_with(replicas, there, extra)


def total_with(replicas, there, extra):
    fold = Fold(replicas, plus)
    fold.merge(block([1] * replicas, 0, there))
    fold.push(extra, 1)
    return fold.total()
