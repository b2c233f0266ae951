"""One optimizer step: phalanx beside the plain PyTorch loop, in interleaved subprocess rounds; medians and ratios.

    python benchmarks/step.py                     # all models
    python benchmarks/step.py --model tiny --rounds 3

Columns: the plain loop with 1 thread and with all cores; phalanx inline with R = 1, 2, 4, 8 (1 thread per replica).
Each round starts a fresh process per column in turn, so that what else the machine does hits all columns alike. The
first steps of each process warm up and are not counted. `x plain` is phalanx's time over the plain loop's at 1 thread,
round by round.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import models
import torch
import tqdm

COLUMNS = ("plain 1 thread", "plain all cores", "R=1", "R=2", "R=4", "R=8")
RESULTS = pathlib.Path(__file__).parent / "results"
README = pathlib.Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- step:begin -->", "<!-- step:end -->"


class Clock:
    """A loss that notes when it was called: two notes, a known number of steps apart, give the time of a step."""

    def __init__(self, loss_fn):
        self.loss_fn, self.calls = loss_fn, []

    def __call__(self, output, target):
        self.calls.append(time.perf_counter())
        return self.loss_fn(output, target)

    def seconds(self, first: int, steps: int, calls_per_step: int) -> float:
        return (self.calls[(first + steps) * calls_per_step] - self.calls[first * calls_per_step]) / steps


def plain_seconds(case: models.Case, threads: int) -> float:
    """Seconds a step of the loop one writes by hand: shuffled batches, AdamW fused."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = Clock(case.loss_fn)
    model = case.make_model()
    optimizer = models.OPTIMIZER(model.parameters())
    losses = []
    while len(losses) <= case.warm_up + case.steps:
        order = torch.randperm(len(case.x))
        for start in range(0, len(case.x), case.batch_size):
            batch = order[start : start + case.batch_size]
            loss = clock(model(case.x[batch]), case.y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return clock.seconds(case.warm_up, case.steps, 1)


def phalanx_seconds(case: models.Case, replicas: int) -> float:
    """Seconds a step of `train()`."""
    import phalanx

    clock = Clock(case.loss_fn)
    phalanx.train(
        case.make_model, (case.x, case.y), clock, replicas=replicas, batch_size=case.batch_size,
        steps=case.warm_up + case.steps + 1, optimizer=models.OPTIMIZER,
    )  # fmt: skip
    return clock.seconds(case.warm_up, case.steps, replicas)


def measure(column: str, model: str) -> float:
    """Seconds a step of one column, in this process."""
    case = models.case(model)
    if column.startswith("plain"):
        return plain_seconds(case, 1 if column == "plain 1 thread" else os.cpu_count() or 1)
    return phalanx_seconds(case, int(column.removeprefix("R=")))


def measured_apart(column: str, model: str) -> float:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--model", model, "--column", column]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)


def compare(model: str, rounds: int, bar: tqdm.tqdm) -> dict[str, list[float]]:
    """Seconds a step per column and round, rounds interleaved."""
    seconds: dict[str, list[float]] = {column: [] for column in COLUMNS}
    for number in range(rounds):
        for column in COLUMNS if number % 2 == 0 else reversed(COLUMNS):
            bar.set_description(f"{model}, {column}")
            seconds[column].append(measured_apart(column, model))
            bar.update()
    return seconds


def ratio(seconds: dict[str, list[float]], column: str, base: str = "plain 1 thread") -> float:
    """Median over the rounds of this column's time over the base's in the same round."""
    return statistics.median(mine / its for mine, its in zip(seconds[column], seconds[base], strict=True))


def table(measured: dict[str, dict[str, list[float]]]) -> str:
    """Median milliseconds, and ratios, as Markdown."""
    lines = [
        "| model | " + " | ".join(f"{column}, ms" for column in COLUMNS) + " | R=1 x plain | R=8 x plain |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for model, seconds in measured.items():
        cells = [f"{statistics.median(seconds[column]) * 1e3:.3f}" for column in COLUMNS]
        cells += [f"{ratio(seconds, 'R=1'):.2f}", f"{ratio(seconds, 'R=8'):.2f}"]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def put_into_readme(text: str) -> None:
    """Replace the table between the two markers of the README."""
    before, rest = README.read_text().split(BEGIN)
    README.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.split(END)[1])


def circumstances() -> str:
    """Machine, versions, date and command: what a figure is worth without them is nothing."""
    import phalanx

    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return (
        f"{datetime.date.today()}, {cpu}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, phalanx {phalanx.__version__}; "
        f"`{' '.join(['python benchmarks/step.py', *sys.argv[1:]])}`"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=models.CASES, help="one model; all by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--column", choices=COLUMNS, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/step.md and step.json")
    arguments = parser.parse_args()
    if arguments.column:
        print(measure(arguments.column, arguments.model))
        return
    chosen = [arguments.model] if arguments.model else models.CASES
    with tqdm.tqdm(total=len(chosen) * arguments.rounds * len(COLUMNS), unit="process") as bar:
        measured = {model: compare(model, arguments.rounds, bar) for model in chosen}
    method = f"Medians of {arguments.rounds} interleaved rounds; ratios are medians of each round's ratio."
    report = f"# One step, inline\n\n{circumstances()}\n{method}\n\n{table(measured)}\n"
    print(report)
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "step.md").write_text(report)
        (RESULTS / "step.json").write_text(json.dumps(measured, indent=1) + "\n")
        put_into_readme(table(measured))


if __name__ == "__main__":
    main()
