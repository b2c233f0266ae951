"""What it takes to start workers again, and to replace one that was killed: seconds, of the phalanx on PYTHONPATH.

    PYTHONPATH=src python benchmarks/starts.py        # and the same with another commit's src, in turn

Compare two commits by several runs of each, one after the other: the figures of one run follow the machine's mood.
"""

import itertools
import json
import os
import signal
import statistics
import time

import footprint
import models

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


if __name__ == "__main__":
    print(json.dumps({"second start": second_start(), "pause": pause()}))
