"""Wrong calls: each is named with its value and a way out, and no tensor was changed."""

import re

import numpy as np
import pytest
import torch

from phalanx import UsageError, collectives
from tests.collectives.oracles import ALGORITHMS, bits

IN_PLACE = [collectives.all_reduce, collectives.broadcast]


def one(*shape, **options):
    return torch.ones(shape, **options)


def windows():
    """Rows that overlap: each begins where the one before has its second element."""
    return torch.arange(8.0).as_strided((3, 2), (1, 1))


def places(tensor):
    """The addresses of a vector's elements."""
    return [item.data_ptr() for item in tensor]


def made_in_inference():
    with torch.inference_mode():
        return torch.ones(2)


LISTS = {
    "a bare tensor": (one(2, 3), "tensors is a Tensor; it must be a list of tensors"),
    "a generator": ((one(2) for _ in range(2)), "tensors is a generator; it must be a list"),
    "nothing": ([], "tensors is empty"),
    "None": ([one(2), None], "tensors[1] is None (NoneType); it must be a torch.Tensor"),
    "numpy": ([one(2), np.ones(2)], "tensors[1] is array([1., 1.]) (ndarray)"),
    "shapes": ([one(2), one(3)], "tensors[1] has shape (3,) and tensors[0] has (2,)"),
    "shapes that broadcast": ([one(2), one(1)], "tensors[1] has shape (1,)"),
    "dtypes": ([one(2), one(2).double()], "tensors[1] has dtype torch.float64 and tensors[0] has torch.float32"),
    "sparse": ([one(2).to_sparse(), one(2)], "tensors[0] is a torch.sparse_coo tensor"),
    "meta": ([one(2), one(2, device="meta")], "tensors[1] is a torch.strided tensor of torch.float32 on meta"),
}
UNWRITABLE = {
    "expanded": ([one(3), one(1).expand(3)], "tensors[1] has shape (3,) and strides (0,)"),
    "windows": ([windows(), one(3, 2)], "tensors[0] has shape (3, 2) and strides (1, 1)"),
    "inference": ([one(2), made_in_inference()], "tensors[1] was made in inference mode"),
}
SHARED = {
    "the same object": lambda base: [base[:4], one(4), base[:4]],
    "the same rows": lambda base: [one(4), base[2:6], base[2:6].detach()],
    "overlapping rows": lambda base: [one(4), base[:4], base[3:7]],
    "interleaved": lambda base: [one(3), base[::3], base[6:9]],
    "reversed in order": lambda base: [base[3:7], base[:4]],
    "around another": lambda base: [base[1:9:4], base[3:5], base[5:7]],
}


@pytest.mark.parametrize("operation", IN_PLACE)
@pytest.mark.parametrize("case", LISTS | UNWRITABLE)
def test_lists_that_cannot_be_are_refused(operation, case):
    """The entry is named, with what is wrong about it."""
    tensors, named = (LISTS | UNWRITABLE)[case]
    with pytest.raises(UsageError, match=re.escape(named)):
        operation(tensors)


@pytest.mark.parametrize("operation", IN_PLACE)
@pytest.mark.parametrize("case", SHARED)
def test_shared_memory_is_refused(operation, case):
    """Two entries that share an element are named, and not a bit of theirs is changed."""
    base = torch.arange(9.0)
    tensors = SHARED[case](base)
    with pytest.raises(UsageError, match=r"tensors\[\d\] and tensors\[\d\] share memory") as caught:
        operation(tensors)
    first, second = map(int, re.findall(r"tensors\[(\d)\]", str(caught.value)))
    assert first < second
    assert set(places(tensors[first])) & set(places(tensors[second]))
    assert torch.equal(base, torch.arange(9.0))


@pytest.mark.parametrize("operation", IN_PLACE)
def test_shared_numpy_memory_is_refused(operation):
    """Tensors over one numpy array share memory, although torch knows them as two storages."""
    array = np.ones(5, np.float32)
    with pytest.raises(UsageError, match="share memory"):
        operation([torch.from_numpy(array[:4]), torch.from_numpy(array[1:])])
    operation([torch.from_numpy(array[:2]), torch.from_numpy(array[2:4])])


def test_views_side_by_side_are_no_shared_memory():
    """Negative twin: interleaved columns, disjoint rows and empty slices of one tensor are separate participants."""
    base = torch.arange(12.0).reshape(3, 4)
    for tensors in (base.unbind(0), base.unbind(1), [base[:, ::2], base[:, 1::2]], [base[:0], base[:0]]):
        collectives.all_reduce(tensors)


def test_an_expanded_axis_of_one_element_is_writable():
    """A stride of zero over one element shares nothing."""
    tensors = [torch.ones(1).expand(1), torch.ones(1)]
    collectives.all_reduce(tensors)
    assert tensors[0] == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_bad_last_entry_changes_nothing(algorithm):
    """All checks come before the first write."""
    for last in (torch.ones(3), torch.ones(1).expand(2), None, torch.ones(2).double()):
        good = [torch.ones(2), torch.ones(2)]
        with pytest.raises(UsageError):
            collectives.all_reduce([*good, last], algorithm=algorithm)
        assert all(bits(tensor) == bits(torch.ones(2)) for tensor in good)


