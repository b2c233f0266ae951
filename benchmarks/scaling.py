"""How phalanx scales beside DistributedDataParallel: over workers, in memory, in time to start, over model sizes.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --quick          # one short round: does everything run?

Fresh processes in interleaved rounds, timed as in benchmarks/step.py.
"""

import argparse
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import footprint
import models
import peers
import psutil
import step
import tqdm

WORKERS = (1, 2, 4, 8)
REPLICAS = 8
WIDE = "size 5e7"
MEMORY_COLUMNS = ("R=4 W=4", "DDP W=4")
STARTS = ("workers=2", "default", "plain loop")
START_MODEL = "lenet"
SIZES = ("1e3", "1e4", "1e5", "1e6", "1e7", "1e8")
BYTES_PER_PARAMETER = 64  # what DDP takes with 2 workers, and as much again
OVER_WORKERS = f"""Efficiency: speed-up over one worker, divided by min(W, {peers.CORES} cores). phalanx computes
{REPLICAS} replicas, whatever W; DDP cuts the batch into W."""
MEMORY = f"""An MLP of 50 M parameters with AdamW: PSS of all processes of the run, summed (the caller, what forks or
tracks workers, the workers), sampled every {footprint.SAMPLE_SECONDS * 1e3:.0f} ms."""
START = f"""{START_MODEL}, 2 replicas; torch and phalanx are imported before. phalanx: until the caller has the report
of the first step. Default: nothing said of workers."""
OURS, THEIRS = "phalanx", "DDP"
COLORS = {"tiny": "#1f5a96", "lenet": "#c1452b", "mlp": "#3d8b5f", "gpt": "#8a5ca8"}
OUR_COLOR, THEIR_COLOR, PALE = "#1f5a96", "#c1452b", "#8fb0cf"


class Bench:
    """Starts measurements in fresh processes, and shows how far they are."""

    def __init__(self, rounds: int, quick: bool, total: int):
        self.rounds, self.quick = rounds, quick
        self.bar = tqdm.tqdm(total=total, unit="process")

    def ask(self, column: str, model: str, script: str = step.__file__) -> dict:
        """Facts of one column."""
        self.bar.set_description(f"{model}, {column}")
        facts = step.measured_apart(column, model, quick=self.quick, script=script)
        self.bar.update()
        return facts

    def rounds_of(self, columns, model: str, script: str = step.__file__) -> step.Facts:
        """Facts of several columns in interleaved rounds."""
        facts: step.Facts = {column: [] for column in columns}
        for number in range(self.rounds):
            for column in columns if number % 2 == 0 else reversed(columns):
                facts[column].append(self.ask(column, model, script))
        return facts


def throughput_columns() -> list[str]:
    return [column for workers in WORKERS for column in (f"R={REPLICAS} W={workers}", f"DDP W={workers}")]


def measure_all(bench: Bench, chosen: list[str], sizes: list[str]) -> dict:
    """All four parts."""
    throughput = {model: bench.rounds_of(throughput_columns(), model) for model in chosen}
    memory = bench.rounds_of(MEMORY_COLUMNS, WIDE, __file__)
    start = bench.rounds_of(STARTS, START_MODEL, __file__)
    start["import torch"] = [{"first": footprint.import_seconds()} for _ in range(bench.rounds)]
    growth = {size: bench.rounds_of(("W=2", "DDP W=2"), f"size {size}") for size in sizes}
    return {"throughput": throughput, "memory": memory, "start": start, "growth": growth}


def samples_per_second(facts: step.Facts, model: str, column: str) -> float:
    """Median throughput."""
    return models.case(model).batch_size / step.milliseconds(facts, column) * 1e3


def efficiency(facts: step.Facts, column: str, alone: str, workers: int) -> float:
    """Speed-up over one worker, divided by the cores that W workers can use; medians of each round's ratio."""
    return step.ratio(facts, alone, column) / min(workers, peers.CORES)


