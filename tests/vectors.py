"""Vectors of gradients of which some lack entries, and what the fold makes of them, for tests that exchange sums."""

import random

import torch

from phalanx.plan.fold import Fold


def gradients(shapes, replicas, seed):
    """A vector for each replica, with entries that some replicas lack, and bits that show the order of additions."""
    drawn, made = random.Random(seed), torch.Generator().manual_seed(seed)
    return [
        [
            None if drawn.random() < 0.3 else torch.randn(shape, generator=made) * 10.0 ** drawn.randint(-3, 3)
            for shape in shapes
        ]
        for _ in range(replicas)
    ]


def plus(left, right):
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def folded(vectors, block):
    """What who computes these replicas has at its nodes."""
    own = Fold(len(vectors), plus)
    for replica in block:
        own.push(replica, vectors[replica])
    return [partial.value for partial in own.partials()]


def bits(vector):
    return [None if entry is None else entry.contiguous().numpy().tobytes() for entry in vector]
