"""broadcast, scatter, gather, reduce_scatter and all_gather: bit for bit, of any size, sharing no memory."""

import itertools

import numpy as np
import pytest
import torch

from phalanx import collectives
from tests.collectives.oracles import CASES, DTYPES, bits, same_values, wild


def memory(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_broadcast_copies_the_root(dtype):
    """From every root to every count of participants, all end with the root's bits, and the root keeps its own."""
    for count in range(1, 10):
        for root in range(count):
            tensors = [tensor.to(dtype) for tensor in wild(count, (2, 3), torch.float32, seed=count)]
            expected = [tensor.clone() for tensor in tensors][root]
            assert collectives.broadcast(tensors, root=root) is None
            for tensor in tensors:
                assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_broadcast_writes_into_views():
    """Strided and transposed targets are written where they lie; scalars and empty tensors pass."""
    source, strided, turned = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 6), torch.zeros(3, 2)
    collectives.broadcast([strided[:, ::2], source, turned.t()], root=1)
    assert torch.equal(strided, torch.tensor([[0.0, 0, 1, 0, 2, 0], [3, 0, 4, 0, 5, 0]]))
    assert torch.equal(turned, source.t())
    scalars = [torch.tensor(1), torch.tensor(2)]
    collectives.broadcast(scalars, root=1)
    assert scalars[0] == 2
    collectives.broadcast([torch.ones(0), torch.ones(0)])


def test_broadcast_keeps_a_nans_payload():
    """Nothing is computed on the way: the bits of a signalling NaN arrive as they are."""
    tensors = [torch.tensor([0x7FA00001], dtype=torch.int32).view(torch.float32), torch.zeros(1)]
    collectives.broadcast(tensors)
    assert tensors[1].view(torch.int32) == 0x7FA00001


def test_scatter_cuts_as_array_split_and_gather_undoes_it():
    """Pieces are numpy's, empty ones too; put together again they are the tensor, in memory of its own."""
    for count, size in itertools.product(range(1, 8), range(12)):
        tensor = torch.arange(size * 2).reshape(size, 2)
        pieces = collectives.scatter(tensor, ["cpu"] * count)
        expected = np.array_split(tensor.numpy(), count)
        assert [piece.tolist() for piece in pieces] == [part.tolist() for part in expected]
        whole = collectives.gather(pieces)
        assert torch.equal(whole, tensor)
        if size:
            assert memory(tensor) not in map(memory, [*pieces, whole])
            assert memory(whole) not in map(memory, pieces)


def test_another_cut_is_noticed():
    """Negative twin: torch.chunk cuts five rows for four devices into three pieces."""
    tensor = torch.arange(5)
    assert [len(piece) for piece in collectives.scatter(tensor, ["cpu"] * 4)] == [2, 1, 1, 1]
    assert len(torch.chunk(tensor, 4)) == 3


def test_copies_are_plain_tensors():
    """Scattered, gathered and reduced parameters require no grad, and the parameters stay as they are."""
    weight = torch.nn.Parameter(torch.arange(4.0))
    pieces = collectives.scatter(weight, ["cpu", torch.device("cpu")])
    made = [*pieces, collectives.gather([weight, weight]), *collectives.reduce_scatter([weight, weight])]
    assert not any(tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) for tensor in made)
    assert torch.equal(weight.detach(), torch.arange(4.0))


def test_one_piece_is_a_copy():
    """Even a single piece shares no memory with what it came from."""
    tensor = torch.ones(3)
    [piece] = collectives.scatter(tensor, ["cpu"])
    copies = [
        piece,
        collectives.gather([tensor]),
        *collectives.reduce_scatter([tensor]),
        *collectives.all_gather([tensor]),
    ]
    assert len({memory(one) for one in [tensor, *copies]}) == 5


@pytest.mark.cases(15)
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda item: str(item).removeprefix("torch."))
def test_reduce_scatter_is_a_piece_of_the_ring(op, dtype):
    """For vectors of any length, pieces have the bits of the ring's all_reduce; the tensors stay as they are."""
    for count, size in itertools.product((1, 2, 3, 5), (0, 1, 2, 7, 10)):
        tensors = wild(count, (size,), dtype, seed=size)
        before = [bits(tensor) for tensor in tensors]
        pieces = collectives.reduce_scatter(tensors, op)
        assert [bits(tensor) for tensor in tensors] == before
        collectives.all_reduce(tensors, op, "ring")
        expected = collectives.scatter(tensors[0], ["cpu"] * count)
        assert list(map(bits, pieces)) == list(map(bits, expected))
        assert {bits(whole) for whole in collectives.all_gather(pieces)} == {bits(tensors[0])}


def test_reduce_scatter_cuts_rows():
    """Matrices are cut along their first dimension, and a piece keeps no more memory than its own."""
    tensors = [torch.arange(10).reshape(5, 2) * scale for scale in (1, 10, 100)]
    pieces = collectives.reduce_scatter(tensors)
    assert [piece.tolist() for piece in pieces] == [
        part.tolist() for part in np.array_split(sum(tensor.numpy() for tensor in tensors), 3)
    ]
    assert all(piece.untyped_storage().nbytes() == piece.nbytes for piece in pieces)


def test_reduce_scatter_differs_from_the_fold():
    """Negative twin: the ring adds in its own order, and so pieces are not those of an ordered sum."""
    cases = [wild(6, (12,), torch.float32, seed) for seed in range(20)]
    for case in cases:
        pieces = collectives.gather(collectives.reduce_scatter(case))
        collectives.all_reduce(case, algorithm="ordered")
        if same_values(pieces) != same_values(case[0]):
            return
    pytest.fail("no case tells the ring from the fold")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2], ids=str)
def test_all_gather_gives_everybody_the_whole(dtype):
    """Pieces of any lengths, none included, come out one after the other, once per participant and each by itself."""
    for lengths in ([3], [0, 0], [1, 4, 0, 2], [0, 5, 1]):
        pieces = [torch.arange(2 * length).reshape(length, 2).to(dtype) for length in lengths]
        wholes = collectives.all_gather(pieces)
        expected = torch.cat(pieces)
        assert len(wholes) == len(pieces)
        assert all(torch.equal(whole.view(torch.uint8), expected.view(torch.uint8)) for whole in wholes)
        assert len(set(map(memory, wholes))) == len(wholes) or not len(expected)


def test_gather_takes_columns_and_conjugates():
    """Pieces that are views are gathered by value."""
    base = torch.complex(torch.arange(4.0), torch.ones(4)).reshape(2, 2)
    assert torch.equal(collectives.gather([base.t(), base.conj()]), torch.cat([base.t(), base.conj()]).resolve_conj())
    assert torch.equal(collectives.all_gather([base.t(), base.conj()])[1], torch.cat([base.t(), base.conj()]))
