"""A loss over the whole batch (SimCLR's NT-Xent) in step 0, for R = 1, 2 and 4: of shares, and with loss_over="batch".

python benchmarks/batch_losses.py
python benchmarks/batch_losses.py --price    # steps of two workers over the batch beside those over shares, in turn
"""

import itertools
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import phalanx

SAMPLES, BATCH, TEMPERATURE = 512, 128, 0.5


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16),
    )  # fmt: skip


def views(model, batch):
    """Two noisy views of each image."""
    (images,) = batch
    noisy = torch.stack([images + torch.randn_like(images), images + torch.randn_like(images)], 1)
    return F.normalize(model(noisy.flatten(0, 1)), dim=1).unflatten(0, (len(images), 2))


def nt_xent(output, target):
    """Each view has to find the other one among all views that the loss sees."""
    points = output.transpose(0, 1).flatten(0, 1)
    alike = points @ points.T / TEMPERATURE
    alike = alike.masked_fill(torch.eye(len(points), dtype=torch.bool), -float("inf"))
    return F.cross_entropy(alike, torch.arange(len(points)).roll(len(output)))


def make_wide():
    """A model whose step takes long, with 128 outputs."""
    sizes = [512, 2048, 2048, 2048, 128]
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def price(replicas, turns=25, steps=3):
    """Milliseconds of a step over shares and over the batch: medians of turns, interleaved."""
    x, runs = torch.randn(4096, 512), {}
    for over in ("share", "batch"):
        fields = {"loss_over": over, "replicas": replicas, "batch_size": 256, "steps": 8 + turns * steps}
        recipe = phalanx.Recipe(
            make_wide, (x,), lambda output, target: (output - target).square().mean(),
            forward_fn=lambda model, batch: model(batch[0]), target_fn=lambda batch: batch[0][:, :128], **fields,
        )  # fmt: skip
        runs[over] = recipe.start(workers=2, progress=False)
    for run in runs.values():
        list(itertools.islice(run, 8))
    seconds = {over: [] for over in runs}
    for _ in range(turns):
        for over, run in runs.items():
            began = time.perf_counter()
            list(itertools.islice(run, steps))
            seconds[over].append((time.perf_counter() - began) / steps)
    for run in runs.values():
        run.close()
    return [1000 * statistics.median(seconds[over]) for over in ("share", "batch")]


if __name__ == "__main__" and "--price" in sys.argv:
    for replicas in (2, 4):
        share, batch = price(replicas)
        print(f"R = {replicas}, 2 workers: {share:.1f} ms over shares, {batch:.1f} over the batch: {batch / share:.3f}")
elif __name__ == "__main__":
    data = (torch.rand(SAMPLES, 3, 16, 16, generator=torch.Generator().manual_seed(0)),)
    for replicas in (1, 2, 4):
        losses = []
        for over in ("share", "batch"):
            fields = {"loss_over": over, "replicas": replicas, "batch_size": BATCH, "steps": 1}
            recipe = phalanx.Recipe(make_model, data, nt_xent, forward_fn=views, **fields)
            losses.append(recipe.train(engine="inline", progress=False).loss)
        print(f"R = {replicas}: {losses[0]:.2f} of shares, {losses[1]:.2f} over the batch")
