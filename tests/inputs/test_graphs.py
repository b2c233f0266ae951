"""Data that hangs on a graph, as features of an encoder that was called without no_grad."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.engines.moving import hurry

RAW = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
Y = (RAW[:, 0] > 0).long()
ENGINES = {"inline": {"engine": "inline"}, "workers": {"workers": 2, "engine": "processes"}}


def encoded():
    """Features, and with them the graph."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())(RAW)


class Encoding(torch.utils.data.Dataset):
    """Has an encoder, and calls it for each sample."""

    def __init__(self):
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def __len__(self):
        return len(RAW)

    def __getitem__(self, index):
        if index >= len(RAW):
            raise IndexError(index)
        return self.encoder(RAW[index]), Y[index]


def recipe(data, **changes):
    given = {"replicas": 4, "batch_size": 12, "steps": 6}
    return phalanx.Recipe(lambda: nn.Linear(8, 2), data, F.cross_entropy, **(given | changes))


FORMS = {
    "tuple": (lambda x: (x, Y), r"data\[0\]"),
    "dict": (lambda x: {"x": x, "labels": Y}, r"data\['x'\]"),
    "one": (lambda x: x, "data"),
    "list": (lambda x: list(zip(x, Y, strict=True)), r"data\[0\]\[0\]"),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_that_hangs_on_a_graph_is_refused(form):
    """The recipe names the column, or the first sample, and its advice works: detached data is taken."""
    make, name = FORMS[form]
    with pytest.raises(phalanx.UsageError, match=rf"^{name} requires a gradient.*pass {name}\.detach\(\)"):
        recipe(make(encoded()))
    recipe(make(encoded().detach()))


def test_gradients_of_inputs():
    """A loss that needs gradients of its inputs asks for them in forward_fn."""

    def forward(model, batch):
        x = batch.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope

    made = phalanx.Recipe(
        lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)), RAW, lambda slope, _: slope.square().mean(),
        forward_fn=forward, replicas=4, batch_size=12, steps=6,
    )  # fmt: skip
    wanted = made.train(engine="inline")
    assert made.train(workers=2, engine="processes").digest == wanted.digest


@pytest.mark.long
@pytest.mark.parametrize("data", [lambda: torch.utils.data.TensorDataset(encoded(), Y), Encoding])
@pytest.mark.parametrize("readers", [0, 1])
def test_samples_of_a_dataset_leave_their_graph_behind(data, readers, monkeypatch):
    """Whether a graph is made before or with each sample: all engines train alike, as on detached samples."""
    x = torch.stack([sample.detach() for sample, _ in data()])
    plain = recipe(torch.utils.data.TensorDataset(x, Y)).train(engine="inline").digest
    assert recipe(data()).train(engine="inline").digest == plain
    assert recipe(data()).train(workers=2, engine="processes", readers=readers).digest == plain
    hurry(monkeypatch, recipe(data()))
    assert recipe(data()).train(workers="auto", readers=readers).digest == plain


def test_evaluations_take_it():
    """No gradient is computed there, so features with a graph are measured as others."""
    with recipe((encoded().detach(), Y)).start(engine="inline") as run:
        next(run)
        assert run.evaluate(F.cross_entropy, (encoded(), Y)) == run.evaluate(F.cross_entropy, (encoded().detach(), Y))
