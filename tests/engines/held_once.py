"""A program with a frozen base of 48 MB: prints what its processes hold of their own, and what they share."""

import functools
import itertools
import json
import os
import pathlib

import torch

import phalanx

LAYERS, WIDE, NARROW = 12, 1024, 12
SIZE = LAYERS * 4 * WIDE**2


class Layer(torch.nn.Module):
    """A frozen layer and a narrow one beside it that is trained."""

    def __init__(self, width):
        super().__init__()
        self.base = torch.nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(width, 2), torch.nn.Linear(2, width)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def base(width):
    return torch.nn.Sequential(*[Layer(width) for _ in range(LAYERS)])


def facts(pid):
    """Bytes that a process has of its own, and shares with others, as the kernel counts them."""
    lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    told = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    return told["Pss_Anon"], told["Pss_Shmem"]


def main():
    told = []
    for width in (NARROW, WIDE):
        x = torch.randn(12, width)
        recipe = phalanx.Recipe(
            functools.partial(base, width), (x, x), torch.nn.functional.mse_loss, replicas=2, steps=6
        )
        with recipe.start(workers=2, engine="processes") as run:
            for _ in itertools.islice(run, 3):
                pass
            own, shared = zip(*(facts(pid) for pid in (os.getpid(), *run.worker_pids)), strict=True)
            told.append({"own": own, "shared": sum(shared)})
    print(json.dumps(told))


if __name__ == "__main__":
    main()
