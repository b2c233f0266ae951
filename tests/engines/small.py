"""A small recipe, trained in workers."""

import torch
from torch import nn
from torch.nn import functional as F

import phalanx


def small(**changes):
    """A recipe of four steps of three replicas."""
    generator = torch.Generator().manual_seed(1)
    fields = {
        "make_model": lambda: nn.Linear(3, 1),
        "data": (torch.randn(24, 3, generator=generator), torch.randn(24, 1, generator=generator)),
        "loss_fn": F.mse_loss,
        "replicas": 3,
        "batch_size": 12,
        "steps": 4,
    }
    return phalanx.Recipe(**{**fields, **changes})


def in_workers(recipe, **options):
    """Trained in two worker processes."""
    return recipe.train(workers=2, engine="processes", **options)
