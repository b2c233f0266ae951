"""One optimizer step: phalanx beside the plain PyTorch loop and DistributedDataParallel, in interleaved rounds.

    python benchmarks/step.py                     # all models
    python benchmarks/step.py --model tiny --rounds 3
    python benchmarks/step.py --quick             # one short round: does everything run?
    python benchmarks/step.py --framework jax     # jax recipes, see step_jax.py

Columns: the plain loop with 1 thread and with all cores; DistributedDataParallel (DDP) over Gloo with W workers;
phalanx with W worker processes and R = W replicas; phalanx inline with R = 1 and R = 8. Each round starts a fresh
process per column in turn, so that what else the machine does hits all columns alike.
"""

import argparse
import datetime
import itertools
import json
import math
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import models
import peers
import step_jax
import torch
import tqdm

PLAIN = ("plain 1 thread", "plain all cores")
COLUMNS = (*PLAIN, "DDP W=2", "W=2", "DDP W=4", "W=4", "R=1", "R=8", "compute W=2", "copy")
SAME_ANSWER = ("R=4", "R=4 W=2", "W=4")  # all of them compute 4 replicas; the first two only once
RESULTS = pathlib.Path(__file__).parent / "results"
README = pathlib.Path(__file__).parent.parent / "README.md"
STATE_PASSES = 6  # weights and AdamW's two states, read and written
METHOD = """Rounds: {rounds}, interleaved, a fresh process per column and round. Times are medians, ratios are medians
of each round's ratio. Everything is timed after warm steps, a fifth as many ({steps} are timed). DDP: Gloo
on loopback, `gradient_as_bucket_view`, `static_graph`, the same fused AdamW, one thread per worker. The
whole batch is the same everywhere; W workers have R = W replicas where nothing else is said."""
LIMIT = """Computing alone: 2 processes at once, forward and backward of one share each, nothing else, with memory
handled as in phalanx's workers (kept by the process, in huge pages). Traffic: each of the 2 gradients read once,
weights and AdamW's two states read and written once, at the bandwidth of copying 256 MiB with all cores (bytes read and
written). The limit is the sum of both. What fits in the caches costs less than this says."""

Facts = dict[str, list[dict]]


def phalanx_facts(case: models.Case, replicas: int, workers: int, devices: int = 0) -> dict:
    """A whole run: seconds a step after the warm steps, digest, and seconds a step in each phase, mean of workers."""
    import phalanx

    recipe = phalanx.Recipe(
        case.make_model, (case.x, case.y), case.loss_fn, replicas=replicas, batch_size=case.batch_size,
        steps=case.warm_up + case.steps, optimizer=models.OPTIMIZER, precision=case.precision,
    )  # fmt: skip
    where = {"workers": workers, "engine": "inline" if workers == 1 else "processes"}
    with recipe.start(**({"devices": ["cpu"] * devices} if devices else where), progress=False) as run:
        for _ in itertools.islice(run, case.warm_up):
            pass
        began = time.perf_counter()
        run.finish()
        ended = time.perf_counter()
    return {
        "seconds": (ended - began) / case.steps,
        "span": [began, ended],
        "digest": run.result().digest,
    }


def measure(column: str, case: models.Case) -> dict:
    """Facts of one column, in this process. `W=2` has as many replicas as workers, `R=8` one worker, `P=2` devices."""
    numbers = {letter: int(number) for letter, number in re.findall(r"([RWP])=(\d+)", column)}
    if column == "copy":
        return peers.copying()
    if column in PLAIN:
        return peers.plain(case, 1 if column == "plain 1 thread" else peers.CORES)
    if column.startswith("DDP"):
        return peers.ddp(case, numbers["W"])
    if column.startswith("compute"):
        return peers.compute(case, numbers["W"])
    workers, devices = numbers.get("W", 1), numbers.get("P", 0)
    return phalanx_facts(case, numbers.get("R", devices or workers), workers, devices)


