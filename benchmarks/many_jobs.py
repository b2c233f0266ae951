"""Forty jobs by `train_all`, beside the same jobs one after another and in two processes by hand.

    python benchmarks/many_jobs.py                    # some minutes
    python benchmarks/many_jobs.py --jobs 4 --rounds 1    # does it run?
    python benchmarks/many_jobs.py --save             # writes results/many_jobs.md

Jobs are a small perceptron with as many seeds, trained for some steps. One after another: `recipe.train(workers=1)` in
a loop. By hand: two shells, each with such a loop over half of the jobs, which shows what this machine has to give.
Each measurement is a fresh process, and rounds are interleaved. Seconds count from the first job on, or from the start
of what starts jobs: the import of phalanx counts by hand and in `train_all`, in processes that import it beside the
first one. Digests are compared. Seconds of processors are those of the process and of all that it started.
"""

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import step
import torch
import tqdm
from torch import nn

import phalanx
from phalanx.engines.processes.starter import WARM

RESULTS = pathlib.Path(__file__).parent / "results" / "many_jobs.md"
STEPS = 250, 1000
ALONE, BY_HAND, AT_ONCE = "one after another", "two by hand", "train_all"
COLUMNS = ALONE, BY_HAND, AT_ONCE
SAMPLES, FEATURES, CLASSES = 2048, 32, 10


def make_model() -> nn.Module:
    """A small perceptron."""
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def recipes(jobs: int, steps: int) -> list[phalanx.Recipe]:
    """As many seeds of one job, over the same data."""
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, FEATURES, generator=draw), torch.randint(CLASSES, (SAMPLES,), generator=draw)
    common = {"replicas": 4, "batch_size": 64, "steps": steps, "lr": 1e-3}
    return [phalanx.Recipe(make_model, data, nn.functional.cross_entropy, seed=seed, **common) for seed in range(jobs)]


def processor_seconds() -> float:
    """Of this process, and of those that it started and that have ended."""
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, who))


def measure(column: str, jobs: int, steps: int, part: slice) -> dict:
    """Facts of one column, in this process. ``part``: of the jobs, those that it trains."""
    given, before, began = recipes(jobs, steps)[part], processor_seconds(), time.perf_counter()
    if column == ALONE:
        digests = [recipe.train(workers=1, progress=False).digest for recipe in given]
    elif column == BY_HAND:
        halves = [command(ALONE, jobs, steps, first) for first in range(2)]
        shells = [subprocess.Popen(half, stdout=subprocess.PIPE, text=True) for half in halves]
        first, second = (json.loads(shell.communicate(timeout=1200)[0].splitlines()[-1]) for shell in shells)
        digests = [digest for pair in zip(first["digests"], second["digests"], strict=True) for digest in pair]
    else:
        digests = [result.digest for result in phalanx.train_all(given, progress=False)]
    seconds = time.perf_counter() - began
    WARM.close()  # so that its seconds count
    return {"seconds": seconds, "processor": processor_seconds() - before, "digests": digests}


def command(column: str, jobs: int, steps: int, first: int | None = None) -> list[str]:
    """What measures in a fresh process; ``first``: every second job from this one on."""
    given = {"--column": column, "--jobs": jobs, "--steps": steps, **({} if first is None else {"--first": first})}
    return [sys.executable, __file__, *(str(each) for pair in given.items() for each in pair)]


def apart(column: str, jobs: int, steps: int) -> dict:
    """The same in a fresh process."""
    done = subprocess.run(command(column, jobs, steps), capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise SystemExit(f"{column}, {jobs} jobs of {steps} steps failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compared(jobs: int, rounds: int, lengths: list[int]) -> dict[int, step.Facts]:
    """Facts by steps of a job, column and round."""
    found: dict[int, step.Facts] = {steps: {column: [] for column in COLUMNS} for steps in lengths}
    with tqdm.tqdm(total=len(COLUMNS) * rounds * len(lengths), unit="process") as bar:
        for number in range(rounds):
            for steps, facts in found.items():
                for column in facts if number % 2 == 0 else reversed(facts):
                    bar.set_description(f"{jobs} jobs of {steps} steps, {column}")
                    facts[column].append(apart(column, jobs, steps))
                    bar.update()
    for steps, facts in found.items():
        if len({tuple(run["digests"]) for runs in facts.values() for run in runs}) != 1:
            raise SystemExit(f"WRONG: digests of {jobs} jobs of {steps} steps differ")
    return found


def report(found: dict[int, step.Facts], jobs: int, rounds: int) -> str:
    """The table; above 1, it is faster than one after another."""
    rows = []
    for steps, facts in found.items():
        median = {
            (column, name): statistics.median(run[name] for run in facts[column])
            for column in COLUMNS
            for name in ("seconds", "processor")
        }
        rows.append([
            str(steps), f"{median[ALONE, 'seconds'] / jobs:.2f}",
            *(f"{median[column, 'seconds']:.1f} ({median[column, 'processor']:.1f})" for column in COLUMNS),
            *(f"**{step.ratio(facts, ALONE, column):.2f}**" for column in COLUMNS[1:]),
        ])  # fmt: skip
    header = [
        "steps of a job", "a job, s", *(f"{column}, s (of processors)" for column in COLUMNS),
        *(f"{ALONE} / {column}" for column in COLUMNS[1:]),
    ]  # fmt: skip
    method = (
        f"{jobs} jobs. Rounds: {rounds}, interleaved, a fresh process for each; medians, ratios of each round. Digests "
        "are equal."
    )
    return f"# Many jobs\n\n{step.circumstances('many_jobs.py')}\n\n{method}\n\n{step.markdown(header, rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, action="append", help=f"of a job; by default {STEPS}")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--column", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.column:
        part = slice(None) if given.first is None else slice(given.first, None, 2)
        print(json.dumps(measure(given.column, given.jobs, given.steps[0], part)))
        return
    lengths = given.steps or list(STEPS)
    text = report(compared(given.jobs, given.rounds, lengths), given.jobs, given.rounds)
    print(text)
    if given.save:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
