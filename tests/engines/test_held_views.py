"""What lies in the memory of a weight and is no tensor: it is never freed, sees right values, or is refused by name."""

import functools
import gc
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.frameworks.torch import sharing
from tests.engines.moving import hurry, moves
from tests.state.runs import ROOT

X = torch.randn(48, 12, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()

HELD = {
    "numpy": lambda weight: weight.detach().numpy(),
    "part": lambda weight: weight.data.numpy()[3:],
    "dlpack": lambda weight: np.from_dlpack(weight.detach()),
    "storage": lambda weight: weight.untyped_storage(),
    "in a list": lambda weight: [{"view": weight.detach().numpy()}],
    "in a closure": lambda weight: functools.partial(np.sum, weight.detach().numpy()),
    "tensor of an array": lambda weight: torch.from_numpy(weight.detach().numpy()[2:]),
}
TENSORS = {
    "view": lambda weight: weight.detach()[1:],
    "of data": lambda weight: weight.data.t(),
    "rows": lambda weight: [*weight.detach()] * 100,  # more than are followed by name
    "set": lambda weight: {weight.detach()[1]},
    "closure": lambda weight: functools.partial(torch.clone, weight.detach()[2]),
    "of dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "looked at": lambda weight: (weight.detach().numpy().sum(), weight.detach())[1],
    "copy": lambda weight: weight.detach().numpy().copy(),
    "memoryview": lambda weight: memoryview(weight.detach().numpy().copy()),
}


def total(view):
    """Of whatever a model keeps."""
    if callable(view):
        return torch.as_tensor(view()).sum()
    if isinstance(view, torch.UntypedStorage):
        return torch.empty(0).set_(view).sum()
    if isinstance(view, (list, set)):
        return sum(total(each["view"] if isinstance(each, dict) else each) for each in view)
    return torch.as_tensor(np.array(view) if not isinstance(view, torch.Tensor) else view).sum()


class Net(nn.Module):
    """Its forward looks at what it keeps of a weight."""

    def __init__(self, kept, frozen):
        super().__init__()
        self.base, self.head = nn.Linear(12, 12), nn.Linear(12, 2)
        self.base.weight.requires_grad_(not frozen)
        self.kept = kept(self.base.weight)

    def forward(self, x):
        return self.head(torch.tanh(self.base(x) + total(self.kept)))


def recipe(kept, frozen, **changes):
    make = functools.partial(Net, kept, frozen)
    return phalanx.Recipe(make, (X, Y), F.cross_entropy, **{"replicas": 2, "batch_size": 16, "steps": 6, **changes})


def facts(result):
    return result.digest, result.loss_history


@pytest.mark.long
@pytest.mark.parametrize("what", HELD)
def test_of_a_frozen_weight_a_model_may_keep_anything(what):
    """Its bytes do not change, so the weight stays where it is: the bits of one process. Another seed: others."""
    made = recipe(HELD[what], frozen=True)
    alone = made.train(engine="inline")
    assert facts(made.train(workers=2, engine="processes")) == facts(alone)
    assert facts(recipe(HELD["numpy"], frozen=True, seed=1).train(engine="inline")) != facts(alone)


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("what", HELD)
def test_of_a_trained_weight_it_is_refused_by_name(what):
    """With the weight, and the advice, which helps."""
    made = recipe(HELD[what], frozen=False)
    words = r"model\.kept.* lies in the memory of the weight 'base\.weight'.*weight\.detach\(\)"
    with pytest.raises(phalanx.UsageError, match=words):
        made.train(workers=2, engine="processes")


@pytest.mark.long
def test_the_advice_helps():
    """A tensor of the weight, of which forward makes an array: other values in each step, the same in each engine."""

    class Advised(Net):
        def forward(self, x):
            return self.head(torch.tanh(self.base(x) + float(self.kept.numpy().sum())))

    made = recipe(nn.Parameter.detach, frozen=False).replace(make_model=lambda: Advised(nn.Parameter.detach, False))
    assert facts(made.train(workers=2, engine="processes")) == facts(made.train(engine="inline"))


@pytest.mark.long
def test_a_run_that_would_move_stays(monkeypatch):
    """By default it goes on in this process, and says why."""
    made = recipe(HELD["numpy"], frozen=False, steps=12)
    hurry(monkeypatch, made)
    with pytest.warns(UserWarning, match=r"goes on in this process.*model\.kept"):
        counts, result = moves(made)
    assert set(counts) == {1}
    assert facts(result) == facts(made.train(engine="inline"))


@pytest.mark.long
@pytest.mark.parametrize("what", TENSORS)
@pytest.mark.parametrize("frozen", [False, True])
def test_tensors_follow_the_weight(what, frozen):
    """Wherever the model keeps them; a copy stays a copy, and an array that is gone again does no harm."""
    made = recipe(TENSORS[what], frozen)
    assert facts(made.train(workers=2, engine="processes")) == facts(made.train(engine="inline"))


def test_a_tensor_that_is_left_behind_is_seen():
    """Negative twin: in workers that move parameters alone, the view sees the first weights in every step."""

    def make():
        if os.getpid() != parent:
            gc.get_objects = list  # planted
            sharing._held = lambda tensors: {}  # planted
        return Net(TENSORS["view"], False)

    parent = os.getpid()
    made = recipe(TENSORS["view"], frozen=False)
    planted = made.replace(make_model=make).train(workers=2, engine="processes")
    assert facts(planted) != facts(made.train(engine="inline"))


CALLER = """
import gc
import numpy as np, torch, phalanx
from tests.engines.test_held_views import CALLERS, F, Y, as_array, nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lin = nn.Embedding(5000, 64), nn.Linear(64, 2)
        self.emb.weight.requires_grad_(False)
    def forward(self, x):
        return self.lin(self.emb(x))
def trained(make, **options):
    torch.manual_seed(0)
    model = Net()
    view = make(model.emb.weight)
    want = model.emb.weight.detach().numpy().copy()
    x = torch.arange(48) * 100
    recipe = phalanx.Recipe(lambda: model, (x, Y), F.cross_entropy, replicas=2, batch_size=16, steps=6)
    with recipe.start(**options) as run:
        run.finish()
        junk = [torch.full((5000, 64), 7.0) for _ in range(4)]
        assert np.array_equal(as_array(view), want), as_array(view)[0, :4]
        digest = run.result().digest
    del junk
    assert np.array_equal(as_array(view), want)
    return digest
digests = {trained(CALLERS["tensor"], engine="inline")}
for name, make in CALLERS.items():
    digests.add(trained(make, workers=2))
    print(name, len(digests), flush=True)
    assert len(digests) == 1
gc.freeze()
before = gc.get_freeze_count()
digests.add(trained(CALLERS["numpy"], workers=2))
assert len(digests) == 1
assert gc.get_freeze_count() > before // 2, "what the user froze stays frozen"
"""
CALLERS = {
    "numpy": lambda weight: weight.detach().numpy(),
    "of the parameter": lambda weight: weight.numpy(),
    "part": lambda weight: weight.data.numpy()[:],
    "dlpack": lambda weight: np.from_dlpack(weight.detach()),
    "dlpack of the parameter": lambda weight: np.from_dlpack(weight),
    "storage": lambda weight: weight.untyped_storage(),
    "memoryview": lambda weight: memoryview(weight.detach().numpy()),
    "tensor": lambda weight: weight.detach(),
}


def as_array(view):
    """Numbers that somebody sees."""
    if isinstance(view, torch.UntypedStorage):
        return torch.empty(0).set_(view).view(5000, 64).numpy()
    return np.asarray(view)


@pytest.mark.longest
def test_what_the_caller_holds_keeps_its_memory():
    """Views of a frozen weight equal the table during the run and after it; all digests are equal; no crash."""
    command = [sys.executable, "-c", CALLER]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
