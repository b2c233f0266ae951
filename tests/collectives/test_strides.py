"""The collectives over tensors of any strides: dimensions of one element, turned, sliced, empty, without dimensions."""

import itertools
import os
import signal

import pytest
import torch

from phalanx import UsageError, collectives
from phalanx.backend.group import flattened, raw
from phalanx.frameworks.torch.arithmetic import bytes_of
from tests.collectives.oracles import ALGORITHMS, CASES, DTYPES, bits, reduced, same_values, wild

COUNT = 3
VIEWS = {  # of a base: its shape, and how it is seen
    "a row turned": ((1, 4), torch.t),
    "a column turned": ((4, 1), torch.t),
    "one element of a row": ((3, 4), lambda base: base[:1, 0]),
    "one row and one column": ((3, 4), lambda base: base[:1, :1]),
    "the first of every other": ((6,), lambda base: base[::2][:1]),
    "a dimension of any stride": ((6,), lambda base: base.as_strided((2, 1, 3), (3, 77, 1))),
    "a dimension of stride 0": ((6,), lambda base: base.as_strided((1, 6), (0, 1))),
    "expanded by one": ((5, 1), lambda base: base.expand(1, 5, 1)),
    "ones only": ((1, 1, 1), lambda base: base.as_strided((1, 1, 1), (5, 0, 9))),
    "turned": ((4, 3), torch.t),
    "turned twice": ((2, 3, 4), lambda base: base.permute(2, 0, 1)),
    "columns": ((4, 6), lambda base: base[:, ::2]),
    "rows": ((6, 4), lambda base: base[::2]),
    "a corner": ((5, 5), lambda base: base[1:3, 2:4]),
    "channels last": ((2, 3, 4, 1), lambda base: base.to(memory_format=torch.channels_last)),
    "channels last, one channel": ((2, 1, 3, 3), lambda base: base.to(memory_format=torch.channels_last)),
    "no dimension": ((), lambda base: base),
    "an element": ((4, 3), lambda base: base[2, 1]),
    "empty": ((0, 3), torch.t),
    "an empty slice": ((4, 3), lambda base: base[2:2, 1:]),
    "a diagonal": ((4, 4), lambda base: base.diagonal()),
}


def seen(name, dtype, seed=0):
    """Tensors that are views of larger ones, and the same tensors plain."""
    shape, view = VIEWS[name]
    tensors = [view(base) for base in wild(COUNT, shape, dtype, seed)]
    return tensors, [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def around(tensor):
    """The bytes of a tensor's storage that are not its own."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    own = torch.zeros(len(storage) // tensor.element_size(), dtype=torch.bool)
    own.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return storage[~own.repeat_interleave(tensor.element_size())].tolist()


@pytest.mark.cases(20)
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce(name, algorithm):
    """Every view has the oracle's reduction, in every dtype and operation; its neighbours in memory are as before."""
    for op, dtype in CASES:
        tensors, plain = seen(name, dtype)
        beside = [around(tensor) for tensor in tensors]
        compared = same_values if op in ("max", "min") else bits
        expected = compared(reduced(plain, op, algorithm))
        collectives.all_reduce(tensors, op, algorithm)
        assert [compared(tensor) for tensor in tensors] == [expected] * COUNT
        assert [around(tensor) for tensor in tensors] == beside


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_unlike_strides(algorithm):
    """Participants of one shape and unlike strides meet by index; met in another order the sum is another."""
    bases = [base for [base] in (wild(1, shape, torch.float32, 3) for shape in ((4, 1), (1, 4), (4, 4)))]
    tensors = [bases[0], bases[1].t(), bases[2][:, :1]]
    plain = [tensor.clone() for tensor in tensors]
    collectives.all_reduce(tensors, algorithm=algorithm)
    assert {bits(tensor) for tensor in tensors} == {bits(reduced(plain, "sum", algorithm))}
    assert bits(tensors[0]) != bits(reduced([plain[0].flip(0), *plain[1:]], "sum", algorithm))


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", VIEWS)
def test_copies(name):
    """broadcast, scatter, gather, reduce_scatter and all_gather see a view as they see its copy."""
    for dtype in DTYPES:
        tensors, plain = seen(name, dtype)
        expected = bits(plain[1])
        if tensors[0].ndim:
            pieces = [piece for tensor in (tensors[0], plain[0]) for piece in collectives.scatter(tensor, ["cpu"] * 2)]
            assert list(map(bits, pieces[:2])) == list(map(bits, pieces[2:]))
            assert bits(collectives.gather(tensors)) == bits(torch.cat(plain))
            assert [bits(whole) for whole in collectives.all_gather(tensors)] == [bits(torch.cat(plain))] * COUNT
            op = "max" if dtype == torch.bool else "sum"
            if not dtype.is_complex or op == "sum":
                reductions = [collectives.reduce_scatter(given, op) for given in (tensors, plain)]
                assert list(map(bits, reductions[0])) == list(map(bits, reductions[1]))
        collectives.broadcast(tensors, root=1)
        assert [bits(tensor) for tensor in tensors] == [expected] * COUNT


def test_one_element_as_bytes():
    """One element of any stride is bytes, in digests and for the backend."""
    for name, dtype in itertools.product(VIEWS, DTYPES):
        tensors, plain = seen(name, dtype)
        expected = plain[0].reshape(-1).view(torch.uint8)
        assert torch.equal(bytes_of(tensors[0]), expected)
        assert torch.equal(raw(flattened(tensors[0])), expected)
    negative = torch.tensor([1 + 2j]).conj().imag
    assert torch.equal(raw(flattened(negative)), torch.tensor([-2.0]).view(torch.uint8))
    assert not torch.equal(bytes_of(torch.ones(2)), bytes_of(torch.ones(2) * 2))


def test_what_cannot_be_written_is_refused_first():
    """Expanded tensors are refused before anything is written."""
    good = torch.ones(3)
    with pytest.raises(UsageError, match=r"tensors\[1\]"):
        collectives.all_reduce([good, torch.ones(1).expand(3)])
    assert torch.equal(good, torch.ones(3))
    with pytest.raises(UsageError, match=r"share memory and cannot be written"):
        flattened(torch.ones(1).expand(3), [])
    assert torch.equal(flattened(torch.ones(1).expand(3)), torch.ones(3))  # it may be sent


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ctrl_c_in_the_middle_comes_at_the_end(monkeypatch, algorithm):
    """KeyboardInterrupt is raised, and every tensor has the sum."""
    add, done = collectives.COMBINE["sum"], []

    def interrupted(mine, incoming):
        if not done:
            os.kill(os.getpid(), signal.SIGINT)
        done.append(1)
        return add(mine, incoming)

    monkeypatch.setitem(collectives.COMBINE, "sum", interrupted)
    tensors = [torch.full((2,), float(number)) for number in range(4)]
    with pytest.raises(KeyboardInterrupt):
        collectives.all_reduce(tensors, algorithm=algorithm)
    assert all(torch.equal(tensor, torch.full((2,), 6.0)) for tensor in tensors)
    assert len(done) > 1
