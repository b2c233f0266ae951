"""Keys: 64 bits, whose low 32 never collide. ``python tests/plan/test_keys.py`` prints the pinned vectors anew."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan import keys

VECTORS = {
    (0, 1, 0): "0x8b4fda8c123b3c3",
    (0, 1, 1000): "0x8b4fda8df24a8fb",
    (0, 1, 4294967303): "0x8b4fda95988d123",
    (0, 5, 0): "0x3eb2ecbc12e63fe4",
    (0, 5, 1000): "0x3eb2ecbc39128899",
    (0, 5, 4294967303): "0x3eb2ecbd39c668bc",
    (1, 1, 0): "0xe9fd60493a8dd5fe",
    (1, 1, 1000): "0xe9fd6049aff19f13",
    (1, 1, 4294967303): "0xe9fd60484a93ef9e",
    (1, 5, 0): "0xb1441d25cd7825c6",
    (1, 5, 1000): "0xb1441d2554c50bea",
    (1, 5, 4294967303): "0xb1441d249dc0aabf",
    (18446744073709551615, 1, 0): "0x68631d79f4010b6f",
    (18446744073709551615, 1, 1000): "0x68631d797e8cabec",
    (18446744073709551615, 1, 4294967303): "0x68631d78e766fb7f",
    (18446744073709551615, 5, 0): "0x3562133a6ed9b48d",
    (18446744073709551615, 5, 1000): "0x3562133a426ebe29",
    (18446744073709551615, 5, 4294967303): "0x3562133b57f2ee8f",
}

# Published: 1234567 on Rosetta Code, 0 as in the ports of https://prng.di.unimi.it/splitmix64.c.
SPLITMIX64 = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B],
    1234567: [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ],
}
STREAMS = [
    keys.REPLICA_STREAM,
    keys.SAMPLE_STREAM,
    keys.EVALUATION_STREAM,
    keys.EVALUATION_SAMPLE_STREAM,
    keys.ORDER_STREAM,
]
LOW = 2**32 - 1
MANY = 200_000

seeds = st.integers(0, 2**64 - 1)
streams = st.sampled_from(STREAMS)


def vectors(shift=0):
    """Keys that pin the algorithm: corners of seed, stream and counter. ``shift`` moves the seeds."""
    corners = itertools.product([0, 1, 2**64 - 1], [1, 5], [0, 1000, 2**32 + 7])
    return {(seed, stream, counter): hex(keys.key(seed + shift, stream, counter)) for seed, stream, counter in corners}


def test_vectors_are_pinned():
    """The keys are those of the first release: to change them is to change every answer."""
    assert vectors() == VECTORS


def test_vectors_notice_other_keys():
    """Negative twin: keys of other seeds have none of the pinned values."""
    assert vectors(shift=5).keys() == vectors().keys()
    assert not set(vectors(shift=5).values()) & set(VECTORS.values())


@pytest.mark.parametrize("state", SPLITMIX64)
def test_splitmix64_is_the_published_one(state):
    """The outputs from a state are the reference's; the n-th output is that of the state n steps on."""
    outputs = [keys.splitmix64((state + step * keys.GOLDEN) % 2**64) for step in range(5)]
    assert outputs == SPLITMIX64[state]


def test_splitmix64_notices_another_constant():
    """Negative twin: with another increment only the first output would be the reference's."""
    outputs = [keys.splitmix64(step * (keys.GOLDEN + 2) % 2**64) for step in range(5)]
    assert [a == b for a, b in zip(outputs, SPLITMIX64[0], strict=True)] == [True, False, False, False, False]


