"""What R costs: measured once in a run that takes long, and said where it is dear."""

import time
import warnings

import pytest
import torch
from torch.nn import functional as F

import phalanx
from phalanx.engines import price
from phalanx.frameworks.registry import open_framework


def recipe(forward_fn, make_model=lambda: torch.nn.Linear(4, 3), **changes):
    options = {"replicas": 8, "batch_size": 32, "steps": 4, "shuffle": False, **changes}
    x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
    return phalanx.Recipe(make_model, (x, torch.arange(128) % 3), F.cross_entropy, forward_fn, **options)


def working(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def by_call(model, batch):
    working(0.02)
    return model(batch[0])


def by_sample(model, batch):
    working(0.005 * len(batch[0]))
    return model(batch[0])


def test_what_does_not_depend_on_the_share_is_paid_r_times():
    """Twenty milliseconds for each call make R = 8 dear, and five for each sample do not."""
    calls, samples = recipe(by_call), recipe(by_sample)
    assert price.price(calls, open_framework(calls, ())) > 3
    assert price.price(samples, open_framework(samples, ())) < 2


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_long_run_says_so_once(monkeypatch, workers):
    """A run that takes long and whose R is dear warns once, at the caller's line, names the command; same bits."""
    monkeypatch.setattr(price, "LONG_SECONDS", 0.0)
    with pytest.warns(UserWarning, match="phalanx tune FILE") as caught:
        told = recipe(by_call).train(workers=workers)
    assert [item.filename for item in caught] == [__file__]
    assert "replicas=8 takes about" in str(caught[0].message)
    monkeypatch.setattr(price, "LONG_SECONDS", 1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recipe(by_call).train(workers=1).digest == told.digest


class Compiled(torch.nn.Linear):
    """What compiling leaves in a model, without the minutes it takes."""

    def __init__(self):
        super().__init__(4, 3)
        self.compile(backend="eager")


@pytest.mark.parametrize(
    "changes", [{"replicas": 1}, {"steps": 1}, {"replicas": 4, "batch_size": None}, {"make_model": Compiled}]
)
def test_who_need_not_know_is_not_told(monkeypatch, changes):
    """Nothing is measured for one replica, when all steps are done, for whole data sets, where sizes are compiled."""
    monkeypatch.setattr(price, "LONG_SECONDS", 0.01 if changes.get("steps") == 1 else 0.0)
    monkeypatch.setattr(price, "price", lambda *_: pytest.fail("measured"))
    recipe(by_call, **changes).train(workers=1)
