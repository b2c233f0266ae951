"""Recipes with a planted difference each, and runs of them side by side."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.families import FAMILIES, normal, whole

STEPS, SAMPLES, REPLICAS, BATCH = 60, 40, 4, 8
X, Y = normal(SAMPLES, 5), whole(3, SAMPLES)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


class Net(nn.Module):
    """A linear layer, BatchNorm, dropout and a linear layer."""

    def __init__(self, momentum=0.1, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(5, 16)
        self.norm = nn.BatchNorm1d(16, momentum=momentum)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def recipe(**changes):
    """The recipe that all of them are variants of."""
    given = {
        "make_model": Net, "data": (X, Y), "loss_fn": F.cross_entropy, "replicas": REPLICAS, "batch_size": BATCH,
        "steps": STEPS, "optimizer": SGD,
    }  # fmt: skip
    return phalanx.Recipe(**{**given, **changes})


def mlp(replicas=4, **changes):
    """A small recipe without buffers."""
    return FAMILIES["mlp"].recipe(replicas, **changes)


def dealt(step_of, sample):
    """The first step and replica that ``sample`` is dealt to."""
    for step in range(step_of.plan.steps):
        for replica, share in enumerate(step_of.plan.shares(step)):
            if sample in share:
                return step, replica
    raise LookupError(sample)


def ran(folder, recipe, **options):
    """The directory of a run of ``recipe``."""
    recipe.train(run_dir=folder, **{"progress": False, "engine": "inline", **options})
    return folder
