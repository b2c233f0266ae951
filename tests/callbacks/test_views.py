"""The run's model while it runs: views without copies, writes that are refused, weights on disk, eval mode."""

import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import phalanx
from phalanx.checkpoint.tensors import read_weights
from tests.callbacks.jobs import X, Y, make_model, recipe


@pytest.mark.parametrize("workers", [1, 2])
def test_views_are_the_state_after_the_last_step(workers):
    """run.params and run.model show each step's weights and buffers, in memory that is not copied."""
    with recipe(epochs=2).start(workers=workers) as run:
        places = set()
        for _ in run:
            model, params, result = run.model, run.params, run.result()
            assert all(torch.equal(params[name], value) for name, value in result.params.items())
            assert all(torch.equal(one, two) for one, two in zip(model.buffers(), result.model.buffers(), strict=True))
            places.add((params["0.weight"].data_ptr(), model[0].weight.data_ptr()))
    assert len(places) == 1, "the same memory after each step"
    assert torch.equal(run.params["0.weight"], result.params["0.weight"]), "also when it is closed"


def test_weights_on_disk_are_read_without_phalanx(tmp_path):
    """result.save writes what load_state_dict takes, tied and averaged weights too; another ending is refused."""
    result = recipe(epochs=1).train(callbacks=[phalanx.callbacks.EMA(0.5)])
    result.save(tmp_path / "model.safetensors")
    result.save(tmp_path / "model.safetensors")  # again, in its place
    result.save(tmp_path / "averaged.safetensors", averaged=True)
    safetensors = pytest.importorskip("safetensors.torch")
    model = make_model()
    model.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert phalanx.digest(model) == phalanx.digest(result.model)
    averaged = read_weights(tmp_path / "averaged.safetensors")
    assert all(torch.equal(averaged[name], value) for name, value in result.averaged.items())
    with pytest.raises(phalanx.UsageError, match=r"written as \.safetensors"):
        result.save(tmp_path / "model.pt")
    with pytest.raises(phalanx.UsageError, match="nothing was averaged"):
        recipe(epochs=1).train().save(tmp_path / "a.safetensors", averaged=True)


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x))


def test_tied_weights_are_saved_under_both_names(tmp_path):
    """load_state_dict is strict about names, so both are there."""
    result = phalanx.Recipe(Tied, (X, Y), F.cross_entropy, steps=1, replicas=2).train()
    result.save(tmp_path / "tied.safetensors")
    Tied().load_state_dict(read_weights(tmp_path / "tied.safetensors"))


@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}])
def test_a_model_in_eval_mode_is_refused(options):
    """As a whole, unless the recipe says that it is meant; a part of it may be in eval mode."""

    def evaluating():
        return make_model().eval()

    def partly():
        model = make_model()
        model[1].eval()
        return model

    with pytest.raises(phalanx.UsageError, match=r"in eval mode.*return model\.train\(\).*modes='as_made'"):
        phalanx.Recipe(evaluating, (X, Y), F.cross_entropy, steps=1).train(**options)
    made = functools.partial(phalanx.Recipe, data=(X, Y), loss_fn=F.cross_entropy, steps=2)
    assert made(evaluating, modes="as_made").train(**options).digest != made(make_model).train(**options).digest
    assert made(partly).train(**options).steps == 2


@pytest.mark.long
def test_an_optimizer_may_take_the_model():
    """A factory whose parameter is called model gets it, alone or behind the named parameters."""

    def groups(model):
        return torch.optim.SGD(
            [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[4].parameters()}], lr=0.2
        )

    def both(named, model):
        assert [name for name, _ in named] == [name for name, _ in model.named_parameters()]
        return groups(model)

    made = [recipe(epochs=1, optimizer=each, lr=1e-3) for each in (groups, both)]
    assert len({each.train(workers=workers).digest for each in made for workers in (1, 2)}) == 1


@pytest.mark.long
def test_lazy_modules_elsewhere_in_the_process_do_no_harm():
    """A tensor without memory, elsewhere in this process, does not keep a run's model from being looked at."""
    elsewhere = nn.LazyLinear(3)
    with FakeTensorMode():
        fake = torch.ones(3)
    with recipe().start(workers=2) as run:
        next(run)
        assert next(run.model.parameters()).shape == next(make_model().parameters()).shape
    assert nn.parameter.is_lazy(elsewhere.weight)
    assert fake.shape == (3,)
