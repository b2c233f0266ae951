"""ggmlR's ``dp_train`` vignette on iris: a 4-32-3 network, one sample per replica per step, clipped gradients, Adam."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.cli.demos.parts import Demo, accuracy, bundled
from phalanx.definition.evaluation import Evaluation
from phalanx.recipe import Recipe

TEST_SAMPLES = 30


def network() -> nn.Module:
    """4 inputs, 32 hidden units, 3 classes."""
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))


def iris() -> Demo:
    """The job: 120 flowers as a list of (x, y) samples, 30 held out, 2,000 steps of 4 replicas."""
    data = bundled("load_iris")
    x = torch.tensor(data.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(data.target)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).tolist()
    test, train = mixed[:TEST_SAMPLES], mixed[TEST_SAMPLES:]
    recipe = Recipe(
        network,
        [(x[i], y[i]) for i in train],
        nn.functional.cross_entropy,
        replicas=4,
        batch_size=None,
        steps=2000,
        lr=1e-3,
        max_norm=5.0,
    )
    return Demo("a 4-32-3 network on iris", recipe, Evaluation(accuracy, [(x[i], y[i]) for i in test]))