def measured_apart(column: str, model: str, *more: str, quick: bool, script: str = __file__) -> dict:
    """The same in a fresh process, whose last line are the facts. DDP may abort as it ends: it gets three tries."""
    command = [sys.executable, script, "--model", model, "--column", column, *more, *(["--quick"] if quick else [])]
    for _ in range(3 if column.startswith("DDP") else 1):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
    raise SystemExit(f"{model}, {column} failed:\n{done.stdout}{done.stderr}")


def compare(model: str, rounds: int, bar: tqdm.tqdm, *, quick: bool) -> Facts:
    """Facts per column and round, rounds interleaved."""
    facts: Facts = {column: [] for column in dict.fromkeys((*COLUMNS, *SAME_ANSWER))}
    for number in range(rounds):
        columns = tuple(facts) if number == 0 else COLUMNS
        for column in columns if number % 2 == 0 else reversed(columns):
            bar.set_description(f"{model}, {column}")
            facts[column].append(measured_apart(column, model, quick=quick))
            bar.update()
    check_digests(model, facts)
    return facts


def check_digests(model: str, facts: Facts) -> None:
    """All runs with 4 replicas must have ended in the same bits, however many workers computed them."""
    digests = {column: sorted({run["digest"] for run in facts[column]}) for column in SAME_ANSWER}
    if len({digest for found in digests.values() for digest in found}) != 1:
        raise SystemExit(f"WRONG: the digests of {model} with 4 replicas differ: {json.dumps(digests, indent=1)}")


def milliseconds(facts: Facts, column: str) -> float:
    """Median of a column."""
    return statistics.median(run["seconds"] for run in facts[column]) * 1e3


def ratio(facts: Facts, over: str, under: str) -> float:
    """Median over the rounds of one column's time over another's in the same round."""
    pairs = zip(facts[over], facts[under], strict=True)
    return statistics.median(one["seconds"] / other["seconds"] for one, other in pairs)


def traffic_bytes(model: str, gradients: int) -> int:
    """Bytes that a step has to read and write outside the models' computing."""
    count = sum(parameter.numel() for parameter in models.case(model).make_model().parameters())
    return 4 * count * (gradients + STATE_PASSES)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def spelled(value: float) -> str:
    """Three digits or so: 0.123, 1.23, 12.3, 123."""
    digits = 3 if value < 1 else max(0, 2 - math.floor(math.log10(value)))
    return f"{value:.{digits}f}"


def main_table(measured: dict[str, Facts]) -> str:
    """Milliseconds with two workers, beside DDP and the plain loop."""
    rows = []
    for model, facts in measured.items():
        cells = [spelled(milliseconds(facts, column)) for column in ("plain all cores", "DDP W=2", "W=2")]
        ratios = [f"**{ratio(facts, over, 'W=2'):.2f}**" for over in ("plain all cores", "DDP W=2")]
        rows.append([model, *cells, *ratios])
    return markdown(["model", "plain, ms", "DDP, ms", "phalanx, ms", "plain / phalanx", "DDP / phalanx"], rows)


def four_table(measured: dict[str, Facts]) -> str:
    """Milliseconds with four workers, beside DDP, and the digest."""
    rows = []
    for model, facts in measured.items():
        cells = [spelled(milliseconds(facts, column)) for column in ("DDP W=4", "W=4")]
        rows.append([model, *cells, f"**{ratio(facts, 'DDP W=4', 'W=4'):.2f}**", f"`{facts['W=4'][0]['digest'][:12]}`"])
    return markdown(["model", "DDP W=4, ms", "phalanx W=4, ms", "DDP / phalanx", "digest, R=4, W=1=2=4"], rows)


def price_table(measured: dict[str, Facts]) -> str:
    """What replicas cost in one process."""
    rows = []
    for model, facts in measured.items():
        cells = [spelled(milliseconds(facts, column)) for column in ("plain 1 thread", "R=1", "R=8")]
        ratios = [f"{ratio(facts, column, 'plain 1 thread'):.2f}" for column in ("R=1", "R=8")]
        rows.append([model, *cells, *ratios])
    return markdown(["model", "plain 1 thread, ms", "R=1, ms", "R=8, ms", "R=1 x plain", "R=8 x plain"], rows)


