"""Where a shorter way through torch is taken, it leads to the same bits as the long one."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.definition.data import Columns
from phalanx.frameworks.torch import arithmetic
from phalanx.frameworks.torch.replica import feed, gradient

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
DIVISORS = [
    2.0,
    8.0,
    0.25,
    -2.0,
    2.0**-20,
    2.0**40,
    3.0,
    6.0,
    0.1,
    17.25,
    math.inf,
    2.0**70,
    2.0**-80,
    2.0**130,
    2.0**-130,
]


class Marked(torch.Tensor):
    """A tensor of a library's own."""


def pictures():
    return torch.arange(10 * 3 * 4 * 4, dtype=torch.float32).reshape(10, 3, 4, 4)


WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64]


def numbers(kind):
    return torch.arange(10).to(kind)


COLUMNS = {
    "rows": lambda: torch.arange(30.0).reshape(10, 3),
    "numbers": lambda: torch.arange(10),
    "none wide": lambda: torch.zeros(10, 0),
    "bool": lambda: torch.arange(10) % 3 == 0,
    "bfloat16": lambda: torch.randn(10, 5).bfloat16(),
    "float8": lambda: torch.randn(10, 5).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.arange(20).reshape(10, 2).to(torch.uint16),
    "complex": lambda: torch.randn(10, 2, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(10, 2, dtype=torch.complex64).conj(),
    "pictures": pictures,
    "channels last": lambda: pictures().contiguous(memory_format=torch.channels_last),
    "gray pictures": lambda: pictures()[:, :1].contiguous(),
    "gray, channels last": lambda: torch.arange(160.0).reshape(10, 4, 4, 1).permute(0, 3, 1, 2),
    "one long axis": lambda: torch.arange(30.0).reshape(10, 1, 3).transpose(1, 2),
    **{f"numbers as {kind}": functools.partial(numbers, kind) for kind in WHOLE},
    "turned": lambda: torch.arange(30.0).reshape(3, 10).t(),
    "cut": lambda: torch.arange(60.0).reshape(10, 6)[:, ::2],
    "repeated": lambda: torch.arange(10.0)[:, None].expand(10, 4),
    "a class of its own": lambda: torch.arange(30.0).reshape(10, 3).as_subclass(Marked),
    "trained": lambda: torch.arange(30.0).reshape(10, 3).requires_grad_(),
}


def rows_of(column):
    """How a share's rows of one column come to user code."""
    opened = feed.opened(Columns((column,), tuple))
    return opened.rows(opened.arrays, np.array([7, 0, 0, 9]))[0]


@pytest.mark.parametrize("name", COLUMNS)
def test_rows_are_those_of_indexing(name):
    """A share's rows have the values, dtype, strides and class that ``column[rows]`` has."""
    column = COLUMNS[name]()
    found, wanted = rows_of(column), column[torch.tensor([7, 0, 0, 9])]
    assert (type(found), found.dtype, found.stride()) == (type(wanted), wanted.dtype, wanted.stride())
    assert found.requires_grad == wanted.requires_grad
    assert type(found.grad_fn) is type(wanted.grad_fn)
    assert found.is_conj() == wanted.is_conj()
    assert repr(found.tolist()) == repr(wanted.tolist())


class Hears(torch.Tensor):
    """Keeps which functions were called with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.heard.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_of_its_own_is_indexed():
    """A column whose class overrides torch's functions hears of indexing, as it would in a loop by hand."""
    Hears.heard = []
    rows_of(torch.arange(30.0).reshape(10, 3).as_subclass(Hears))
    assert torch.Tensor.__getitem__ in Hears.heard


def test_selecting_all_rows_alike_would_lay_some_out_otherwise(monkeypatch):
    """Pictures with their channels last would lose their strides, which convolutions choose their kernel by."""
    monkeypatch.setattr(feed, "_selectable", lambda _: True)  # planted
    column = COLUMNS["channels last"]()
    assert rows_of(column).stride() != column[torch.tensor([7, 0, 0, 9])].stride()


LOSSES = {
    "scalar": lambda model, x: model(x).square().mean(),
    "one entry": lambda model, x: model(x).sum().reshape(1),
    "one by one": lambda model, x: model(x).sum().reshape(1, 1),
    "a parameter itself": lambda model, x: model.bias.sum() if len(model.bias) > 1 else model.bias,
    "of its own class": lambda model, x: model(x).sum().as_subclass(Marked),
    "nothing reached": lambda model, x: torch.zeros((), requires_grad=True) * 2,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("width", [1, 4])
def test_a_backward_pass_is_torchs(name, width):
    """Gradients are those of ``torch.autograd.backward``, bit for bit, whatever scalar the loss is."""
    torch.manual_seed(3)
    model, x = nn.Linear(6, width), torch.randn(5, 6)
    named = list(model.named_parameters())
    torch.autograd.backward(LOSSES[name](model, x))
    wanted = gradient.take(named)
    found = gradient.Collector(named, written=False).backward(LOSSES[name](model, x))
    assert [None if grad is None else grad.tolist() for grad in found] == [
        None if grad is None else grad.tolist() for grad in wanted
    ]


def test_a_class_of_its_own_hears_of_the_backward_pass():
    """A loss whose class overrides torch's functions is asked, as ``torch.autograd.backward`` asks it."""
    Hears.heard = []
    model = nn.Linear(6, 1)
    loss = model(torch.randn(5, 6)).sum().as_subclass(Hears)
    gradient.Collector(list(model.named_parameters()), written=False).backward(loss)
    assert torch.autograd.backward in Hears.heard


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("divisor", DIVISORS)
def test_a_power_of_two_divides_by_multiplying(divisor, dtype, flush):
    """Any bits, denormal ones too, divided: the bits of ``div_``; where both are no number, either will do."""
    limits = torch.iinfo(BITS[dtype])
    values = torch.randint(limits.min, limits.max, (20_000,), dtype=BITS[dtype]).view(dtype)
    torch.set_flush_denormal(flush)
    try:
        wanted = values.clone().div_(divisor)
        (found,) = arithmetic.divide([values.clone()], divisor)
    finally:
        torch.set_flush_denormal(False)
    assert found is not None
    same = found.view(BITS[dtype]) == wanted.view(BITS[dtype])
    assert (same | (found.isnan() & wanted.isnan())).all()


def test_the_callers_default_device_decides_nothing():
    """A scalar that is kept lies on the CPU, also where the first division was made under another default device."""
    arithmetic._factor.cache_clear()
    for device in ("meta", "cpu"):
        with torch.device(device):
            (found,) = arithmetic.divide([torch.ones(4, device="cpu")], 2.0)
        assert found is not None
        assert found.tolist() == [0.5] * 4


def test_an_inverse_that_is_rounded_would_be_another_answer():
    """By a third instead of over three: 5 comes to another last bit, so that only powers of two may become factors."""
    values = torch.tensor([5.0])
    assert not torch.equal(values / 3.0, values * (1 / 3.0))
