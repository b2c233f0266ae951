"""Callbacks get the mean gradients that they ask for, by name: the same bits wherever they were computed."""

import hashlib
import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.families import two_losses

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Bits:
    """Asks for gradients; keeps their norms, and a digest of every step's."""

    def __init__(self, *names, at=None):
        self.gradients = names or ("*.weight",)
        self.seen, self.norms, self.at = [], [], at

    def begin(self, run):
        self.run = run

    def step(self, report):
        parts = [
            f"{name} {tuple(value.shape)}".encode() + value.numpy().tobytes()
            for name, value in report.gradients.items()
        ]
        self.seen.append(hashlib.sha256(b"".join(parts)).hexdigest())
        self.norms.append({name: float(value.norm()) for name, value in report.gradients.items()})
        if report.step == self.at:
            os.kill(self.run.worker_pids[0], signal.SIGKILL)


def recipe(**changes):
    def make_model():
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))

    given = {"replicas": 4, "batch_size": 20, "steps": 6, "lr": 0.1}
    return phalanx.Recipe(make_model, (X, Y), F.cross_entropy, **(given | changes))


def bits(given, *names, at=None, **options):
    seen = Bits(*names, at=at)
    given.train(callbacks=[seen], **options)
    return seen


def test_one_answer_for_any_number_of_workers():
    """Inline and 2 and 3 workers show the same gradients in every step, by name and in the order of parameters."""
    inline = bits(recipe(), engine="inline")
    assert len(set(inline.seen)) == 6
    assert list(inline.norms[0]) == ["0.weight", "2.weight"]
    for workers in (2, 3):
        assert bits(recipe(), workers=workers).seen == inline.seen
    assert bits(recipe(lr=0.2), engine="inline").seen[1:] != inline.seen[1:]


def test_they_are_whole_and_before_clipping():
    """All of them together have the norm that the report names, although the update clips them."""
    seen = bits(recipe(max_norm=1e-3), "*", workers=2)
    told = []
    recipe(max_norm=1e-3).train(workers=2, callbacks=[lambda report: told.append(report.grad_norm)])
    whole = [sum(norm**2 for norm in norms.values()) ** 0.5 for norms in seen.norms]
    assert whole == pytest.approx(told)


def test_nothing_is_copied_unless_asked():
    """Without a callback that asks, reports have no gradients."""
    told = []
    recipe().train(engine="inline", callbacks=[lambda report: told.append(dict(report.gradients))])
    assert told == [{}] * 6


def test_workers_that_die_between_steps():
    """A worker that is replaced before a step hands over its part of that step."""
    assert bits(recipe(), workers=2, at=2).seen == bits(recipe(), engine="inline").seen


def test_phases_add_up():
    """A step with phases shows the gradients of each phase that trains them."""
    given = recipe()
    given = phalanx.Recipe(given.make_model, (X, Y), phases=two_losses(), replicas=4, batch_size=20, steps=3, lr=0.1)
    inline = bits(given, engine="inline")
    assert list(inline.norms[0]) == ["0.weight", "2.weight"]
    assert bits(given, workers=2).seen == inline.seen


@pytest.mark.parametrize(
    ("asked", "told"),
    [(("conv.weight",), "is not a parameter"), ("*.weight", "must be a list"), ((3,), "must be a list")],
)
def test_names_that_are_none(asked, told):
    """A name that no parameter has, and what is no list of names, are refused with the way out."""
    seen = Bits()
    seen.gradients = asked
    with pytest.raises(phalanx.UsageError, match=told):
        recipe().train(engine="inline", callbacks=[seen])