def limit_table(measured: dict[str, Facts]) -> str:
    """How far phalanx with 2 workers is from computing and moving what must be moved."""
    rows = []
    for model, facts in measured.items():
        size = traffic_bytes(model, 2)
        speeds = [run["bytes_per_second"] for run in facts["copy"]]
        limits = [run["seconds"] + size / speed for run, speed in zip(facts["compute W=2"], speeds, strict=True)]
        ratios = [run["seconds"] / limit for run, limit in zip(facts["W=2"], limits, strict=True)]
        speed = statistics.median(speeds)
        rows.append([
            model, f"{speed / 1e9:.1f}", spelled(milliseconds(facts, "compute W=2")), f"{size / 1e6:.3g}",
            spelled(size / speed * 1e3), spelled(statistics.median(limits) * 1e3), spelled(milliseconds(facts, "W=2")),
            f"**{statistics.median(ratios):.2f}**",
        ])  # fmt: skip
    header = [
        "model",
        "copy, GB/s",
        "computing alone, ms",
        "traffic, MB",
        "traffic, ms",
        "limit, ms",
        "phalanx W=2, ms",
    ]
    return markdown([*header, "phalanx / limit"], rows)


def text(measured: dict[str, Facts], rounds: int, *, quick: bool) -> str:
    """The report."""
    cases = {model: models.case(model) for model in measured}
    steps = ", ".join(f"{model} {(case.shortened() if quick else case).steps} steps" for model, case in cases.items())
    parts = [
        f"# One step\n\n{circumstances('step.py')}\n\n{METHOD.format(rounds=rounds, steps=steps)}",
        f"## Beside the plain loop and DDP, two workers\n\n{main_table(measured)}",
        f"## Beside DDP, four workers on {peers.CORES} cores\n\n{four_table(measured)}",
        "The digest is that of 4 replicas: checked to be equal for 1 (inline), 2 and 4 workers, in every round.",
        f"## The price of replicas in one process\n\n{price_table(measured)}",
        f"## The limit\n\n{LIMIT}\n\n{limit_table(measured)}",
    ]
    return "\n\n".join(parts) + "\n"


def put_into_readme(table: str) -> None:
    """Replace the table between the two markers of the README."""
    begin, end = "<!-- step:begin -->", "<!-- step:end -->"
    before, rest = README.read_text().split(begin)
    README.write_text(before + begin + "\n" + table + "\n" + end + rest.split(end)[1])


def circumstances(script: str) -> str:
    """Machine, versions, date and command: what a figure is worth without them is nothing."""
    import phalanx

    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return (
        f"{datetime.date.today()}, {cpu}, {peers.CORES} cores, {torch.backends.cpu.get_cpu_capability()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, phalanx {phalanx.__version__}; "
        f"`{' '.join([f'python benchmarks/{script}', *sys.argv[1:]])}`"
    )


def save(name: str, report: str, measured: object) -> None:
    """Write what people read and what machines read."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(report)
    (RESULTS / f"{name}.json").write_text(json.dumps(measured, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help=f"one of {', '.join(models.CASES)}, or 'size N'; all four by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a tenth of the steps: does everything run?")
    parser.add_argument("--column", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/step.* and the README's table")
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    arguments = parser.parse_args()
    if arguments.framework == "jax":
        step_jax.main(arguments)
        return
    if arguments.column:
        case = models.case(arguments.model)
        print(json.dumps(measure(arguments.column, case.shortened() if arguments.quick else case)))
        return
    chosen = [arguments.model] if arguments.model else models.CASES
    rounds = 1 if arguments.quick else arguments.rounds
    once = len(SAME_ANSWER) - 1
    with tqdm.tqdm(total=len(chosen) * (rounds * len(COLUMNS) + once), unit="process") as bar:
        measured = {model: compare(model, rounds, bar, quick=arguments.quick) for model in chosen}
    report = text(measured, rounds, quick=arguments.quick)
    print(report)
    if arguments.save:
        save("step", report, measured)
        put_into_readme(main_table(measured))


if __name__ == "__main__":
    main()
