"""What it takes to start workers again, and to replace one that was killed: seconds, of the phalanx on PYTHONPATH.

    PYTHONPATH=src python benchmarks/starts.py        # and the same with another commit's src, in turn

Compare two commits by several runs of each, one after the other: the figures of one run follow the machine's mood.

    PYTHONPATH=src python benchmarks/starts.py --with transformers    # its imports, and starts with a small Llama
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time

import footprint
import models
import torch

import phalanx

STARTS, KILLS, STEPS_BETWEEN = 6, 16, 150


def second_start() -> float:
    """From the call of `train()` to the first report, once the process that starts workers is there: the median."""
    case = models.case("lenet")
    footprint.phalanx_start("workers=2", case)
    return statistics.median(footprint.phalanx_start("workers=2", case) for _ in range(STARTS))


def pause() -> float:
    """By how much the longest step after a SIGKILL is longer than the others: the median."""
    case = models.case("tiny")
    steps = (KILLS + 3) * STEPS_BETWEEN
    recipe = phalanx.Recipe(
        case.make_model, (case.x, case.y), case.loss_fn, replicas=4, batch_size=case.batch_size, steps=steps,
        optimizer=models.OPTIMIZER,
    )  # fmt: skip
    pauses = []
    with recipe.start(workers=2) as run:
        for _ in range(2 * STEPS_BETWEEN):
            run.step()
        for kill in range(KILLS):
            os.kill(run.worker_pids[kill % 2], signal.SIGKILL)
            times = [time.perf_counter()]
            for _ in range(STEPS_BETWEEN):
                run.step()
                times.append(time.perf_counter())
            spans = [after - before for before, after in itertools.pairwise(times)]
            pauses.append(max(spans) - statistics.median(spans))
    return statistics.median(pauses)


def to_first_step(make_model, data, loss_fn=None) -> float:
    """Seconds from the call of `train()` with two workers to the first report."""
    reported, began = [], time.perf_counter()
    phalanx.train(
        make_model, data, loss_fn, replicas=2, batch_size=8, steps=5, workers=2, progress=False,
        callbacks=[lambda report: reported.append(time.perf_counter())],
    )  # fmt: skip
    return reported[0] - began


def with_torch() -> dict:
    """The first start of this process, and the median of those after it, with a model of torch's."""
    x = torch.randn(64, 16)
    job = lambda: torch.nn.Linear(16, 16), (x, x), torch.nn.functional.mse_loss
    times = [to_first_step(*job) for _ in range(STARTS)]
    return {"first": times[0], "then": statistics.median(times[1:])}


def with_transformers() -> dict:
    """The same with a small Llama, and what its import takes here before: no later start is as fast as that."""
    began = time.perf_counter()
    from transformers import LlamaConfig, LlamaForCausalLM

    imported = time.perf_counter() - began
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32,
    )  # fmt: skip
    tokens = torch.randint(64, (64, 16))
    data = {"input_ids": tokens, "labels": tokens}
    times = [to_first_step(lambda: LlamaForCausalLM(config).train(), data) for _ in range(STARTS)]
    return {"import": imported, "first": times[0], "then": statistics.median(times[1:])}


WITH = {"torch": with_torch, "transformers": with_transformers}


def compared(library: str) -> dict:
    """The starts with torch alone and with a library, each in a process of its own."""
    found = {}
    for name in ("torch", library):
        command = [sys.executable, __file__, "--only", name]
        found[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only"]:
        print(json.dumps(WITH[sys.argv[2]]()))
    elif sys.argv[1:2] == ["--with"]:
        print(json.dumps(compared(sys.argv[2])))
    else:
        print(json.dumps({"second start": second_start(), "pause": pause()}))
