"""What the six programs share, and no one counts: data, model, numbers, the hash, and a log of what was computed.

Each forward pass writes its time and its samples into a file of its process. So what is computed twice, how long
nothing moves, and which processes are workers is read in the same way for every library.
"""

import hashlib
import importlib.util
import os
import pathlib
import struct
import time

import numpy as np
import torch
from torch import nn

SAMPLES, BATCH = 1792, 64
PER_EPOCH = SAMPLES // BATCH
EPOCHS = int(os.environ.get("COMPARED_EPOCHS", "12"))
WORKERS = int(os.environ.get("COMPARED_WORKERS", "1"))
FOLDER = pathlib.Path(os.environ.get("COMPARED_FOLDER", "runs/compared")).absolute()
LR, MOMENTUM = 0.05, 0.9

package = importlib.util.find_spec("sklearn").origin  # not imported, as that would take a second of each process
table = np.loadtxt(pathlib.Path(package).parent / "datasets/data/digits.csv.gz", delimiter=",", dtype=np.float32)
x = torch.tensor(table[:SAMPLES, :64]).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(table[:SAMPLES, 64], dtype=torch.long)
_log = (0, -1)  # process, descriptor


class Net(nn.Module):
    """A small CNN with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Dropout(0.25), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, images):
        _note(len(images))
        return self.layers(images)


def report(state: dict) -> None:
    """Print the hash of the weights."""
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(name.encode() + state[name].detach().cpu().contiguous().numpy().tobytes())
    print("weights", sha.hexdigest(), flush=True)


def _note(samples: int) -> None:
    global _log
    folder = os.environ.get("COMPARED_LOG")
    if folder is None:
        return
    if _log[0] != os.getpid():
        _log = os.getpid(), os.open(f"{folder}/{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.write(_log[1], struct.pack("dd", time.time(), samples))