def throughput_table(measured: dict) -> str:
    rows = []
    for model, facts in measured["throughput"].items():
        for workers in WORKERS:
            ours, theirs = f"R={REPLICAS} W={workers}", f"DDP W={workers}"
            speeds = [f"{samples_per_second(facts, model, column):.4g}" for column in (ours, theirs)]
            useful = [
                f"{efficiency(facts, column, alone, workers):.2f}"
                for column, alone in ((ours, f"R={REPLICAS} W=1"), (theirs, "DDP W=1"))
            ]
            ratio = f"{step.ratio(facts, theirs, ours):.2f}"
            rows.append([model, str(workers), *speeds, ratio, *useful])
    header = ["model", "W", "phalanx R=8, samples/s", "DDP, samples/s", "phalanx / DDP", "phalanx efficiency"]
    return step.markdown([*header, "DDP efficiency"], rows)


def memory_table(measured: dict) -> str:
    kinds = ("peak", "median", "whole peak")
    rows = [
        [name, *(f"{middle(measured['memory'][column], kind) / 1e9:.2f}" for kind in kinds)]
        for name, column in zip(("phalanx R=4 W=4", "DDP W=4"), MEMORY_COLUMNS, strict=True)
    ]
    return step.markdown(["", "training, peak, GB", "training, median, GB", "start to result, peak, GB"], rows)


def start_table(measured: dict) -> str:
    start = measured["start"]
    rows = [[name, f"{middle(start[name], 'first'):.3f}", f"{middle(start[name], 'second'):.3f}"] for name in STARTS]
    rows.append(["`import torch`", f"{middle(start['import torch'], 'first'):.3f}", ""])
    return step.markdown(["seconds to the first finished step", "fresh interpreter", "again in it"], rows)


def growth_table(measured: dict) -> str:
    rows = [
        [
            size,
            *(step.spelled(step.milliseconds(facts, column)) for column in ("W=2", "DDP W=2")),
            f"{step.ratio(facts, 'DDP W=2', 'W=2'):.2f}",
        ]
        for size, facts in measured["growth"].items()
    ]
    return step.markdown(["parameters", "phalanx W=2, ms", "DDP W=2, ms", "DDP / phalanx"], rows)


def middle(facts: list[dict], kind: str) -> float:
    return statistics.median(one[kind] for one in facts)


def text(measured: dict, rounds: int) -> str:
    """The report."""
    parts = [
        f"# Scaling\n\n{step.circumstances('scaling.py')}",
        f"Rounds: {rounds}, interleaved, in fresh processes; timed as in [step.md](step.md).",
        "![Scaling](scaling.png)",
        f"## Over workers\n\n{OVER_WORKERS}\n\n{throughput_table(measured)}",
        f"## Memory\n\n{MEMORY}\n\n{memory_table(measured)}",
        f"## Start\n\n{START}\n\n{start_table(measured)}",
        f"## Over model sizes\n\nFour square layers, batches of 32, AdamW.\n\n{growth_table(measured)}",
    ]
    return "\n\n".join(parts) + "\n"


def picture(measured: dict, path: pathlib.Path) -> None:
    """Four panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    for ax, (title, draw) in zip(axes.flat, PANELS.items(), strict=True):
        draw(measured, ax)
        ax.set_title(title, fontsize=11, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_throughput(measured: dict, ax) -> None:
    """Relative to one DDP worker of the same model, so that four very different models share an axis."""
    for model, facts in measured["throughput"].items():
        for columns, style in (
            ([f"R={REPLICAS} W={w}" for w in WORKERS], "-o"),
            ([f"DDP W={w}" for w in WORKERS], ":s"),
        ):
            heights = [step.ratio(facts, "DDP W=1", column) for column in columns]
            ax.plot(WORKERS, heights, style, color=COLORS[model], markersize=4)
        ax.plot([], [], "-", color=COLORS[model], label=model)
    ax.plot([], [], "-o", color="gray", markersize=4, label=f"phalanx, R={REPLICAS}")
    ax.plot([], [], ":s", color="gray", markersize=4, label="DDP")
    ax.set_xscale("log", base=2)
    ax.set_xticks(WORKERS, [str(workers) for workers in WORKERS])
    plain_log(ax)
    ax.set_xlabel(f"workers (on {peers.CORES} cores)")
    ax.set_ylabel("samples/s, relative to DDP with 1 worker")
    ax.grid(alpha=0.2)
    ax.legend(fontsize=8, ncols=3, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def plain_log(ax) -> None:
    """A vertical log axis with 0.5 1 2 5 instead of powers."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.yaxis.set_minor_locator(NullLocator())


