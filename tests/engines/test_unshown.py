"""Exceptions of users whose text raises, is none, or is endless: phalanx's error comes, with its address."""

import functools

import pytest
import torch

import phalanx
from phalanx.definition import checks
from phalanx.definition.plain import taking_over
from phalanx.engines.hosts.members import Farewell
from phalanx.errors import SHOWN_CHARACTERS, safe_str
from tests.engines.faulty import FAILING, PLACES, X, failing_at, inline_error, notes, raising, recipe
from tests.engines.faulty import workers_error as raised_by_workers
from tests.manual.test_step import trapped_batch
from tests.sampling import cover

ENGINES = {"inline": inline_error, "workers": raised_by_workers}


class Mute(Exception):
    """Its text raises."""

    def __str__(self):
        raise LookupError("no text")

    __repr__ = __str__


class Numeric(Mute):
    """Its text is a number."""

    def __str__(self):
        return 3

    __repr__ = __str__


class Endless(ValueError):
    """Its text has 100 MB."""

    def __str__(self):
        return "x" * 10**8

    __repr__ = __str__


TOLD = {
    Mute: "(its str() raised LookupError)",
    Numeric: "(its str() raised TypeError)",
    Endless: "x ... 99,980,000 more",
}


def assert_told(error, kind, base=phalanx.WorkerError):
    """It is an error of phalanx's, caused by the user's, whose text is as told."""
    assert type(error) is base
    assert type(error.__cause__) is kind
    assert f"{kind.__name__}" in str(error)
    assert TOLD[kind] in str(error)
    assert len(str(error)) < SHOWN_CHARACTERS + 1000
    assert len(notes(error)) < 2 * SHOWN_CHARACTERS


@pytest.mark.long
@pytest.mark.parametrize(("place", "kind"), cover("errors that cannot be shown", PLACES, TOLD))
def test_in_a_step(place, kind):
    """A model, a loss or data raises it: the WorkerError has step, replica, samples and the last good state."""
    alone, several = (error(**failing_at(place, raising(kind))) for error in ENGINES.values())
    for error in (alone, several):
        assert_told(error, kind)
        assert (error.step, error.replica, error.result.digest) == (FAILING, 2, alone.result.digest)
    assert "in explode" in notes(several)


@pytest.mark.cases(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", TOLD)
def test_in_an_evaluation(kind, engine):
    """A metric raises it."""

    def metric(output, target):
        raise kind

    evaluation = phalanx.Evaluation(metric, X, target_fn=lambda batch: batch, every_steps=2)
    options = {"engine": "inline"} if engine == "inline" else {"engine": "processes", "workers": 2}
    with pytest.raises(phalanx.WorkerError) as caught:
        recipe().train(evaluation=evaluation, **options)
    assert_told(caught.value, kind)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", TOLD)
def test_in_a_callback(kind, workers):
    """A callback raises it: that comes as it is, with the last good state."""
    options = {"engine": "processes", "workers": workers} if workers else {"engine": "inline"}
    with pytest.raises(kind) as caught:
        recipe().train(callbacks=[lambda report: raising(kind)()], **options)
    assert caught.value.result.steps == 1


class Broken(torch.optim.lr_scheduler.LambdaLR):
    """Raises in step 2."""

    def step(self, epoch=None):
        super().step()
        if self.last_epoch == 3:
            raise self.kind


def broken(kind, optimizer):
    scheduler = Broken(optimizer, lambda epoch: 1.0)
    scheduler.kind = kind
    return scheduler


def streamed(kind):
    yield from zip(X[:20], X[:20, :1], strict=True)
    raise kind


def calling(kind, *_):
    raise kind


OTHERS = {
    "make_model": (phalanx.UsageError, lambda kind: {"make_model": functools.partial(calling, kind)}),
    "optimizer": (phalanx.UsageError, lambda kind: {"optimizer": lambda named: calling(kind)}),
    "scheduler": (phalanx.UsageError, lambda kind: {"scheduler": functools.partial(calling, kind)}),
    "a step of the scheduler": (phalanx.WorkerError, lambda kind: {"scheduler": functools.partial(broken, kind)}),
    "a stream": (phalanx.WorkerError, lambda kind: {"data": phalanx.Stream(functools.partial(streamed, kind))}),
}


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("place", "kind"), cover("elsewhere", OTHERS, TOLD))
def test_elsewhere(place, kind, engine):
    """What makes a model, an optimizer, a scheduler or a stream raises it."""
    base, changes = OTHERS[place]
    assert_told(ENGINES[engine](**changes(kind)), kind, base)


@pytest.mark.parametrize("kind", TOLD)
def test_by_hand(kind):
    """A loss of a step by hand raises it."""
    model, batch = torch.nn.Linear(3, 1), trapped_batch()
    replicas = phalanx.manual.replicate(model, ["cpu"] * 3)
    optimizers = [torch.optim.SGD(replica.named_parameters(), lr=0.1) for replica in replicas]
    with pytest.raises(phalanx.WorkerError) as caught:
        phalanx.manual.data_parallel_step(replicas, optimizers, batch, lambda output, target: calling(kind))
    assert_told(caught.value, kind)


@pytest.mark.parametrize("kind", [Mute, Numeric])
def test_what_others_and_snapshots_are_told(kind):
    """The farewell to other hosts, and what a callback's ``load`` raises, have a sentence in its place."""
    assert Farewell.after(kind()).why == f"{kind.__name__}: {TOLD[kind]}"
    with pytest.raises(phalanx.SnapshotError) as caught, taking_over("the state of Best"):
        raise kind
    assert TOLD[kind] in str(caught.value)


def test_texts_of_usual_length_are_whole():
    """Negative twin: nothing is left out, and a text of nothing is one."""
    assert [safe_str(KeyError("a")), safe_str(ValueError()), safe_str("x" * 20_000)] == ["'a'", "", "x" * 20_000]
    assert safe_str(Mute(), repr) == "(its repr() raised LookupError)"
    assert checks.shown(Mute()) == "(its repr() raised LookupError)"
