"""Peak memory and time of a step for several ``micro_batches``, each in a process of its own.

python benchmarks/micro_batches.py
"""

import resource
import subprocess
import sys

import torch
from torch import nn

import phalanx

PARTS = (1, 2, 4, 8, 16)
SAMPLES, UNITS, LAYERS, STEPS = 8192, 512, 9, 3


def make_model():
    layers = [layer for _ in range(LAYERS - 1) for layer in (nn.Linear(UNITS, UNITS), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(UNITS, 10))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def tell(parts: int) -> None:
    data = torch.randn(SAMPLES, UNITS), torch.randint(10, (SAMPLES,))
    recipe = phalanx.Recipe(
        make_model, data, nn.functional.cross_entropy,
        replicas=1, batch_size=SAMPLES, steps=STEPS, micro_batches=parts,
    )  # fmt: skip
    before = peak()
    result = recipe.train(engine="inline", progress=False)
    print(f"micro_batches={parts}: {peak() - before} MB, {result.seconds / STEPS:.2f} s a step", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        tell(int(sys.argv[1]))
    else:
        for parts in PARTS:
            subprocess.run([sys.executable, __file__, str(parts)], check=True)
