"""The job in phalanx: ``python phalanx_job.py``."""

import functools

import torch
from parts import BATCH, EPOCHS, FOLDER, LR, MOMENTUM, PER_EPOCH, WORKERS, Net, report, x, y
from torch.nn.functional import cross_entropy

import phalanx

recipe = phalanx.Recipe(
    Net,
    (x, y),
    cross_entropy,
    batch_size=BATCH,
    replicas=4,
    epochs=EPOCHS,
    optimizer=functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM),
)
result = recipe.train(workers=WORKERS, run_dir=FOLDER, snapshot_every=PER_EPOCH)
report(result.model.state_dict())
