"""What worker processes answer is compared with what the inline engine answers, to the last bit."""

import dataclasses
import sys

import cloudpickle
import pytest

from tests.families import FAMILIES
from tests.sampling import sample

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

MLP = FAMILIES["mlp"]
HELD_OUT = 13
CHUNK = 3
EVERY = (1, 2, 3, 4, 5, 7, 8)
FEW = (2, 3, 5)


def held_out(data):
    """Thirteen samples, which workers cannot share evenly; of a dataset all, which are drawn anew each time."""
    if isinstance(data, tuple):
        return tuple(column[:HELD_OUT] for column in data)
    if isinstance(data, dict):
        return {name: column[:HELD_OUT] for name, column in data.items()}
    return data[:HELD_OUT] if isinstance(data, list) else data


def metric(output, target):
    return output.double().mean()


def course(recipe, evaluation=None, **options):
    """What must not change: digest, losses and evaluations of a whole run, each to the last bit."""
    with recipe.start(evaluation=evaluation, **options) as run:
        run.finish()
        run.evaluate(metric, held_out(recipe.data), batch_size=CHUNK)
        result = run.result()
    return answer(result.digest, result.loss_history, [dataclasses.astuple(item) for item in result.metric_history])


def answer(digest, losses, metrics):
    """With floats spelled exactly: NaN equals NaN, and -0 is not 0."""
    return digest, [loss.hex() for loss in losses], [(step, value.hex(), name) for step, value, name in metrics]


def same(recipe, workers, evaluation=None):
    """Compare workers with the inline engine; returns what both answered."""
    expected = course(recipe, evaluation, engine="inline")
    assert course(recipe, evaluation, engine="processes", workers=workers) == expected, f"{workers} workers"
    return expected


def few(name):
    """The test ``name`` is tried with one of the usual numbers of workers."""
    return pytest.mark.parametrize("workers", sample(name, FEW, 1))


def two_or_three(name):
    """The test ``name`` is tried with two workers, or with three."""
    return pytest.mark.parametrize("workers", sample(name, (2, 3), 1))


def fed(recipe, batches, **options):
    with recipe.start(**options) as run:
        for batch in batches:
            run.step(batch)
        result = run.result()
    return answer(result.digest, result.loss_history, [])


def feed(recipe, batches, workers):
    expected = fed(recipe, batches, engine="inline")
    assert len(expected[1]) == len(batches)
    assert fed(recipe, batches, engine="processes", workers=workers) == expected, f"{workers} workers"
