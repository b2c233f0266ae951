"""Steps that have become slow because of denormal numbers: said once, and nothing else changes."""

import time
import warnings

import pytest
import torch
from torch.nn import functional as F

import phalanx

STEPS = 24
DENORMALS = "torch.set_flush_denormal"


def working(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def as_on_intel(model, batch):
    """Takes twenty times as long from step 10 on, if denormal numbers are not flushed."""
    x, _ = batch
    late = bool((x[:, 0] > 0).any())
    working(0.02 if late and bool(torch.tensor(1e-40) * 1.0) else 0.001)
    return model(x)


def slow_anyway(model, batch):
    """The same, whatever is flushed."""
    working(0.02 if bool((batch[0][:, 0] > 0).any()) else 0.001)
    return model(batch[0])


def recipe(forward_fn, **changes):
    x = torch.randn(8 * STEPS, 4, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.where(torch.arange(len(x)) < 80, -1.0, 1.0)
    options = {"replicas": 2, "batch_size": 8, "steps": STEPS, "shuffle": False, **changes}
    return phalanx.Recipe(
        lambda: torch.nn.Linear(4, 3), (x, torch.arange(len(x)) % 3), F.cross_entropy, forward_fn, **options
    )


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_denormals_slow_down_says_so_once(workers):
    """A run whose replicas have become slow, and are not with denormals flushed, warns once and names the setting."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = recipe(as_on_intel).train(workers=workers)
    assert [(DENORMALS in str(one.message), one.filename) for one in caught] == [(True, __file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        untold = recipe(as_on_intel, replicas=2).train(workers=1)
    assert told.digest == untold.digest


def test_what_is_slow_for_another_reason_is_not_blamed_on_denormals():
    """Replicas that stay slow with denormals flushed are nobody's fault; the setting is the caller's again."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe(slow_anyway).train(workers=1)
    assert bool(torch.tensor(1e-40) * 1.0)


@pytest.mark.usefixtures("computed_once")
def test_who_flushes_already_is_not_told():
    """Where the caller flushes denormals, nothing is slow and nothing is computed twice."""
    calls = []

    def counted(model, batch):
        calls.append(0)
        return as_on_intel(model, batch)

    torch.set_flush_denormal(True)
    try:
        recipe(counted).train(workers=1)
    finally:
        torch.set_flush_denormal(False)
    assert len(calls) == 2 * STEPS
