"""Optimizers with two modes, as schedule-free ones: trained at one point, evaluated at another, on a copy."""

import copy
import functools
import math
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.callbacks import EMA, SaveBest
from phalanx.frameworks.torch.optimizer import eval_point

X = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()
ENGINES = {
    "inline": {"engine": "inline"},
    "two workers": {"workers": 2},
    "auto": {"workers": "auto"},
    "devices": {"devices": ["cpu", "cpu"]},
}
STEPS = 12


class ScheduleFree(torch.optim.Optimizer):
    """As the package schedulefree has it: weights are (1 - beta) z + beta x in training, and x in evaluation.

    It does not step before ``train()`` was called, and keeps something in an attribute.
    """

    def __init__(self, parameters, lr=0.05, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas, "k": 0, "train_mode": False, "weight_sum": 0.0})
        self.eps = 1e-8

    def train(self):
        self._go(True)

    def eval(self):
        self._go(False)

    @torch.no_grad()
    def _go(self, train):
        assert self.eps
        for group in self.param_groups:
            beta = group["betas"][0]
            for parameter in group["params"] if group["train_mode"] != train else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], 1 - beta if train else 1 - 1 / beta)
            group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Optimizer was not in train mode when step is called.")
            beta, second = group["betas"]
            lr = group["lr"] * math.sqrt(1 - second ** (group["k"] + 1))
            group["weight_sum"] += lr**2
            share = lr**2 / group["weight_sum"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(z=parameter.clone(), squares=torch.zeros_like(parameter))
                state["squares"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                gradient = parameter.grad / state["squares"].sqrt().add_(self.eps)
                parameter.lerp_(state["z"], share)
                parameter.add_(gradient, alpha=lr * (beta * (1 - share) - 1))
                state["z"].sub_(gradient, alpha=lr)
            group["k"] += 1


def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(output, target):
    return F.cross_entropy(output, target)


def job(replicas=4, evaluated=True, callbacks=(), optimizer=ScheduleFree, **options):
    recipe = phalanx.Recipe(
        make_model, (X, Y), F.cross_entropy, replicas=replicas, batch_size=24, steps=STEPS, optimizer=optimizer
    )
    if evaluated:
        options["evaluation"] = phalanx.Evaluation(loss, (X, Y), every_steps=3)
        callbacks = [SaveBest("loss"), *callbacks]
    return recipe, recipe.train(callbacks=callbacks, progress=False, **options)


def at_its_point(model, optimizer):
    """A copy of the model where the optimizer wants it evaluated."""
    model, other = copy.deepcopy((model, {"groups": optimizer.param_groups, "state": optimizer.state}))
    trial = ScheduleFree(model.parameters())
    trial.param_groups, trial.state = other["groups"], other["state"]
    trial.eval()
    return model.eval()


@functools.cache
def by_hand():
    """The plain loop: its digest, what it measured, the best weights, and the last model at both points."""
    recipe, _ = job(replicas=1, evaluated=False, engine="inline")
    with recipe.start(engine="inline", progress=False) as run:
        model = copy.deepcopy(run.model)
    optimizer, values, best = ScheduleFree(model.named_parameters()), [], (math.inf, None)
    optimizer.train()
    for step in range(STEPS):
        indices = recipe.plan.indices(step)
        optimizer.zero_grad()
        F.cross_entropy(model(X[indices]), Y[indices]).backward()
        optimizer.step()
        if (step + 1) % 3 == 0:
            there = at_its_point(model, optimizer)
            with torch.no_grad():
                values.append(float(loss(there(X), Y)))
            if values[-1] < best[0]:
                best = values[-1], there.state_dict()
    return phalanx.digest(model, optimizer, STEPS), values, best[1], model, at_its_point(model, optimizer)


def test_the_plain_loop():
    """Metrics, predictions, best weights and the average are those of a loop that calls eval() on copies."""
    _, result = job(replicas=1, engine="inline")
    digest, values, best, model, there = by_hand()
    assert result.digest == digest
    assert [item.value for item in result.metric_history] == values
    for name, value in there.state_dict().items():
        assert torch.equal(result.averaged[name], value)
        assert torch.equal(result.best.weights[name], best[name])
        assert torch.equal(result.params[name], model.state_dict()[name])
        assert not torch.equal(result.params[name], value)
    with torch.no_grad():
        assert torch.equal(result.predict(X), there(X))
        assert not torch.equal(result.predict(X), model(X))


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_engines(engine):
    """All that can be seen is the same in every engine; evaluations do not change the digest."""
    _, result = job(**ENGINES[engine])
    _, other = job(engine="inline")
    _, quiet = job(evaluated=False, **ENGINES[engine])
    assert result.digest == other.digest == quiet.digest
    assert [item.value for item in result.metric_history] == [item.value for item in other.metric_history]
    assert torch.equal(result.predict(X), other.predict(X))
    for name, value in other.averaged.items():
        assert torch.equal(result.averaged[name], value)
        assert torch.equal(quiet.averaged[name], value)
        assert torch.equal(result.best.weights[name], other.best.weights[name])


def test_going_in_and_out_changes_bits():
    """``train()`` does not undo ``eval()``, which is why a copy is evaluated."""
    *_, model, _ = by_hand()
    z = [parameter + 0.1 for parameter in model.parameters()]
    there = [
        parameter.lerp(other, 1 - 1 / 0.9).lerp(other, 1 - 0.9)
        for parameter, other in zip(model.parameters(), z, strict=True)
    ]
    assert not all(torch.equal(one, other) for one, other in zip(model.parameters(), there, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_an_average_that_was_asked_for_comes_first(engine):
    """With EMA, the average is that of the training points, in every engine."""
    _, result = job(callbacks=[EMA(0.5)], **ENGINES[engine])
    _, other = job(callbacks=[EMA(0.5)], evaluated=False, engine="inline")
    _, without = job(engine="inline")
    for name, value in other.averaged.items():
        assert torch.equal(result.averaged[name], value)
        assert not torch.equal(without.averaged[name], value)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["inline", "two workers"])
def test_resuming(tmp_path, engine):
    """A run that was stopped goes on to the same digest, metrics and average; a run that is held shows the average."""
    recipe, expected = job(engine="inline")
    evaluation = phalanx.Evaluation(loss, (X, Y), every_steps=3)
    with recipe.start(run_dir=tmp_path, evaluation=evaluation, progress=False, **ENGINES[engine]) as run:
        for report in run:
            if report.step == 4:
                break
        shown = run.averaged
        assert run.evaluate(loss, (X, Y)) == run.evaluate(loss, (X, Y))
        assert float(loss(run.predict(X), Y)) == run.evaluate(loss, (X, Y))
    assert all(not torch.equal(shown[name], value) for name, value in expected.averaged.items())
    with pytest.warns(UserWarning, match="not one of torch's own"):
        result = recipe.train(run_dir=tmp_path, evaluation=evaluation, progress=False, engine="inline")
    assert result.resumed_from == 5
    assert result.digest == expected.digest
    assert result.metric_history[-1].value == expected.metric_history[-1].value
    assert all(torch.equal(result.averaged[name], value) for name, value in expected.averaged.items())


def test_saving_the_average(tmp_path):
    """``result.save`` writes the training point, or with averaged=True the other."""
    _, result = job(engine="inline")
    for averaged, expected in ((False, result.params), (True, result.averaged)):
        result.save(tmp_path / "weights.safetensors", averaged=averaged)
        found = phalanx.Recipe(make_model, (X, Y), F.cross_entropy, replicas=1, steps=1).start(
            warm_start=tmp_path / "weights.safetensors", engine="inline", progress=False
        )
        with found as run:
            assert all(torch.equal(run.params[name], value) for name, value in expected.items())


class Logger:
    """Holds the model and a lock, which cannot be copied; counts its calls."""

    def __init__(self, model):
        self.model, self.lock, self.steps = model, threading.Lock(), 0

    def after(self, *_):
        with self.lock:
            self.steps += 1


def hooked(model):
    optimizer, logger = ScheduleFree(model.parameters()), Logger(model)
    optimizer.register_step_post_hook(logger.after)
    optimizer.register_step_pre_hook(functools.partial(Logger.after, logger))
    optimizer.register_state_dict_pre_hook(logger.after)
    return optimizer


@pytest.mark.parametrize(
    "engine",
    ["inline", *(pytest.param(name, marks=pytest.mark.long) for name in ENGINES if name != "inline")],
)
def test_hooks_are_not_copied(engine):
    """An optimizer with hooks that hold a lock and the model is evaluated at its point, as one without hooks is."""
    _, result = job(optimizer=hooked, **ENGINES[engine])
    _, plain = job(engine="inline")
    assert [item.value for item in result.metric_history] == [item.value for item in plain.metric_history]
    for name, value in plain.averaged.items():
        assert torch.equal(result.averaged[name], value)


@pytest.mark.long
def test_workers_begin_without_a_copy(monkeypatch):
    """Whether an optimizer has two modes is asked when workers begin; what it trains is not copied for that."""
    seen = []
    monkeypatch.setattr(
        "phalanx.frameworks.torch.adapter.eval_point", lambda updates: seen.append(1) or eval_point(updates)
    )
    recipe, _ = job(evaluated=False, engine="inline")
    seen.clear()
    with recipe.start(workers=2, progress=False) as run:
        run.step()
        assert not seen
        run.evaluate(loss, (X, Y))
        assert seen
