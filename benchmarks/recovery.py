"""What it costs to be ready for deaths, while nobody dies: snapshots in memory, and snapshots on disk every 10 steps.

    python benchmarks/recovery.py

Interleaved rounds, a fresh process per column and round, timed as in benchmarks/step.py; each step's time is compared
with that of workers that keep no snapshots.
"""

import argparse
import json
import math
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import models
import step
import tqdm

NOTHING, MEMORY, DISK = "nothing kept", "in memory", "on disk, every 10 steps"
COLUMNS = (NOTHING, MEMORY, DISK)
MODELS = ("lenet", "mlp", "gpt")
EVERY = 10
LONGER = 3  # times the steps of benchmarks/step.py, so that there are several snapshots


class Forgetful:
    """Makes the model; in a worker it also sees to it that no snapshots are kept in memory."""

    def __init__(self, make_model):
        self.make_model = make_model
        self.parent = os.getpid()

    def __call__(self):
        if os.getpid() != self.parent:
            from phalanx.engines.keeper import Keeper

            Keeper.interval = lambda keeper: math.inf
        return self.make_model()


def measure(column: str, model: str) -> dict:
    """Seconds a step after the warm steps."""
    import time

    import phalanx

    case = models.case(model)
    steps = LONGER * case.steps
    make_model = Forgetful(case.make_model) if column == NOTHING else case.make_model
    recipe = phalanx.Recipe(
        make_model, (case.x, case.y), case.loss_fn, replicas=2, batch_size=case.batch_size,
        steps=case.warm_up + steps, optimizer=models.OPTIMIZER,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        saving = {"run_dir": folder, "snapshot_every": EVERY} if column == DISK else {}
        with recipe.start(workers=2, engine="processes", progress=False, **saving) as run:
            for _ in range(case.warm_up):
                next(run)
            began = time.perf_counter()
            run.finish()
            return {"seconds": (time.perf_counter() - began) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model")
    parser.add_argument("--column", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/recovery.*")
    arguments = parser.parse_args()
    if arguments.column:
        print(json.dumps(measure(arguments.column, arguments.model)))
        return
    chosen = [arguments.model] if arguments.model else MODELS
    measured: dict[str, step.Facts] = {model: {column: [] for column in COLUMNS} for model in chosen}
    with tqdm.tqdm(total=len(chosen) * len(COLUMNS) * arguments.rounds, unit="process") as bar:
        for model, facts in measured.items():
            for number in range(arguments.rounds):
                for column in COLUMNS if number % 2 == 0 else reversed(COLUMNS):
                    facts[column].append(step.measured_apart(column, model, quick=False, script=__file__))
                    bar.update()
    rows = [
        [model, *(step.spelled(step.milliseconds(facts, column)) for column in COLUMNS),
         *(f"{100 * (step.ratio(facts, column, NOTHING) - 1):+.1f} %" for column in COLUMNS[1:])]
        for model, facts in measured.items()
    ]  # fmt: skip
    header = ["model", *(f"{column}, ms" for column in COLUMNS), *(f"cost, {column}" for column in COLUMNS[1:])]
    report = (
        f"# The cost of being ready\n\n{step.circumstances('recovery.py')}\n\nSteps of 2 workers, R = 2, medians of "
        f"{arguments.rounds} interleaved rounds; costs are medians of each round's ratio.\n\n"
        f"{step.markdown(header, rows)}\n"
    )
    print(report)
    if arguments.save:
        step.save("recovery", report, measured)


if __name__ == "__main__":
    main()
