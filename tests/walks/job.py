"""Trains for eight steps, while the files that are entered are noted: ``job.py inline``, ``workers`` or ``killed``."""

import os
import signal
import sys

import sitecustomize
import torch

import phalanx


class Rows:
    """A dataset of 64 rows."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.ones(8) * index, torch.ones(1)


def forward(model, sample):
    """What a batch is brought to."""
    return model(sample[0])


recipe = phalanx.Recipe(
    lambda: torch.nn.Linear(8, 1), Rows(), torch.nn.functional.mse_loss, forward, steps=8, batch_size=16
)
how = {"engine": "inline"} if sys.argv[1] == "inline" else {"engine": "processes", "workers": 2}
print(os.getpid())
sitecustomize.noting.begin()
with recipe.start(**how, progress=False) as run:
    for report in run:
        if report.step == 3 and sys.argv[1] == "killed":
            sitecustomize.noting.begin()
            os.kill(run.worker_pids[0], signal.SIGKILL)
