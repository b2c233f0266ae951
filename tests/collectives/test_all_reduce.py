"""all_reduce against numpy: every algorithm, dtype, operation and size; and the mistakes of others that it avoids."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import collectives
from phalanx.collectives import schedule
from phalanx.plan.fold import fold_values
from tests.collectives.oracles import ALGORITHMS, CASES, COMPLEX, FLOATS, OPS, bits, reduced, same_values, wild
from tests.orders import triples

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def all_reduced(tensors, op, algorithm):
    """The result, which all participants must hold with equal bits; the tensors given stay as they are."""
    own = [tensor.clone() for tensor in tensors]
    assert collectives.all_reduce(own, op=op, algorithm=algorithm) is None
    assert len({bits(tensor) for tensor in own}) == 1
    return own[0]


@pytest.mark.cases(15)
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda item: str(item).removeprefix("torch."))
@settings(deadline=None, max_examples=15, derandomize=True)
@given(count=st.integers(1, 9), shape=SHAPES, seed=st.integers(0, 10_000), special=st.booleans())
def test_every_case_is_the_oracles(op, dtype, count, shape, seed, special):
    """Sums and means have the bits of a numpy loop in the promised order; max and min its values, NaN included."""
    special = special and not dtype.is_complex  # what complex numbers with infinite parts come to is hardware's choice
    tensors = wild(count, shape, dtype, seed, special)
    compared = same_values if op in ("max", "min") else bits
    for algorithm in ALGORITHMS:
        assert compared(all_reduced(tensors, op, algorithm)) == compared(reduced(tensors, op, algorithm))


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *COMPLEX, torch.int64], ids=str)
@settings(deadline=None, max_examples=30, derandomize=True)
@given(count=st.integers(1, 17), seed=st.integers(0, 10_000))
def test_ordered_is_the_fold(dtype, count, seed):
    """The bits of "ordered" are those of the fold over the tensors."""
    tensors = wild(count, (5,), dtype, seed)
    assert bits(all_reduced(tensors, "sum", "ordered")) == bits(fold_values(tensors, torch.add))


def test_algorithms_differ_in_bits():
    """Negative twin: for numbers that show the order, the three orders of addition give three different sums."""
    tensors = list(torch.tensor(triples(6)))
    assert len({bits(all_reduced(tensors, "sum", algorithm)) for algorithm in ALGORITHMS}) == 3


def test_accumulating_in_half_precision_differs():
    """Negative twin: rounding after every addition, not once, loses 1 twice."""
    for dtype in (torch.float16, torch.bfloat16):
        large = 2 / torch.finfo(dtype).eps  # the next number is 2 larger
        case = [torch.tensor([value], dtype=dtype) for value in (large, 1.0, 1.0)]
        assert all_reduced(case, "sum", "ordered").item() == large + 2
        assert fold_values(case, torch.add).item() == large


@pytest.mark.cases(4)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_close_to_exact_ones(algorithm, dtype):
    """Whatever the order, n-1 additions are off by (n-1)u/(1-(n-1)u) of the sum of magnitudes at most (Higham, 4.2)."""
    for count, seed in itertools.product((2, 3, 8, 17), range(5)):
        tensors = wild(count, (50,), dtype, seed)
        exact = np.sum([tensor.double().numpy().astype(np.longdouble) for tensor in tensors], axis=0)
        magnitude = np.sum([tensor.double().abs().numpy() for tensor in tensors], axis=0)
        unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
        bound = (count - 1) * unit / (1 - (count - 1) * unit) * magnitude
        rounding = torch.finfo(dtype).eps / 2 * (abs(exact) + bound) + torch.finfo(dtype).smallest_normal
        error = abs(all_reduced(tensors, "sum", algorithm).double().numpy() - exact)
        assert np.all(error <= bound + rounding * (unit != torch.finfo(dtype).eps / 2))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_size_and_count(algorithm):
    """Up to 9 participants and 20 elements, divisible or not, fewer than participants, one or none: exact sums."""
    for count, size in itertools.product(range(1, 10), range(21)):
        tensors = wild(count, (size,), torch.int64, seed=size)
        assert torch.equal(all_reduced(tensors, "sum", algorithm), torch.stack(tensors).sum(0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eighths_are_rounded_once(algorithm, dtype):
    """Floats of eight bits are added up in float32 too, and rounded at the end."""
    tensors = [torch.tensor([1.0, 16.0, -0.0]).to(dtype) for _ in range(5)]
    expected = torch.tensor([5.0, 80.0, -0.0]).to(dtype)
    assert torch.equal(all_reduced(tensors, "sum", algorithm).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_negative_zeros_stay_negative(algorithm):
    """Nothing is added to a zero: -0 + -0 is -0, for sums and means."""
    for op in ("sum", "mean"):
        assert all_reduced([torch.tensor([-0.0])] * 3, op, algorithm).signbit().all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins(op, algorithm):
    """A NaN of any participant is the maximum and the minimum, wherever it stands."""
    for place in range(4):
        tensors = [torch.tensor([torch.nan if index == place else float(index)]) for index in range(4)]
        assert all_reduced(tensors, op, algorithm).isnan().all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_participant_is_left_alone(algorithm):
    """A sum or mean over one tensor changes no bit of it, not even of a NaN's payload."""
    for op in OPS:
        tensor = torch.tensor([0x7FA00001, 0x7FC12345], dtype=torch.int32).view(torch.float32)
        before = tensor.view(torch.int32).clone()
        collectives.all_reduce([tensor], op=op, algorithm=algorithm)
        assert torch.equal(tensor.view(torch.int32), before)