def collisions(numbers):
    """How many of ``numbers`` were seen before, in the low 32 bits."""
    return len(numbers) - len({number & LOW for number in numbers})


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "stream", "start"),
    [
        (0, keys.REPLICA_STREAM, 0),
        (1, keys.SAMPLE_STREAM, 2**31 - MANY // 2),
        (2**32 - 1, keys.EVALUATION_STREAM, 2**32 - MANY // 2),
        (2**64 - 1, keys.ORDER_STREAM, 2**40 + 3),
    ],
)
def test_low_bits_never_collide(seed, stream, start):
    """200,000 consecutive counters give 200,000 different low halves, across 32-bit boundaries too."""
    assert collisions([keys.key(seed, stream, counter) for counter in range(start, start + MANY)]) == 0


def test_low_bits_of_a_hash_collide():
    """Negative twin: as many low halves of a good 64-bit hash do collide, as birthdays do."""
    assert collisions([keys.splitmix64(counter) for counter in range(MANY)]) > 0


@settings(deadline=None, max_examples=200, derandomize=True)
@given(seed=seeds, stream=streams, counter=st.integers(0, 2**64), distance=st.integers(1, 2**32 - 1))
def test_low_bits_differ_within_2_to_the_32_counters(seed, stream, counter, distance):
    """Any two counters less than 2**32 apart differ in the low half."""
    assert (keys.key(seed, stream, counter) ^ keys.key(seed, stream, counter + distance)) & LOW != 0


@settings(deadline=None, max_examples=200, derandomize=True)
@given(seed=seeds, stream=streams, one=st.integers(0, 2**64 - 1), flipped=st.sets(st.integers(0, 63), min_size=1))
def test_keys_are_a_bijection_of_64_bit_counters(seed, stream, one, flipped):
    """Counters that differ in any of their 64 bits have different keys."""
    other = one ^ sum(2**bit for bit in flipped)
    assert keys.key(seed, stream, one) != keys.key(seed, stream, other)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(seed=seeds, stream=streams, counter=st.integers(0, 2**80))
def test_a_key_is_64_bits_and_a_pure_function(seed, stream, counter):
    """Any seed and counter give an int from 0 to 2**64 - 1, the same one when asked again."""
    key = keys.key(seed, stream, counter)
    assert type(key) is int
    assert 0 <= key < 2**64
    assert keys.key(seed, stream, counter) == key


GRID_SEEDS = [*range(12), *(2**bit for bit in range(4, 64, 6)), 2**32 - 1, 2**64 - 1]
GRID_COUNTERS = [*range(300), *(2**bit for bit in range(9, 64))]


def test_seeds_streams_and_counters_all_matter():
    """A grid of seeds, streams and counters, neighbours and single bits, has no two equal keys."""
    grid = list(itertools.product(GRID_SEEDS, STREAMS, GRID_COUNTERS))
    assert len(set(STREAMS)) == 5
    assert len({keys.key(*point) for point in grid}) == len(grid)


def test_a_key_that_forgets_something_is_noticed():
    """Negative twin: adding seed, stream and counter up before hashing makes equal keys."""
    grid = list(itertools.product(GRID_SEEDS, STREAMS, GRID_COUNTERS))
    assert len({keys.splitmix64(sum(point) % 2**64) for point in grid}) < len(grid)


def matches(one, other):
    """How many of 2,000 counters have equal low halves on two (seed, stream)."""
    return sum((keys.key(*one, counter) ^ keys.key(*other, counter)) & LOW == 0 for counter in range(2000))


def test_low_bits_alone_tell_seeds_and_streams_apart():
    """Torch's CPU generator sees the low half only, so that has to depend on seed and stream as well."""
    pairs = [((seed, stream), (0, 1)) for seed, stream in itertools.product([0, 1, 2**32, 2**63], STREAMS)]
    assert {one: matches(one, other) for one, other in pairs if one != other and matches(one, other) > 1} == {}
    assert matches((0, 1), (0, 1)) == 2000


def flips(function):
    """Mean number of the low 32 bits that change from one counter to the next."""
    return sum(((function(counter) ^ function(counter + 1)) & LOW).bit_count() for counter in range(2000)) / 2000


@pytest.mark.parametrize("stream", STREAMS)
def test_neighbouring_counters_have_unlike_keys(stream):
    """From one counter to the next about half of the low bits change."""
    assert 15 < flips(lambda counter: keys.key(0, stream, counter)) < 17


def test_a_bijection_that_does_not_mix_is_noticed():
    """Negative twin: the counter itself never collides either, but hardly a bit of it changes."""
    assert flips(lambda counter: counter) < 3


if __name__ == "__main__":
    print("VECTORS =", vectors())