@pytest.mark.parametrize(
    ("dtype", "options", "named"),
    [
        (torch.float32, {"op": "median"}, "op is 'median'; it must be one of 'sum', 'mean', 'max', 'min'"),
        (torch.float32, {"algorithm": "star"}, "algorithm is 'star'; it must be one of 'ordered', 'ring', 'naive'"),
        (torch.float32, {"algorithm": "all_gather"}, "algorithm is 'all_gather'"),
        (
            torch.int64,
            {"op": "mean"},
            "op is 'mean', which torch cannot compute in torch.int64; take one of 'sum', 'max', 'min'",
        ),
        (torch.bool, {"op": "mean"}, "op is 'mean', which torch cannot compute in torch.bool"),
        (torch.bool, {"op": "sum"}, "op is 'sum', which torch cannot compute in torch.bool; take one of 'max', 'min'"),
        (
            torch.complex64,
            {"op": "max"},
            "op is 'max', which torch cannot compute in torch.complex64; take one of 'sum', 'mean'",
        ),
        (torch.uint64, {}, "op is 'sum', which torch cannot compute in torch.uint64"),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_operations_that_do_not_fit_are_refused(dtype, options, named, count):
    """Unknown names, and results that a dtype cannot hold, are refused for one tensor as for many."""
    with pytest.raises(UsageError, match=re.escape(named)):
        collectives.all_reduce([torch.ones(2).to(dtype) for _ in range(count)], **options)


@pytest.mark.parametrize("root", [-1, 2, True, 0.0, None])
def test_a_wrong_root_is_refused(root):
    """The root is an index from 0."""
    with pytest.raises(UsageError, match=re.escape(f"root is {root}; it must be an integer from 0 to 1")):
        collectives.broadcast([one(2), one(2)], root=root)


@pytest.mark.parametrize(
    ("devices", "named"),
    [
        ("cpu", "devices is 'cpu'; it must be a list of devices"),
        ([], "devices is []"),
        (2, "devices is 2"),
        (["cpu", "nowhere"], "devices[1] is 'nowhere', which torch cannot use here"),
        (["cpu", 1.5], "devices[1] is 1.5, which torch cannot use here"),
        (["cpu", "meta"], "devices[1] is 'meta', which torch cannot use here (it has no values)"),
    ],
)
def test_wrong_devices_are_refused(devices, named):
    """A bare name, no name, and names that torch does not know here."""
    with pytest.raises(UsageError, match=re.escape(named)):
        collectives.scatter(one(3), devices)


def test_a_wrong_device_to_gather_on_is_refused():
    """Gather names its device too."""
    with pytest.raises(UsageError, match="device is 'nowhere', which torch cannot use here"):
        collectives.gather([one(3)], device="nowhere")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: collectives.scatter(one(), ["cpu"]), "tensor has no dimension to cut along"),
        (lambda: collectives.scatter([1, 2], ["cpu"]), "tensor is [1, 2] (list); it must be a torch.Tensor"),
        (lambda: collectives.reduce_scatter([one(), one()]), "tensors[0] has no dimension to cut along"),
        (lambda: collectives.reduce_scatter([one(2), one(3)]), "tensors[1] has shape (3,)"),
        (lambda: collectives.reduce_scatter([one(2).long()], "mean"), "op is 'mean'"),
        (lambda: collectives.gather([one(2), one()]), "pieces[1] has no dimension to cut along"),
        (lambda: collectives.gather([one(2, 3), one(2, 4)]), "pieces[1] has shape (2, 4) and pieces[0] has (2, 3)"),
        (lambda: collectives.gather([one(0), one(2, 3)]), "pieces[1] has shape (2, 3) and pieces[0] has (0,)"),
        (lambda: collectives.gather([]), "pieces is empty"),
        (lambda: collectives.all_gather([one(2), one(2).long()]), "pieces[1] has dtype torch.int64"),
        (lambda: collectives.all_gather(one(2, 2)), "pieces is a Tensor"),
    ],
)
def test_pieces_that_cannot_be_are_refused(call, named):
    """What cannot be cut, or put together, is named."""
    with pytest.raises(UsageError, match=re.escape(named)):
        call()


def test_what_is_only_read_may_be_shared():
    """reduce_scatter, gather and all_gather change nothing, so the same tensor may come several times, expanded too."""
    tensor = torch.ones(1).expand(4)
    assert collectives.gather(collectives.reduce_scatter([tensor] * 3)).tolist() == [3.0] * 4
    assert collectives.gather([tensor] * 2).tolist() == [1.0] * 8
    assert collectives.all_gather([tensor] * 2)[1].tolist() == [1.0] * 8