def test_what_is_explained_is_what_runs(monkeypatch):
    """all_reduce carries out the very list that schedule gives: without its last transfer, somebody lacks the sum."""
    for algorithm in ALGORITHMS:
        tensors = [torch.full((4,), 2.0**index) for index in range(4)]
        with monkeypatch.context() as patched:
            patched.setattr(collectives, "schedule", lambda *arguments: schedule(*arguments)[:-1])
            collectives.all_reduce(tensors, algorithm=algorithm)
        assert len({bits(tensor) for tensor in tensors}) == 2


def test_defaults_are_an_ordered_sum():
    """Without op and algorithm it is the sum, in the fold's order."""
    tensors = wild(7, (9,), torch.float32, seed=3)
    expected = all_reduced(tensors, "sum", "ordered")
    collectives.all_reduce(tensors)
    assert bits(tensors[0]) == bits(expected)


# In place, whatever the tensor


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_callers_tensors_are_written(algorithm):
    """Not the list's entries: names that were bound before see the sum, and the list holds the same objects."""
    mine, other = torch.ones(3), torch.ones(3) * 2
    listed = [mine, other]
    collectives.all_reduce(listed, algorithm=algorithm)
    assert listed[0] is mine
    assert listed[1] is other
    assert torch.equal(mine, torch.full((3,), 3.0))
    assert torch.equal(other, mine)


def test_a_tuple_is_written_too():
    """Nothing is put into the list, so a tuple will do."""
    pair = torch.ones(2), torch.ones(2)
    collectives.all_reduce(pair)
    assert torch.equal(pair[1], torch.full((2,), 2.0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_views_of_any_strides_are_written(algorithm):
    """Transposed, strided, conjugated and channels-last tensors get the mean where they lie."""
    views = {
        "transposed": lambda base: base.t(),
        "strided": lambda base: base[::2, 1::2],
        "conjugated": lambda base: base.conj(),
        "conjugated and transposed": lambda base: base.t().conj(),
        "imaginary": lambda base: base.conj().imag,
        "channels last": lambda base: base.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    for view in views.values():
        bases = wild(3, (4, 6), torch.complex64, seed=1)
        tensors = [view(base) for base in bases]
        expected = reduced(
            [tensor.clone().resolve_conj().resolve_neg().contiguous() for tensor in tensors], "mean", algorithm
        )
        collectives.all_reduce(tensors, op="mean", algorithm=algorithm)
        assert all(bits(tensor) == bits(expected) for tensor in tensors)


def test_rows_and_columns_of_one_tensor_may_take_part():
    """Views of one storage that share no element are separate participants."""
    whole = torch.arange(12.0).reshape(3, 4)
    expected = whole.sum(1, keepdim=True).expand(3, 4).clone()
    collectives.all_reduce(whole.unbind(1))
    assert torch.equal(whole, expected)
    collectives.all_reduce(whole.unbind(0))
    assert torch.equal(whole, expected.sum(0).expand(3, 4))


def test_leaves_that_require_grad_take_part():
    """Parameters are written in place, stay leaves, and nothing is recorded."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    collectives.all_reduce(parameters, op="mean")
    collectives.all_reduce(parameters)
    assert all(one.is_leaf and one.requires_grad and one.grad_fn is None for one in parameters)
    assert torch.equal(parameters[0].detach(), torch.full((3,), 2.0))


def test_autograd_notices_the_write():
    """A tensor that backward still needs counts as changed, as after any write in place."""
    weight = torch.ones(3, requires_grad=True)
    saved = weight.exp()
    collectives.all_reduce([saved, torch.ones(3)])
    with pytest.raises(RuntimeError, match="inplace"):
        saved.sum().backward()


# Mistakes of others


def test_double_precision_stays():
    """1 + 1e-12 in float64 comes back as it is, where a cast to float32 on the way would give 1."""
    tensors = [torch.tensor([1 + 1e-12], dtype=torch.float64) for _ in range(2)]
    assert all_reduced(tensors, "mean", "ring").item() == 1 + 1e-12
    assert tensors[0].float().double().item() == 1
