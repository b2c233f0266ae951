"""Collectives of the backend: every rank ends with what one process can compute alone, bit for bit."""

import itertools

import pytest

from tests.backend import jobs
from tests.sampling import cover, sample


@pytest.mark.long
@pytest.mark.parametrize("size", sample("all_reduce of ranks", [1, 2, 3, 4], 2))
def test_all_reduce(right, size):
    """All dtypes, operations and sizes: the fold by rank, rounded once where the dtype is narrow."""
    right(size, "jobs.all_reduces")


@pytest.mark.parametrize("size", sample("big tensors of ranks", [2, 3, 5], 1))
def test_big_all_reduce(right, size):
    """Tensors that go through in several pieces."""
    right(size, "jobs.big_all_reduces")


@pytest.mark.long
def test_sparse_all_reduce(right):
    """Sparse tensors with other rows on each rank, none on one of them: the sum of dense ones, bit for bit."""
    right(4, "jobs.sparse_all_reduces")


@pytest.mark.parametrize("size", sample("reduce of ranks", [1, 2, 3], 2))
def test_reduce(right, size):
    """The root has the reduction, the others keep theirs."""
    right(size, "jobs.reduces")


@pytest.mark.long
@pytest.mark.parametrize(("size", "name"), cover("moves of ranks", [1, 2, 3], jobs.MOVES))
def test_moves(right, size, name):
    """What only moves arrives as it was: any dtype, any size, any root, uneven parts."""
    right(size, "jobs.moves", name)


@pytest.mark.long
@pytest.mark.parametrize("size", sample("reduce_scatter of ranks", [1, 2, 3], 2))
def test_reduce_scatter(right, size):
    """Each rank has the reduction of its part, in both forms."""
    right(size, "jobs.reduce_scatters")


@pytest.mark.long
def test_barrier(right, tmp_path):
    """Nobody goes on before all have come."""
    right(3, "jobs.barriers", str(tmp_path))


@pytest.mark.parametrize(
    ("size", "job"), sample("messages of ranks", itertools.product([2, 3], ["messages", "batched_messages"]), 1)
)
def test_messages(right, size, job):
    """send, recv and their kin: longer than a pipe, both ways at once, by tag, from anybody."""
    right(size, f"jobs.{job}")


@pytest.mark.long
@pytest.mark.parametrize(
    "job", ["objects", "asynchronous", "subgroups", "views", "all_ops", "inference", "coalesced", "meshes", "compiled"]
)
def test_other_forms(right, job):
    """Objects, works and futures, groups of some ranks, views and parameters, functional collectives, meshes."""
    right(3, f"jobs.{job}")


def test_a_group_is_made_again(right, tmp_path):
    """Destroyed and made anew with the same store, a group works."""
    right(2, "jobs.again", str(tmp_path / "store"))


def test_a_wrong_order_would_show(ran):
    """The oracle can fail: sums in another order of ranks have other bits."""
    codes, told = ran(3, "jobs.planted")
    assert codes == [0, 0, 0], told
