"""Times steps of two checkouts, this one and another, side by side, so that a change that slows them down is seen.

    git worktree add /tmp/before HEAD~20
    python benchmarks/against.py /tmp/before

For each model and number of workers one process of each checkout is started, and the two take turns: one does some
steps, about a fifth of a second, while the other waits, then the other. So what else the machine does hits both alike.
That is done with several pairs of processes, as a process may be lucky with its memory. The ratio is this checkout's
time over the other's: the median over all turns, with the interval in which the true median lies with 95 % (binomial).
Below 1 is faster.
"""

import argparse
import contextlib
import itertools
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import tqdm

HERE = pathlib.Path(__file__).parent.parent
MODELS = ("tiny", "lenet", "mlp", "gpt")
COLUMNS = {"R=1": (1, 1), "R=8": (8, 1), "W=2": (2, 2), "W=4": (4, 4)}  # replicas, workers
TURN_SECONDS = 0.2
WARM_STEPS = 5


class Checkout:
    """A process that does steps of one recipe with the package of one checkout, when it is told to."""

    def __init__(self, tree: pathlib.Path, model: str, column: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        command = [sys.executable, __file__, "--work", model, column]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
        )

    def steps(self, count: int) -> float:
        """Do so many steps; seconds that they took."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a checkout's process ended: {self.process.wait()}")
        return float(answer)

    def end(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def work(model: str, column: str) -> None:
    """Do steps as standard input says: a number a line; answer each with the seconds that they took."""
    import models

    import phalanx

    case = models.case(model)
    replicas, workers = COLUMNS[column]
    recipe = phalanx.Recipe(
        case.make_model, (case.x, case.y), case.loss_fn, replicas=replicas, batch_size=case.batch_size,
        steps=1_000_000, optimizer=models.OPTIMIZER,
    )  # fmt: skip
    engine = "inline" if workers == 1 else "processes"
    with recipe.start(workers=workers, engine=engine, progress=False) as run, contextlib.suppress(EOFError):
        take_turns(run)
        run.finish()


def take_turns(run: Any) -> None:
    """Have ``run.finish()`` wait after as many steps as a line of standard input says, and answer with its seconds.

    The turns are taken inside ``finish``, as what is asked for is its speed; workers run ahead to the end of a turn.
    """
    one_step = type(run).__next__
    end, began = 0, 0.0

    def step(self: Any) -> Any:
        nonlocal end, began
        if self.steps == end:
            if end:
                print(time.perf_counter() - began, flush=True)
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            end += int(line)
            began = time.perf_counter()
        return one_step(self)

    type(run).__next__ = step
    holder = getattr(run, "_loop", run)  # where it is said how far workers may run ahead
    holder._horizon = lambda *_: end


def interval(values: list[float]) -> tuple[float, float]:
    """Where the true median lies with 95 %: order statistics, by the binomial distribution."""
    ordered, n = sorted(values), len(values)
    below = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)) - 1)
    return ordered[below], ordered[n - 1 - below]


def compare(other: pathlib.Path, model: str, column: str, turns: int) -> tuple[list[float], list[float]]:
    """Seconds a step of both checkouts, turn by turn."""
    pair = [Checkout(HERE, model, column), Checkout(other, model, column)]
    try:
        warm = [checkout.steps(WARM_STEPS) and checkout.steps(WARM_STEPS) for checkout in pair]
        count = max(1, round(TURN_SECONDS * WARM_STEPS / min(warm)))
        times: tuple[list[float], list[float]] = [], []
        for turn in range(turns):
            for side in (0, 1) if turn % 2 else (1, 0):
                times[side].append(pair[side].steps(count) / count)
    finally:
        for checkout in pair:
            checkout.end()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=pathlib.Path, nargs="?", help="the root of another checkout")
    parser.add_argument("--pairs", type=int, default=3, help="of processes")
    parser.add_argument("--turns", type=int, default=24, help="of each pair")
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; may be given again")
    parser.add_argument("--column", action="append", choices=COLUMNS, help="only this one; may be given again")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(*arguments.work)
        return
    print("| model | column | here, ms | there, ms | here / there | 95 % | turns |", flush=True)
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    cases = list(itertools.product(arguments.model or MODELS, arguments.column or COLUMNS))
    for model, column in tqdm.tqdm(cases):
        pairs = [compare(arguments.other.resolve(), model, column, arguments.turns) for _ in range(arguments.pairs)]
        here, there = ([seconds for pair in pairs for seconds in pair[side]] for side in (0, 1))
        ratios = [one / other for one, other in zip(here, there, strict=True)]
        low, high = interval(ratios)
        middle = [statistics.median(times) * 1e3 for times in (here, there)]
        found = f"{middle[0]:.3g} | {middle[1]:.3g} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f}"
        tqdm.tqdm.write(f"| {model} | {column} | {found} | {len(ratios)} |")


if __name__ == "__main__":
    main()
