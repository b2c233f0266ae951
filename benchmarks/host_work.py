"""Host time of a step between its norm and the end of its update, where a device waits: on tiny tensors of the CPU.

    python benchmarks/host_work.py --save         # a minute

A plain loop enqueues its update behind the backward pass. A step of phalanx reads the norm first, so whatever the host
does from then on is time in which the device idles. Buffers are settled as on a device (``Buffers`` is told that they
are far away), by kernels that are too small to take time themselves: what is left is Python and torch's dispatcher.
Processor time, medians. "After" is what is left behind the norm: all of settling but its last copies is enqueued
before. An H100's host may be 1.5 times as fast; a launch on CUDA costs some 4 us more than a call does here.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "src")]

import step  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from phalanx.frameworks.torch.replica.buffers import Buffers  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "host_work.md"
REPLICAS, ROUNDS, WARM = 8, 40, 10


def normed(parameters=161, norms=53):
    """As many parameters and BatchNorms as ResNet-50 has, of one or two elements."""
    others = parameters - 2 * norms
    return nn.Sequential(
        *(nn.BatchNorm1d(2) for _ in range(norms)), *(nn.Linear(1, 1, bias=False) for _ in range(others))
    )


def gpt2(parameters=148):
    """As many parameters as GPT-2 of 124 million has, and no buffers."""
    return nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(parameters)))


MODELS = {"161 parameters, 53 BatchNorms": normed, "148 parameters (GPT-2)": gpt2}
UPDATES = {
    "SGD with momentum, foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "AdamW, foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW, fused": functools.partial(torch.optim.AdamW, fused=True),
}


def milliseconds(work):
    """The median processor time of ``work()``, which returns what is to be timed."""
    taken = []
    for _ in range(ROUNDS):
        timed = work()
        began = time.process_time()
        timed()
        taken.append(1000 * (time.process_time() - began))
    return statistics.median(taken[WARM:])


def settling(model):
    """Milliseconds of settling eight replicas' buffers behind the norm: all of it, and if it was prepared."""
    buffers = Buffers(model)
    if not buffers.starts:
        return 0.0, 0.0
    buffers._remote = True
    generator = torch.Generator().manual_seed(0)

    def left():
        values = [value.clone() for value in buffers.starts]
        for value in values:
            if value.is_floating_point():
                value.add_(torch.rand(value.shape, generator=generator))
        return 4, values

    replicas = [left() for _ in range(REPLICAS)]

    def whole():
        buffers.prepare(None)
        return functools.partial(buffers.settle, replicas, 7)

    def prepared():
        buffers.prepare(replicas)
        return functools.partial(buffers.settle, replicas, 7)

    return milliseconds(whole), milliseconds(prepared)


def updating(model, make_optimizer):
    """Milliseconds of the optimizer's step."""
    optimizer = make_optimizer(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return milliseconds(lambda: optimizer.step)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="into benchmarks/results/host_work.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, make_model in MODELS.items():
        before, after = settling(make_model())
        for title, make_optimizer in UPDATES.items():
            update = updating(make_model(), make_optimizer)
            total = [f"{settled + update:.2f}" for settled in (before, after)]
            rows.append([name, title, f"{update:.2f}", f"{before:.2f}", f"{after:.2f}", *total])
    head = ["model", "optimizer", "update", "settling, before", "settling, after", "both, before", "both, after"]
    lines = ["# Host work behind the norm", "", step.circumstances("host_work.py"), ""]
    lines += [f"Milliseconds of the processor, {REPLICAS} replicas, medians of {ROUNDS - WARM}.", ""]
    text = "\n".join([*lines, step.markdown(head, rows)])
    print(text)
    if arguments.save:
        RESULTS.write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()
