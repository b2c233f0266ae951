"""Shares that hold nothing, count nothing or overflow have the bits of one process on any number of workers."""

import functools
import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.engines.alike import CHUNK, EVERY, FEW, MLP, course, feed, few, metric, same
from tests.families import FAMILIES, FEATURES, SCHEDULERS
from tests.sampling import cover, sample

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest


@pytest.mark.parametrize(("drop_last", "workers"), cover("short last batch", [True, False], FEW[:2]))
def test_a_short_last_batch(drop_last, workers):
    """The last batch of an epoch is dropped or dealt as it is, with fewer samples than replicas."""
    recipe = FAMILIES["counting"].recipe(5, batch_size=9, epochs=3, drop_last=drop_last)
    assert min(len(recipe.plan.indices(step)) for step in range(recipe.plan.steps)) == (9 if drop_last else 2)
    same(recipe, workers)


@pytest.mark.parametrize("workers", sample("masked shares", EVERY, 1))
def test_masked_shares(workers):
    """Shares of weight 0 are left out, wherever they are computed; some are in every step."""
    recipe = FAMILIES["masked_tokens"].recipe(8)
    counts = [[int((recipe.data[1][share] != -100).sum()) for share in recipe.plan.shares(t)] for t in range(4)]
    assert sum(0 in count for count in counts) >= 2
    same(recipe, workers)


@few("only one replica counts")
@pytest.mark.parametrize("alone", sample("only one replica counts", range(5), 2))
def test_only_one_replica_counts(alone, workers):
    """All others have weight 0: their workers publish nothing, and the one gradient is the mean."""
    weights = [1.0 if replica == alone else 0.0 for replica in range(5)]
    same(bringing(weights), workers)


WEIGHTS = [[0.5, 3.0, 0.0, 1e-3, 7.0], [0.0, 0.0, 2.0, 0.0, 3.0], [1e5, 1.0, 1.0, 1.0, 0.1]]


@few("weights")
@pytest.mark.parametrize("weights", sample("weights", WEIGHTS, 2))
def test_weights_that_the_loss_returns(weights, workers):
    """Any weights, zeros among them, in any worker."""
    same(bringing(weights), workers)


def bringing(weights):
    """Five samples, one for each replica, with the weights that the loss will return."""
    return MLP.recipe(
        5,
        data=(*(column[:5] for column in FEATURES), torch.tensor(weights)),
        batch_size=5,
        shuffle=False,
        forward_fn=lambda model, batch: model(batch[0]),
        target_fn=lambda batch: batch[1:],
        loss_fn=lambda output, target: (F.cross_entropy(output, target[0]), target[1].sum()),
    )


class Overflowing(nn.Module):
    """Its output is inf for samples whose first feature is huge."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        self.seen += x.clamp(-9, 9).mean(0)
        return self.body(x) * torch.where(x[:, :1] > 1e6, torch.inf, 1.0)


def spoilt(index):
    x = FEATURES[0].clone()
    x[index, 0] = 1e9
    return x, FEATURES[1]


@pytest.mark.long
@few("not finite")
@pytest.mark.parametrize(("index", "on_nonfinite"), cover("not finite", [0, 11, 19], ["skip", "ignore"]))
def test_steps_that_are_not_finite(index, on_nonfinite, workers):
    """A step with inf in one share is skipped by all workers, buffers too, or taken by all of them."""
    recipe = MLP.recipe(5, make_model=Overflowing, data=spoilt(index), steps=6, on_nonfinite=on_nonfinite)
    _, losses, _ = course(recipe, engine="inline")
    assert any(loss in ("inf", "nan") for loss in losses)
    same(recipe, workers)


@few("norm that overflows")
def test_a_norm_that_overflows_is_not_an_infinite_gradient(workers):
    """Workers agree that every element is finite although the norm is not, and do not skip the step."""
    recipe = MLP.recipe(5, loss_fn=lambda output, target: F.cross_entropy(output, target) * 1e30, on_nonfinite="skip")
    with recipe.start(engine="inline") as run:
        assert next(run).grad_norm == float("inf")
    assert same(recipe, workers)[0] != course(MLP.recipe(5, steps=0), engine="inline")[0]


def test_a_gradient_that_overflows_in_the_fold_is_skipped_by_all():
    """Each share's gradient is finite, their sum is not: only the owner of that tensor sees it, and all skip."""
    scale = 3e38

    class Huge(nn.Module):
        def __init__(self):
            super().__init__()
            self.huge = nn.Parameter(torch.zeros(3))
            self.small = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return (self.huge * scale).sum() * x[0, 0].sign() + self.small.sum()

    data = (torch.tensor([[1.0]] * 3 + [[-1.0]] * 3 + [[1.0], [-1.0]] * 3), torch.zeros(12))
    recipe = phalanx.Recipe(
        Huge,
        data,
        output_only,
        replicas=2,
        batch_size=2,
        steps=6,
        shuffle=False,
        on_nonfinite="skip",
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
    )
    with recipe.start(engine="inline") as run:
        norms = [report.grad_norm for report in run]
    assert [norm == float("inf") for norm in norms] == [True, False, True, False, False, False]
    for workers in (1, 2):
        same(recipe, workers)


def output_only(output, target):
    return output


@few("no sample")
def test_a_worker_that_had_no_sample_takes_over_the_settled_buffers(workers):
    """One sample, which only the first replica gets, then more: all replicas start from what it left."""
    batches = [tuple(column[:count] for column in FEATURES) for count in (1, 9)]
    feed(FAMILIES["counting"].recipe(5, data=None, steps=None), batches, workers)


def test_a_worker_that_evaluated_and_then_had_no_sample_takes_over_the_settled_buffers():
    """An evaluation puts the buffers of all workers back; a step without samples there must not leave them behind."""
    answers = set()
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": 2}):
        with FAMILIES["counting"].recipe(2, data=None, steps=None).start(**options) as run:
            values = []
            for rows in (4, 1, 4):
                run.step(tuple(column[:rows] for column in FEATURES))
                values.append(run.evaluate(metric, FEATURES, CHUNK))
            answers.add((run.result().digest, *values))
    assert len(answers) == 1


def test_a_schedule_goes_on_over_skipped_steps():
    """Every worker steps its scheduler also where nothing is updated, the first step included."""
    recipe = MLP.recipe(
        3,
        make_model=Overflowing,
        data=spoilt(slice(0, 8)),
        shuffle=False,
        steps=6,
        on_nonfinite="skip",
        scheduler=SCHEDULERS["exponential"],
    )
    same(recipe, 2)
