"""Parameters that are no plain floats: complex ones, as Fourier layers have, and quantized ones that stay frozen."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import phalanx
from phalanx.callbacks import EMA, Thaw
from tests.engines.moving import hurry

DECAY = 0.75
X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
Y = X.cumsum(1)


class Fourier(nn.Module):
    """A layer over frequencies."""

    def __init__(self):
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=8))


class Quantized(nn.Module):
    """Weights of eight bits, which nobody trains."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, 8).to(torch.float8_e4m3fn), requires_grad=False)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(x * self.scale.float())


SGD = functools.partial(torch.optim.SGD, lr=0.1)
ENGINES = {
    "inline": {"engine": "inline"},
    "workers": {"workers": 2, "engine": "processes"},
    "devices": {"devices": ["cpu"] * 2},
}


def recipe(make_model, **changes):
    given = {"optimizer": SGD, "replicas": 2, "batch_size": 8, "shuffle": False, "epochs": 3}
    return phalanx.Recipe(make_model, (X, Y), nn.functional.mse_loss, **(given | changes))


def bits(weights):
    return {name: value.view(torch.uint8).numpy().tobytes() for name, value in weights.items()}


def by_hand(make_model):
    """What torch's own average comes to, with one replica."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = SGD(model.parameters())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(12):
        rows = slice(8 * (step % 4), 8 * (step % 4) + 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X[rows]), Y[rows]).backward()
        optimizer.step()
        averaged.update_parameters(model)
    return bits(dict(averaged.module.named_parameters()))


def test_complex_parameters_are_averaged_as_torch_does():
    """The average has the bits of torch's AveragedModel; it is not the weights of the first step."""
    result = recipe(Fourier, replicas=1).train(engine="inline", callbacks=[EMA(DECAY)])
    assert bits(result.averaged) == by_hand(Fourier)
    assert bits(result.averaged) != bits(dict(result.model.named_parameters()))


@pytest.mark.long
@pytest.mark.parametrize("model", [Fourier, Quantized])
@pytest.mark.parametrize("engine", ENGINES)
def test_averages_anywhere(engine, model):
    """The same bits inline, with workers and with devices; quantized weights stay what they are."""
    wanted = recipe(model).train(engine="inline", callbacks=[EMA(DECAY)])
    result = recipe(model).train(callbacks=[EMA(DECAY)], **ENGINES[engine])
    assert (result.digest, bits(result.averaged)) == (wanted.digest, bits(wanted.averaged))
    for name, value in result.averaged.items():
        still = (
            torch.equal(value.float(), dict(result.model.named_parameters())[name].float()) if model is Quantized else 0
        )
        assert still == (name == "scale")


@pytest.mark.long
def test_averages_with_auto(monkeypatch):
    """The same where the run moves."""
    hurry(monkeypatch, recipe(Fourier))
    wanted = recipe(Fourier).train(engine="inline", callbacks=[EMA(DECAY)])
    result = recipe(Fourier).train(workers="auto", callbacks=[EMA(DECAY)])
    assert bits(result.averaged) == bits(wanted.averaged)


@pytest.mark.parametrize("engine", ["inline", pytest.param("workers", marks=pytest.mark.long)])
def test_complex_parameters_are_frozen_and_thawed(engine):
    """Thaw freezes them until their epoch, and run.freeze from then on."""
    spectra = []
    with recipe(Fourier, replicas=2).start(callbacks=[Thaw("spectrum", epoch=1)], **ENGINES[engine]) as run:
        for report in run:
            spectra.append(run.params["spectrum"].clone())
            if report.step == 8:
                run.freeze("spectrum")
    same = [torch.equal(one, other) for one, other in itertools.pairwise(spectra)]
    assert same == [True] * 3 + [False] * 5 + [True] * 3
