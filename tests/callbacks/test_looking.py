"""run.model is for looking: another module over the same memory, the same in every engine."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.engines.moving import hurry

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
LOOKED = 3  # the step after which a callback looks
ENGINES = {"inline": {"engine": "inline"}, "workers": {"workers": 2}, "auto": {}}


class Net(nn.Module):
    """A frozen layer, a module in eval mode, dropout, batch norm, plain attributes; keeps what forward comes by."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), Last(16, 2)
        self.first.requires_grad_(False)
        self.norm.eval()
        self.scale, self.calls, self.attention, self.maps = 1.0, 0, None, []
        self.row = self.last.weight.data[0]  # a view of a weight

    def forward(self, x):
        self.calls += 1
        inner = F.relu(self.norm(self.first(x)))
        self.attention = torch.softmax(inner, 1)  # with its history, which cannot be deep-copied
        self.maps = [self.attention]
        return self.scale * self.last(self.drop(inner))


class Last(nn.Linear):
    """A layer with an attribute that its class has."""

    bound = 8.0

    def forward(self, x):
        return super().forward(x).clamp(-self.bound, self.bound)


def recipe(make_model=Net, **changes):
    return phalanx.Recipe(make_model, (X, Y), F.cross_entropy, replicas=2, batch_size=16, steps=8, **changes)


@pytest.fixture(params=ENGINES)
def options(request, monkeypatch):
    """Where a run computes; "auto" hands over to workers after its first steps."""
    if request.param == "auto":
        hurry(monkeypatch, recipe())
    return ENGINES[request.param]


def train(options, change, way):
    """A run of which ``change(run.model)`` is called once, by a callback or in a loop."""

    def callback(report):
        if report.step == LOOKED:
            change(run.model)

    with recipe().start(callbacks=[callback] if way == "callback" else [], **options) as run:
        for report in run:
            if way == "loop":
                callback(report)
        return run.result()


def forget(model):
    del model.scale


def assign(name, value):
    return lambda model: setattr(model, name, value)