def draw_memory(measured: dict, ax) -> None:
    """Bars: median while training, peak while training, peak of all."""
    kinds = {"median": "training, median", "peak": "training, peak", "whole peak": "start to result, peak"}
    for offset, (name, column, color) in enumerate(
        zip((OURS, THEIRS), MEMORY_COLUMNS, (OUR_COLOR, THEIR_COLOR), strict=True)
    ):
        heights = [middle(measured["memory"][column], kind) / 1e9 for kind in kinds]
        places = [place + 0.38 * (offset - 0.5) for place in range(len(kinds))]
        bars = ax.bar(places, heights, 0.36, color=color, label=name)
        ax.bar_label(bars, fmt="%.2f", fontsize=8)
    ax.set_xticks(range(len(kinds)), list(kinds.values()))
    ax.set_ylabel("summed PSS, GB")
    ax.margins(y=0.15)
    ax.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)


def draw_start(measured: dict, ax) -> None:
    """Bars to the right: one per way to start, with `import torch` to judge them by."""
    start = measured["start"]
    bars = [("import torch alone", middle(start["import torch"], "first"), "gray")]
    for name in reversed(STARTS):
        shown = name if name == "plain loop" else f"train({'' if name == 'default' else name})"
        color = "gray" if name == "plain loop" else OUR_COLOR
        bars.append((f"{shown}, again", middle(start[name], "second"), "silver" if color == "gray" else PALE))
        bars.append((f"{shown}, first", middle(start[name], "first"), color))
    names, widths, colors = zip(*bars, strict=True)
    drawn = ax.barh(names, widths, color=colors)
    ax.bar_label(drawn, [f" {width:.2f} s" if width >= 1 else f" {width * 1e3:.0f} ms" for width in widths], fontsize=8)
    ax.set_xlabel("seconds to the first finished step")
    ax.set_xlim(right=max(widths) * 1.15)


def draw_growth(measured: dict, ax) -> None:
    """Both against the number of parameters."""
    sizes = [float(size) for size in measured["growth"]]
    for name, column, style, color in ((OURS, "W=2", "-o", OUR_COLOR), (THEIRS, "DDP W=2", ":s", THEIR_COLOR)):
        heights = [step.milliseconds(facts, column) for facts in measured["growth"].values()]
        ax.plot(sizes, heights, style, color=color, markersize=4, label=name)
    ax.set_xscale("log")
    plain_log(ax)
    ax.set_xlabel("parameters")
    ax.set_ylabel("ms a step")
    ax.grid(alpha=0.2)
    ax.legend(fontsize=8, frameon=False)


PANELS = {
    "Throughput over workers": draw_throughput,
    "Memory, 50 M parameters, AdamW, 4 workers": draw_memory,
    f"Time to start, {START_MODEL}, 2 replicas": draw_start,
    "Time of a step, 2 workers": draw_growth,
}


def affordable(sizes) -> list[str]:
    """The sizes that fit into the memory that is available now."""
    available = psutil.virtual_memory().available
    return [size for size in sizes if float(size) * BYTES_PER_PARAMETER < available]


def facts_here(arguments) -> dict:
    """Of one measurement, in this process."""
    case = models.case(arguments.model)
    case = case.shortened() if arguments.quick else case
    return (footprint.start_facts if arguments.column in STARTS else footprint.memory_facts)(arguments.column, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, few steps, two models, small sizes")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--column", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/scaling.md, .json and .png")
    arguments = parser.parse_args()
    if arguments.column:
        print(json.dumps(facts_here(arguments)))
        return
    quick, rounds = arguments.quick, 1 if arguments.quick else arguments.rounds
    chosen = list(models.CASES[:2] if quick else models.CASES)
    sizes = affordable(SIZES[:4] if quick else SIZES)
    per_round = len(chosen) * len(throughput_columns()) + len(MEMORY_COLUMNS) + len(STARTS) + 2 * len(sizes)
    bench = Bench(rounds, quick, rounds * per_round)
    with bench.bar:
        measured = measure_all(bench, chosen, sizes)
    report = text(measured, rounds)
    print(report)
    if arguments.save:
        step.save("scaling", report, measured)
        picture(measured, step.RESULTS / "scaling.png")


if __name__ == "__main__":
    main()
