"""Shards are those of ``numpy.array_split``, for any structure; unequal lengths are refused."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx
from phalanx import manual

Pair = namedtuple("Pair", ["x", "y"])


def equal(left, right):
    """Whether two structures hold equal values in equal containers."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right


@settings(deadline=None, max_examples=80, derandomize=True)
@given(samples=st.integers(1, 30), n=st.integers(1, 12), width=st.integers(0, 3))
def test_shards_are_those_of_array_split(samples, n, width):
    """Tensors and arrays in tuples and dicts, and lists of samples, are cut where numpy cuts; nothing is lost."""
    array = np.arange(samples * width, dtype=np.float64).reshape(samples, width)
    batch = (torch.from_numpy(array), {"array": array, "both": (array, Pair(array, array))})
    items = [f"sample {index}" for index in range(samples)]
    expected = [
        (torch.from_numpy(part), {"array": part, "both": (part, Pair(part, part))}) for part in np.array_split(array, n)
    ]
    assert equal(manual.shard_batch(batch, n), expected)
    assert manual.shard_batch(items, n) == [list(part) for part in np.array_split(np.array(items, object), n)]


def test_torch_chunk_cuts_elsewhere():
    """Negative twin: ``chunk`` makes fewer shards than asked for, and others."""
    x = torch.arange(5)
    assert [shard.tolist() for shard in manual.shard_batch(x, 4)] == [[0, 1], [2], [3], [4]]
    assert [shard.tolist() for shard in x.chunk(4)] == [[0, 1], [2, 3], [4]]


def test_structures_are_kept():
    """Named tuples stay named tuples, dicts dicts, and a bare tensor or list itself."""
    first, second = manual.shard_batch(Pair(torch.arange(3), np.arange(3)), 2)
    assert isinstance(first, Pair)
    assert first.y.tolist() == [0, 1]
    assert second.x.tolist() == [2]
    assert manual.shard_batch([1, 2, 3], 2) == [[1, 2], [3]]
    assert manual.shard_batch([(1, "a"), (2, "b"), (3, "c")], 2) == [[(1, "a"), (2, "b")], [(3, "c")]]


def test_shards_are_copies():
    """Writing a shard does not write the batch, and every shard starts where memory is aligned, whatever its place."""
    x, array = torch.zeros(9, 5), np.zeros((9, 5), np.float32)
    for tensor, copied in manual.shard_batch((x, array), 4):
        tensor.fill_(1)
        copied.fill(1)
        assert tensor.data_ptr() % 16 == copied.ctypes.data % 16 == 0
    assert not x.any()
    assert not array.any()
    assert any(part.data_ptr() % 16 for part in x.tensor_split(4))


@pytest.mark.parametrize(
    ("batch", "n", "says"),
    [
        ((torch.ones(5), torch.ones(4)), 2, r"batch\[0\] has 5, batch\[1\] has 4"),
        ({"x": np.ones(5), "y": np.ones(2)}, 2, r"batch\['x'\] has 5, batch\['y'\] has 2"),
        ((np.ones(5), (np.ones(5), np.ones(6))), 2, r"batch\[0\] has 5, batch\[1\]\[0\] has 5, batch\[1\]\[1\] has 6"),
        ((torch.ones(4), torch.ones(2)), 2, r"batch\[0\] has 4, batch\[1\] has 2"),
        ((torch.ones(4), None), 2, r"batch\[1\] is a NoneType"),
        ((torch.ones(4), [1, 2, 3, 4]), 2, r"batch\[1\] is a list, .*pass a list of samples"),
        ((torch.ones(4), torch.tensor(1.0)), 2, r"batch\[1\] is a Tensor, but columns must .* a first axis"),
        (torch.ones(0, 3), 2, "batch is empty"),
        ("text", 2, "batch is a str"),
        (3, 2, "batch is a int"),
        ((), 2, "batch is an empty tuple"),
        ({}, 2, "batch is an empty dict"),
        (torch.ones(4), 0, "n is 0"),
        (torch.ones(4), -1, "n is -1"),
        (torch.ones(4), 2.0, "n is 2.0"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch, n, says):
    """Unequal lengths, both that divide evenly included, and what has no length are named by their place."""
    with pytest.raises(phalanx.UsageError, match=says):
        manual.shard_batch(batch, n)
