"""What it costs to be ready for deaths, while nobody dies: snapshots in memory, and snapshots on disk every 10 steps.

    python benchmarks/recovery.py

In one run, blocks of steps with snapshots and without take turns, so that both meet the same machine; the cost is the
median ratio of neighbours. A block on disk ends when its last snapshot is there.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import models
import step
import tqdm

MEMORY, DISK = "in memory", "on disk, every 10 steps"
COLUMNS = (MEMORY, DISK)
MODELS = ("lenet", "mlp", "gpt")
EVERY = 10
BLOCK, PAIRS = 50, 10


def measure(column: str, model: str, pairs: int) -> dict:
    """Seconds a step in blocks without and with snapshots, and the ratio of each pair."""
    import phalanx

    case = models.case(model)
    recipe = phalanx.Recipe(
        case.make_model, (case.x, case.y), case.loss_fn, replicas=2, batch_size=case.batch_size,
        steps=2 * BLOCK * (pairs + 1), optimizer=models.OPTIMIZER,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        saving = {"run_dir": folder, "snapshot_every": EVERY} if column == DISK else {}
        with recipe.start(workers=2, engine="processes", progress=False, **saving) as run:
            observers, run._watched = run._loop._observers, False
            found: list[list[float]] = [[], []]
            for number in range(2 * (pairs + 1)):
                kept = (number + number // 2) % 2  # off on, on off, off on
                found[kept].append(
                    block(run, observers if kept and column == DISK else (), memory=kept or column == DISK)
                )
    off, on = found[0][1:], found[1][1:]  # the first ones warm up
    return {
        "off": statistics.median(off), "on": statistics.median(on),
        "ratios": [b / a for a, b in zip(off, on, strict=True)],
    }  # fmt: skip


def block(run, observers, *, memory) -> float:
    """Seconds a step of a block, with the observers of a run or none, with snapshots in memory or none."""
    end = run.steps + BLOCK
    run._loop._observers = observers
    run._loop._horizon = lambda: min([end, *[observer.horizon(run.steps) for observer in observers]])
    run._engine.supervisor.hold(reading=not memory)  # nothing is saved in memory while somebody reads what was
    began = time.perf_counter()
    while run.steps < end:
        next(run)
    if observers:
        run._saver.settle()
    return (time.perf_counter() - began) / BLOCK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/recovery.*")
    arguments = parser.parse_args()
    chosen = [arguments.model] if arguments.model else MODELS
    measured: dict[str, dict] = {}
    with tqdm.tqdm(total=len(chosen) * len(COLUMNS) * arguments.rounds, unit="run") as bar:
        for number in range(arguments.rounds):
            for model in chosen:
                for column in COLUMNS if number % 2 == 0 else reversed(COLUMNS):
                    bar.set_description(f"{model}, {column}")
                    facts = measured.setdefault(model, {}).setdefault(column, {"off": [], "on": [], "ratios": []})
                    for name, value in measure(column, model, arguments.pairs).items():
                        facts[name] += value if isinstance(value, list) else [value]
                    bar.update()
    rows = [
        [model, column, *(step.spelled(1e3 * statistics.median(facts[name])) for name in ("off", "on")),
         *(f"{100 * (part - 1):+.1f} %" for part in statistics.quantiles(facts["ratios"], n=4))]
        for model, columns in measured.items() for column, facts in columns.items()
    ]  # fmt: skip
    header = ["model", "snapshots", "without, ms", "with, ms", "cost: lower quartile", "median", "upper quartile"]
    report = (
        f"# The cost of being ready\n\n{step.circumstances('recovery.py')}\n\nSteps of 2 workers, R = 2. Blocks of "
        f"{BLOCK} steps with and without take turns in one run; {arguments.rounds * arguments.pairs} pairs.\n\n"
        f"{step.markdown(header, rows)}\n"
    )
    print(report)
    if arguments.save:
        step.save("recovery", report, measured)


if __name__ == "__main__":
    main()
