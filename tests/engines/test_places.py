"""Optimizer state has its places in shared memory before the first step: a trial finds what updates will make."""

import functools

import pytest
import torch
from torch import nn

from phalanx.errors import UsageError
from phalanx.frameworks.torch import optimizer_state
from phalanx.frameworks.torch.optimizer_state import OptimizerState, find_pieces
from phalanx.shared.layout import Spec, StatePiece
from tests.engines.deaths import Trapped
from tests.families import FAMILIES, OPTIMIZERS, mlp

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Updates:
    """What ``find_pieces`` looks at."""

    def __init__(self, *optimizers, foreign=False):
        self.optimizers, self.foreign = optimizers, foreign
        self.apart = self.custom = foreign


def parameters():
    """A matrix, its transpose's memory order, a vector, a scalar and nothing."""
    torch.manual_seed(1)
    shapes = torch.randn(6, 4), torch.randn(4, 6).t(), torch.randn(5), torch.randn(()), torch.randn(0, 3)
    return [(f"p{number}", nn.Parameter(value)) for number, value in enumerate(shapes)]


def made(name):
    """Named parameters and their optimizers; the default is Adam."""
    named = parameters()[: 4 if name == "adafactor" else None]  # which divides by the number of elements
    return named, [(OPTIMIZERS[name] or functools.partial(torch.optim.Adam, lr=0.01))(named)]


def kept(optimizers, values):
    """What optimizers keep now, as pieces."""
    return {
        (index, f"{number}.{key}"): optimizer_state._spec(leaf)
        for index, value in enumerate(values)
        for number, optimizer in enumerate(optimizers)
        for key, leaf in optimizer.state.get(value, {}).items()
    }


@pytest.mark.parametrize("small", [0, 1 << 20], ids=["by shape", "with zeros"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_found_is_what_an_update_makes(monkeypatch, name, small):
    """Names, shapes, strides and dtypes of all state; for SGD also the momentum that a scheduler may switch on."""
    monkeypatch.setattr(optimizer_state, "SMALL", small)
    named, optimizers = made(name)
    values = [value for _, value in named]
    found = {(piece.parameter, piece.name): piece.spec for piece in find_pieces(Updates(*optimizers), values)}
    for value in values:
        value.grad = torch.randn_like(value)
    for optimizer in optimizers:
        optimizer.step()
    wanted = kept(optimizers, values)
    if name in ("sgd", "sgd_maximize"):
        assert wanted == {}
        wanted = {(index, "0.momentum_buffer"): optimizer_state._spec(value) for index, value in enumerate(values)}
    assert found == wanted
    assert wanted


def test_state_of_other_options_is_found_too():
    """The comparison above can fail: with another option there is another array."""
    with_maximum, without = (
        {piece.name for piece in find_pieces(Updates(torch.optim.Adam([value], amsgrad=amsgrad)), [value])}
        for amsgrad in (True, False)
        for value in [parameters()[0][1]]
    )
    assert with_maximum - without == {"0.max_exp_avg_sq"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_finding_changes_nothing(name):
    """Weights, gradients, options, state, schedules and random generators are as they were."""
    named, optimizers = made(name)
    values = [value for _, value in named]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3) for optimizer in optimizers]

    def facts():
        states = [optimizer.state_dict() for optimizer in optimizers]
        own = [sorted(vars(optimizer)) for optimizer in optimizers]
        counts = [getattr(optimizer, "_opt_called", None) for optimizer in optimizers]
        weights = [(value._version, value.data_ptr(), value.grad, value.tolist()) for value in values]
        return repr((states, own, counts, weights, [item.state_dict() for item in schedulers]))

    before, random = facts(), torch.get_rng_state()
    find_pieces(Updates(*optimizers), values)
    assert facts() == before
    assert torch.equal(torch.get_rng_state(), random)


def test_existing_state_keeps_its_places():
    """After an update nothing else is found, in the order in which the optimizer keeps it."""
    named, optimizers = made("adam")
    values = [value for _, value in named]
    values[0].grad = torch.ones_like(values[0])
    first = find_pieces(Updates(*optimizers), values)
    optimizers[0].step()
    assert find_pieces(Updates(*optimizers), values) == first


def test_optimizers_from_elsewhere_have_no_places():
    """They may look at all parameters at once, so nothing is tried."""
    named, optimizers = made("adam")
    assert find_pieces(Updates(*optimizers, foreign=True), [value for _, value in named]) == []


def test_state_without_a_place_is_refused():
    """What no trial made would get lost with its worker: the error names it, and the way out."""
    value = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([value], lr=0.1)
    pieces = [StatePiece(0, "0.momentum_buffer", Spec((3,), (1,), "float32", 4))]
    state = OptimizerState(Updates(optimizer), [value], pieces)
    assert state.made([0]) == {}
    optimizer.state[value]["momentum_buffer"] = torch.ones(3, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"float64\[3\] where float32\[3\] .*engine='inline'"):
        state.made([0])
    optimizer.state[value] = {"momentum_buffer": torch.ones(3), "more": torch.ones(1)}
    with pytest.raises(UsageError, match=r"'more'.*engine='inline'"):
        state.made([0])


class LateMomentum(torch.optim.lr_scheduler.LambdaLR):
    """Switches momentum on after the fourth step."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, *arguments):
        super().step(*arguments)
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.9 if self.last_epoch >= 4 else 0.0


@pytest.mark.long
@pytest.mark.parametrize("place", [None, "COMPUTING", "half updated"])
def test_momentum_that_comes_later(tmp_path, place):
    """State that is first made in the fifth step has a place by then, also for who replaces its owner afterwards."""
    make_model = mlp if place is None else Trapped(mlp, tmp_path, 0, 6, place)
    changes = {"optimizer": SGD, "scheduler": LateMomentum, "steps": 8}
    recipe = FAMILIES["mlp"].recipe(3, make_model=make_model, **changes)
    wanted = FAMILIES["mlp"].recipe(3, **changes).train(engine="inline")
    assert recipe.train(engine="processes", workers=2).digest == wanted.digest
    plain = FAMILIES["mlp"].recipe(3, **{**changes, "scheduler": None}).train(engine="inline")
    assert plain.digest != wanted.digest
