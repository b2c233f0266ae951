"""Outputs (n, 1) against targets (n,) compare every output with every target: torch's warning of that is a refusal."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx
from tests.engines.moving import hurry

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)  # (48,)
LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
    "smooth_l1": F.smooth_l1_loss,
    "module": nn.MSELoss(),
    "bce": lambda output, target: F.binary_cross_entropy(output.sigmoid(), (target > 0).float()),
    "bce with logits": lambda output, target: F.binary_cross_entropy_with_logits(output, (target > 0).float()),
    "lambda": lambda output, target: 2 * F.mse_loss(output, target),
    "weighted": phalanx.weighted(F.mse_loss, lambda output, target: len(target)),
}
ENGINES = {
    "inline": {"engine": "inline"},
    "workers": {"workers": 2, "engine": "processes"},
    "devices": {"devices": ["cpu"] * 2},
}
SHAPES = r"outputs of shape \(4, 1\) and targets of shape \(4,\).*target\[:, None\] or output\.squeeze\(1\)"


class Direct(nn.Module):
    """Its own loss."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 1)

    def forward(self, x, y):
        return F.mse_loss(self.last(x), y)


def linear():
    return nn.Linear(3, 1)


def recipe(loss_fn=F.mse_loss, data=(X, Y), **changes):
    given = {"replicas": 2, "batch_size": 8, "steps": 6}
    return phalanx.Recipe(changes.pop("make_model", linear), data, loss_fn, **(given | changes))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", LOSSES)
def test_the_first_step_refuses_it(name):
    """Any loss of torch, in whatever it is wrapped; the error has both shapes, and what it advises works."""
    with pytest.raises(phalanx.UsageError, match=SHAPES) as told:
        recipe(LOSSES[name]).train(engine="inline")
    assert told.value.result.steps == 0
    recipe(LOSSES[name], target_fn=lambda batch: batch[1][:, None]).train(engine="inline")
    recipe(LOSSES[name], forward_fn=lambda model, batch: model(batch[0]).squeeze(1)).train(engine="inline")


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("action", ["ignore", "error", "default"])
def test_whatever_filters_say(action, engine):
    """The caller's filters of warnings do not decide it, and workers refuse it as this process does."""
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        with pytest.raises(phalanx.UsageError, match=SHAPES):
            recipe().train(**ENGINES[engine])


def test_where_the_loss_is_called_elsewhere():
    """A loss of model and batch, a model's own loss, a phase."""
    own = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    for made in (
        recipe(own, loss_takes="model"),
        recipe(None, {"x": X, "y": Y}, make_model=Direct),
        recipe(None, phases=[phalanx.Phase(F.mse_loss)]),
    ):
        with pytest.raises(phalanx.UsageError, match=SHAPES):
            made.train(engine="inline")


@pytest.mark.parametrize("metric", ["function", "whole", "bce"])
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_first_evaluation_refuses_it(metric, workers):
    """A metric, also one over all samples, under a filter that ignores warnings."""
    function = LOSSES["bce"] if metric == "bce" else F.mse_loss
    made = recipe(target_fn=lambda batch: batch[1][:, None])
    due = phalanx.whole(function) if metric == "whole" else function
    shapes = SHAPES.replace("4", "48" if metric == "whole" else "16")
    with made.start(workers=workers, progress=False) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        next(run)
        with pytest.raises(phalanx.UsageError, match=shapes):
            run.evaluate(due, (X, Y), batch_size=16, target_fn=lambda batch: batch[1])


@pytest.mark.long
@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}], ids=str)
def test_each_function_is_looked_at(options):
    """Two functions without names of their own are two metrics: the second one is refused as if it were the first."""
    with recipe(lambda output, target: F.mse_loss(output, target[:, None])).start(**options) as run:
        run.evaluate(lambda output, target: output.mean(), (X, Y))
        with pytest.raises(phalanx.UsageError, match=r"shape \(16, 1\)"):
            run.evaluate(lambda output, target: F.mse_loss(output, target), (X, Y), batch_size=16)


def test_with_auto(monkeypatch):
    """A metric that is first measured by workers, to which the run has moved."""
    made = recipe(target_fn=lambda batch: batch[1][:, None])
    hurry(monkeypatch, made)
    due = phalanx.Evaluation(F.mse_loss, (X, Y), batch_size=16, target_fn=lambda batch: batch[1], every_steps=6)
    with pytest.raises(phalanx.UsageError, match=SHAPES.replace("4", "16")):
        made.train(workers="auto", evaluation=due)


MEANT = {
    "one number": lambda output, target: F.mse_loss(output, torch.zeros(1)),
    "a scalar": lambda output, target: F.mse_loss(output, torch.tensor(0.5)),
    "a row": lambda output, target: F.mse_loss(output.expand(-1, 3), torch.zeros(3)),
    "pairs": lambda output, target: F.l1_loss(output, target[None, :]),
    "other pairs": lambda output, target: F.l1_loss(output, torch.arange(5.0)),
    "one sample": lambda output, target: F.mse_loss(output[:1], target[:1]),
}


@pytest.mark.parametrize("name", MEANT)
def test_what_is_meant_passes(name):
    """Constants and pairs that are meant so have the bits of a loop by hand, and torch warns of them as before."""
    loss = MEANT[name]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = recipe(loss, replicas=1, shuffle=False, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)).train(
            engine="inline"
        )
    assert {"Using a target size" in str(each.message) for each in told} == {True}
    torch.manual_seed(0)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(6):
            rows = slice(8 * step, 8 * step + 8)
            optimizer.zero_grad()
            loss(model(X[rows]), Y[rows]).backward()
            optimizer.step()
    assert phalanx.digest(result.model) == phalanx.digest(model)


def test_other_warnings_are_passed_on():
    """A warning of the user's own is shown once, as the caller's filters say."""

    def warning(output, target):
        warnings.warn("mine", stacklevel=1)
        return F.mse_loss(output, target[:, None])

    for action, count in {"ignore": 0, "always": 7 * 2}.items():  # the first replica is computed twice in two steps
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter(action)
            recipe(warning).train(engine="inline")
        assert len([each for each in told if str(each.message) == "mine"]) == count
