"""Autograd adds the gradient of an odd replica onto its neighbour's; the bits are those of adding them afterwards."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.frameworks.torch.replica import gradient, lane
from tests.by_hand import answer
from tests.families import FAMILIES, output_only


class InParts(nn.Module):
    """One layer in two checkpoints, each of which runs a backward pass of its own: its gradient comes in two parts."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(20, 32), nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, x):
        h = self.first(x)
        for _ in range(2):
            h = checkpoint(self._layer, h, use_reentrant=True)
        return self.last(h)

    def _layer(self, h):
        return torch.tanh(self.again(h))


class Large(nn.Module):
    """The second part of an odd replica's gradient takes back what the first one added, which leaves nothing of 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        one = torch.ones((), requires_grad=True)
        return sum(checkpoint(self._part, one, part, use_reentrant=True) for part in x.unbind(1))

    def _part(self, one, part):
        return (one * self.weight * part).sum()


def large():
    """A sample for each of four replicas: 1 and 0, then 1e8 and -1e8."""
    x = torch.tensor([[1.0, 0.0], [1e8, -1e8]] * 2)[:, :, None]
    return recipe(Large, data=(x, torch.zeros(4)), loss_fn=output_only, batch_size=4, steps=2, shuffle=False)


def recipe(make_model, data=None, loss_fn=F.cross_entropy, **changes):
    x, y = torch.randn(64, 20, generator=torch.Generator().manual_seed(3)), torch.arange(64) % 5
    options = {"replicas": 4, "batch_size": 16, "steps": 6, "optimizer": torch.optim.SGD, **changes}
    return phalanx.Recipe(make_model, data or (x, y), loss_fn, **options)


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("made", [functools.partial(recipe, InParts), large])
@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_that_come_in_parts(workers, made):
    """A replica whose gradient autograd delivers in parts is computed again, and its neighbour too: same bits."""
    parts = made()
    engine = "inline" if workers == 1 else "processes"
    assert parts.train(workers=workers, engine=engine).digest == answer(parts)[0]


def test_parts_that_nobody_notices_are_found(monkeypatch):
    """Without the look at how often a sum was written, it would be 1 + 1e8 - 1e8 = 0, not 1 + (1e8 - 1e8) = 1."""
    monkeypatch.setattr(gradient, "_check_once", lambda *_: None)  # planted
    result = large().train(engine="inline")
    assert result.digest != answer(large())[0]
    assert result.params["weight"].tolist() == [0] * 3


@pytest.mark.usefixtures("computed_once")
def test_hooks_see_the_gradient_of_one_replica():
    """A hook of the model's own finds its replica's gradient in ``.grad``, not a sum, and may change it."""
    seen = []

    def halve(parameter):
        seen.append(parameter.grad.clone())
        parameter.grad.mul_(0.5)

    def make_model():
        model = nn.Linear(20, 5)
        model.weight.register_post_accumulate_grad_hook(halve)
        return model

    hooked = recipe(make_model, steps=1)
    digest = hooked.train(engine="inline").digest
    ours, seen[:] = seen[:], []
    assert digest == answer(hooked)[0]
    assert len(ours) == len(seen) == 4
    assert all(map(torch.equal, ours, seen))


def test_neighbours_that_weigh_something_else_are_not_joined(monkeypatch):
    """Only gradients that nothing is multiplied with are added by autograd; planted, it shows in the bits."""
    family = FAMILIES["mlp"].recipe(3, batch_size=10)
    expected = answer(family)[0]
    assert family.train(engine="inline").digest == expected
    monkeypatch.setattr(lane, "_weight", lambda *_: 1.0)  # planted
    assert family.train(engine="inline").digest != expected


@pytest.mark.usefixtures("computed_once")
def test_odd_replicas_are_joined(monkeypatch):
    """With shares of one size half of all gradients are added by autograd, never in a pass of their own."""
    joined = []
    backward = gradient.Collector.backward

    def watched(self, loss, onto=None, *others):
        joined.append(onto is not None)
        return backward(self, loss, onto, *others)

    monkeypatch.setattr(gradient.Collector, "backward", watched)
    recipe(lambda: nn.Linear(20, 5), steps=2, replicas=8).train(engine="inline")
    assert joined == [False, True] * 8


def test_an_error_between_two_that_join_changes_nothing():
    """A replica that raises in backward, with its neighbour's gradient at hand, leaves the state before the step."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, grad):
            if fails and len(passes) % 4 == 3:
                raise RuntimeError("broken")
            passes.append(1)
            return grad

    passes, fails = [], []
    failing = recipe(lambda: nn.Sequential(nn.Linear(20, 5), _Applied(Failing)))
    with failing.start(engine="inline") as run, warnings.catch_warnings():
        run.step()
        before = run.result().digest
        fails.append(1)
        with pytest.raises(phalanx.WorkerError, match="broken"):
            run.step()
        assert run.result().digest == before
        fails.clear()
        del passes[:]
        for _ in range(5):
            run.step()
        assert run.result().digest == answer(failing)[0]


class _Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)
