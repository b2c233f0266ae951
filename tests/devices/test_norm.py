"""The norm that accelerators have for R > 1: that of the loop by hand, wherever a gradient is cut."""

import functools

import pytest
import torch
from torch import nn

import phalanx
from phalanx.frameworks.torch import norm
from phalanx.frameworks.torch.arithmetic import spec_of
from tests import accelerator, by_hand
from tests.by_hand import norm_by_pieces

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
LENGTHS = 0, 1, 5, 1000, norm.PIECE - 1, norm.PIECE, norm.PIECE + 1, 3 * norm.PIECE
# A long tensor in which an addition of another order ends in other bits: after the first square the others vanish.
FALLING = torch.tensor([1.0, 2.0**-13])[[0] + [1] * (4 * norm.PIECE - 1)]


def norm_of(gradient):
    return norm.norm_of_pieces(gradient, list(map(spec_of, gradient)), CPU)


def some(seed, dtypes):
    """Parameters with gradients of any lengths and sizes; some have none."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    parameters = [nn.Parameter(torch.zeros(drawn(LENGTHS), dtype=drawn(dtypes))) for _ in range(drawn(range(9)))]
    for parameter in parameters:
        if drawn(range(5)):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * drawn([1e-3, 1, 9])
    return parameters


def given(gradient):
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def both(parameters):
    """The norm, and that of the loop by hand, with their dtypes."""
    found = norm.norm_of_pieces([each.grad for each in parameters], list(map(spec_of, parameters)), CPU)
    return [(each.dtype, each.item()) for each in (found, norm_by_pieces(parameters))]


@pytest.mark.parametrize("wide", [[], [torch.float64], [torch.complex128]], ids=["narrow", "float64", "complex128"])
def test_it_is_that_of_the_loop_by_hand(wide):
    """Any lengths, dtypes and absent gradients."""
    for seed in range(15):
        found, wanted = both(some(seed, DTYPES + wide))
        assert found == wanted, seed


def test_it_is_close_to_torchs():
    """Up to rounding it is what torch has; of nothing, and of zeros, it is 0."""
    gradient = [each.grad for each in some(0, [torch.float32, torch.float64]) if each.grad is not None]
    assert norm_of(gradient).item() == pytest.approx(torch.nn.utils.get_total_norm(gradient).item())
    assert norm_of([]) == norm_of([torch.zeros(3)]) == norm_of([torch.zeros(0)]) == 0


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_cut_changes_no_bit(pieces):
    """A gradient in two slices has the norm of the whole. With pieces of another length it has another one."""
    cut = pieces * norm.PIECE
    for whole in (torch.randn(4 * norm.PIECE + 5, generator=torch.Generator().manual_seed(0)), FALLING):
        assert norm_of([whole]) == norm_of([whole[:cut], whole[cut:]])
    assert norm_of([FALLING]) == norm_by_pieces([given(FALLING)]) > norm_by_pieces([given(FALLING)], 1 << 20)


def test_elements_are_taken_as_the_parameter_lies():
    """Channels last or first, transposed or conjugated: a gradient with other strides has the same norm."""
    weight = torch.randn(32, 300, 5, 5, generator=torch.Generator().manual_seed(0))
    for parameter in (weight.to(memory_format=torch.channels_last), weight.transpose(0, 1)):
        spec = [spec_of(parameter)]
        found = norm.norm_of_pieces([parameter.contiguous()], spec, CPU)
        assert found == norm.norm_of_pieces([parameter], spec, CPU) == norm_by_pieces([given(parameter)])
    pairs = torch.randn(7, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert norm_of([pairs.conj()]) == norm_of([pairs.conj().resolve_conj()]) == norm_of([pairs])


def test_what_is_not_finite():
    """NaN and infinity are found, in any piece; no large gradient is that torch finds finite."""
    for value in (float("nan"), float("inf")):
        gradient = torch.zeros(2 * norm.PIECE)
        gradient[-1] = value
        assert not norm_of([gradient]).isfinite()
    large = torch.full((2 * norm.PIECE,), 5e16)
    assert torch.nn.utils.get_total_norm([large]).isfinite()
    assert norm_of([large]).isfinite()


class Scaled(nn.Module):
    """Multiplies what comes; the gradient of its weights is what came."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(FALLING)))

    def forward(self, x):
        return x * self.weight


@pytest.mark.long
@pytest.mark.accelerator
def test_runs_are_clipped_by_it(monkeypatch):
    """On one, two and three devices a run ends in the bits of the loop by hand, which another norm does not have."""
    accelerator.accelerator()
    recipe = phalanx.Recipe(
        Scaled, (FALLING.repeat(4, 1), torch.zeros(4)), lambda out, y: out.sum(), replicas=4, batch_size=4, steps=3,
        max_norm=0.1, optimizer=functools.partial(torch.optim.SGD, lr=1.0),
    )  # fmt: skip
    found = [recipe.train(devices=[f"fake:{number}" for number in range(count)]).digest for count in (1, 2, 3)]
    monkeypatch.setattr(by_hand, "clip_grad_norm_", by_hand.clip_by_pieces)
    assert found == [by_hand.answer(recipe)[0]] * 3
    monkeypatch.setattr(by_hand, "norm_by_pieces", functools.partial(norm_by_pieces, length=1 << 20))
    assert by_hand.answer(recipe)[0] != found[0]