CHANGES = {
    "thaw": (lambda model: model.first.requires_grad_(True), r"'first\.weight' was frozen or thawed"),
    "freeze": (lambda model: model.last.requires_grad_(False), r"'last\.weight' was frozen or thawed"),
    "a weight": (lambda model: nn.init.zeros_(model.last.bias), r"'last\.bias' was written"),
    "written": (lambda model: model.norm.running_var.zero_(), r"'norm\.running_var' was written"),
    "statistics": (lambda model: model.norm.train()(torch.ones(4, 16)), r"'norm\.\w+' was written"),
}


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("way", ["callback", "loop"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_is_refused_before_the_next_step(options, change, way):
    """The same in every engine: the sentence names what, the step did not begin, and there are ways out."""
    changed, told = CHANGES[change]
    with pytest.raises(phalanx.UsageError, match=told) as caught:
        train(options, changed, way)
    assert "warm_start" in str(caught.value)
    assert "make_model" in str(caught.value)


UNSEEN = {
    "eval": lambda model: model.eval(),
    "train": lambda model: model.train(),
    "dropout": lambda model: setattr(model.drop, "p", 0.9),
    "attribute": assign("scale", 2),
    "removed": forget,
    "of its class": lambda model: setattr(model.last, "bound", 0.1),
    "hook": lambda model: model.last.register_forward_hook(lambda *_: None),
    "module": assign("last", nn.Linear(16, 2)),
    "parameter": lambda model: setattr(model.last, "bias", None),
    "buffer": lambda model: setattr(model.norm, "running_mean", torch.ones(16)),
}


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["callback", "loop"])
@pytest.mark.parametrize("change", UNSEEN)
def test_what_else_is_changed_has_no_effect(options, change, way):
    """The same in every engine: it is another module than the one that is trained, evaluated and in the result."""
    assert train(options, UNSEEN[change], way).digest == recipe().train(engine="inline").digest


def look(model):
    """All that may be done with a model: call it, in eval mode, and put the modes back."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad():
        model.eval()(X)
    handle = model.register_forward_hook(lambda *_: None)
    handle.remove()
    for module, mode in modes:
        module.train(mode)
    model.scale = 2.0
    model.scale = 1.0
    assert torch.equal(model.row, model.last.weight[0])


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("way", ["callback", "loop"])
def test_who_only_looks_changes_nothing(options, way):
    """A run whose model is called, and whose modes are put back, ends in the digest of one that nobody looks at."""
    assert train(options, look, way).digest == recipe().train(engine="inline").digest


@pytest.mark.long
@pytest.mark.cases(1)
def test_changes_after_the_last_step_are_not_in_the_result(options):
    """result.model is the trained one, or a copy of that."""
    with recipe().start(**options) as run:
        run.finish()
        shown = run.model
        shown.eval().requires_grad_(True)
        shown.scale = 2.0
        result = run.result()
    for model in (result.model, run.result().model):
        assert (model.training, model.norm.training, model.scale) == (True, False, 1.0)
        assert not model.first.weight.requires_grad
    assert result.digest == run.result().digest == recipe().train(engine="inline").digest


@pytest.mark.cases(1)
def test_who_keeps_the_model_is_refused_later(options):
    """It was asked for before the first step, and is changed later."""
    with recipe().start(**options) as run:
        model = run.model
        while run.steps <= LOOKED:
            run.step()
        model.first.requires_grad_(True)
        with pytest.raises(phalanx.UsageError, match=r"'first\.weight' was frozen or thawed"):
            run.step()
        assert run.steps == LOOKED + 1
        model.first.requires_grad_(False)
        run.finish()
        assert run.result().digest == recipe().train(engine="inline").digest


@pytest.mark.long
@pytest.mark.cases(1)
def test_it_is_one_object_and_shows_the_state(options):
    """As long as nothing moves, the model is the same object, and no part of it that of the result."""
    with recipe().start(**options) as run:
        engines = {}
        for _ in run:
            model, result = run.model, run.result()
            engines.setdefault(bool(run.worker_pids), set()).add(id(model))
            states = zip(model.state_dict().values(), result.model.state_dict().values(), strict=True)
            assert all(torch.equal(one, other) for one, other in states)
            assert torch.equal(run.params["last.weight"], model.last.weight)
            run.params.clear()  # a dict of the caller's own
    assert all(len(models) == 1 for models in engines.values())
    assert run.model is not run.result().model
    assert len(run.params) == len(list(run.model.parameters()))


class Locked(Net):
    """Cannot be copied once it has run."""

    def forward(self, x):
        self.lock = threading.Lock()
        return super().forward(x)


def test_a_model_that_cannot_be_copied_is_refused_by_name():
    """Its parameters may be looked at all the same: averages need no copy."""
    alone = recipe(Locked)
    result = alone.train(engine="inline", callbacks=[phalanx.callbacks.EMA(0.5)])
    assert result.averaged.keys() == result.params.keys()
    with alone.start(engine="inline") as run:
        next(run)
        with pytest.raises(phalanx.UsageError, match=r"Locked\) cannot be copied .*use run\.params"):
            run.model.eval()


def test_optimizers_that_replace_memory_are_followed():
    """What is looked at are the weights of now, also if an update puts them elsewhere."""
    with recipe(optimizer=Replacing).start(engine="inline") as run:
        model, params = run.model, run.params
        for _ in run:
            assert torch.equal(run.model.last.weight, run.result().params["last.weight"])
            assert torch.equal(params["last.weight"], run.params["last.weight"])
        assert run.model is model


class Replacing(torch.optim.SGD):
    """Gives each parameter new memory, as many a hand-written optimizer does."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


def test_on_several_devices_it_is_the_same():
    """Two workers with a copy of the state each: changes are refused, looks are not."""
    options = {"devices": ["cpu", "cpu"]}
    assert train(options, look, "loop").digest == recipe().train(engine="inline").digest
    with pytest.raises(phalanx.UsageError, match="frozen or thawed"):
        train(options, CHANGES["thaw"][0], "loop")
