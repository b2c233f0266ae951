"""Recipes, and what runs on several devices end in; devices are CPUs here."""

import pytest
from torch import nn

import phalanx
from phalanx.engines.devices import buckets
from tests.families import FAMILIES, two_losses

MLP = FAMILIES["mlp"]
NORM = FAMILIES["conv_norm"]


def devices(count):
    """Options for so many devices; one is this process."""
    return {"devices": ["cpu"] * count} if count > 1 else {"engine": "inline"}


def trained(recipe, count, **options):
    """Digest and losses of a run on so many devices."""
    result = recipe.train(**devices(count), **options)
    return result.digest, result.loss_history


def two_phases(replicas=4, **options):
    fields = {"replicas": replicas, "batch_size": 8, "lr": 0.1, "steps": 4} | options
    return phalanx.Recipe(MLP.make_model, MLP.data, phases=two_losses(), **fields)


def dropping():
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))


def equal_layers():
    return nn.Sequential(*[nn.Linear(5, 5, bias=False) for _ in range(4)])


def small_buckets(patch):
    """No fault."""
    patch.setattr(buckets, "BUCKET", 64)


def slow(cases, *quick):
    """All cases; those that are not ``quick`` are for the long tests."""
    return [pytest.param(case, marks=[] if case in quick else pytest.mark.long) for case in cases]


def in_full(**changes):
    return MLP.recipe(6, batch_size=12, steps=7, drop_last=True, **changes)
