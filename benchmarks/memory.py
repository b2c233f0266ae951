"""Memory of a run: workers and replicas beside the plain loop and DistributedDataParallel, over model sizes.

    python benchmarks/memory.py                   # some minutes
    python benchmarks/memory.py --quick           # the smallest size, few columns: does everything run?

Each column has a fresh process. Memory is the PSS of all its processes, summed: pages that several of them share count
once. Sizes do not depend on how fast or busy the machine is.
"""

import argparse
import itertools
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import footprint
import models
import step
import tqdm

SIZES = ("1e6", "1e7", "1e8")
COLUMNS = (
    "plain 1 thread", "R=1", "R=2", "R=4", "R=8", "DDP W=2", "R=2 W=2", "R=4 W=2", "R=8 W=2", "DDP W=4", "R=4 W=4",
    "R=8 W=4",
)  # fmt: skip
METHOD = f"""Four square layers, batches of 32, AdamW, float32; peak while training, sampled every
{footprint.SAMPLE_SECONDS * 1e3:.0f} ms. Weights, one gradient and AdamW's two states are 16 bytes for each parameter:
`16 N` is what no loop can do without. What does not grow with the model (Python, torch, libraries in each process) is
in all of these figures, and is most of the first column."""
FROZEN = ("1e4", "1e8")
BESIDE = ("plain 1 thread", "R=2", "R=2 W=2", "R=4 W=4", "DDP W=2")
ADAPTED = """## A frozen base

Twelve frozen square layers with a low-rank adapter beside each, as LoRA has; peak from before the model is made to
after the last step. A base of 1e8 parameters takes 0.4 GB; what the same with 1e4 takes is not it. Shared memory
that no process has mapped at the time is counted, too. With workers the peak is when they start."""
NAMES = {"plain 1 thread": "plain loop"}


def table(measured: dict[str, dict[str, dict]]) -> str:
    """Peaks, a row for each column and a column for each size, with bytes per parameter for the largest."""
    rows = [["`16 N`", *(step.spelled(16 * float(size) / 1e9) for size in measured), "16"]]
    largest = list(measured)[-1]
    for column in measured[largest]:
        peaks = [facts[column]["peak"] for facts in measured.values()]
        cells = [step.spelled(peak / 1e9) for peak in peaks]
        rows.append([NAMES.get(column, column), *cells, f"{peaks[-1] / float(largest):.0f}"])
    header = ["", *(f"{size} parameters, GB" for size in measured)]
    return step.markdown([*header, f"bytes per parameter at {largest}"], rows)


def frozen_table(measured: dict[str, dict[str, dict]]) -> str:
    """How many copies of a frozen base there are at the peak."""
    small, large = FROZEN
    rows = []
    for column in BESIDE:
        peaks = [measured[size][column]["whole peak"] for size in FROZEN]
        copies = (peaks[1] - peaks[0]) / 4 / (float(large) - float(small))
        rows.append([NAMES.get(column, column), *(step.spelled(peak / 1e9) for peak in peaks), f"{copies:.2f}"])
    return step.markdown(["", *(f"{size} frozen parameters, GB" for size in FROZEN), "copies of the base"], rows)


def picture(measured: dict[str, dict[str, dict]], path: pathlib.Path) -> None:
    """Bars for the largest model, in the order of the table."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size, facts = list(measured.items())[-1]
    names = [NAMES.get(column, column) for column in facts]
    heights = [one["peak"] / 1e9 for one in facts.values()]
    figure = Figure(figsize=(8, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    colors = ["#8a8f98" if "=" not in name else "#c1452b" if "DDP" in name else "#1f5a96" for name in names]
    bars = ax.barh(names[::-1], heights[::-1], color=colors[::-1])
    ax.bar_label(bars, fmt=" %.2f", fontsize=9)
    ax.axvline(16 * float(size) / 1e9, color="#444444", linewidth=0.8, linestyle="--")
    ax.annotate("weights, gradient, AdamW", (16 * float(size) / 1e9, -0.75), fontsize=8, ha="left", va="bottom")
    ax.set_xlabel(f"peak memory of all processes, GB; {size} parameters")
    ax.margins(x=0.1)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest size, few columns: does everything run?")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--column", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/memory.*")
    arguments = parser.parse_args()
    if arguments.column:
        print(json.dumps(footprint.memory_facts(arguments.column, models.case(arguments.model))))
        return
    sizes, columns = (SIZES[:1], COLUMNS[::5]) if arguments.quick else (SIZES, COLUMNS)
    kinds = {"size": (sizes, columns), "adapted": (FROZEN, BESIDE)}
    found: dict[str, dict[str, dict[str, dict]]] = {}
    with tqdm.tqdm(total=sum(len(sizes) * len(columns) for sizes, columns in kinds.values()), unit="process") as bar:
        for kind, (sizes, columns) in kinds.items():
            found[kind] = {size: {} for size in sizes}
            for size, column in itertools.product(sizes, columns):
                bar.set_description(f"{kind} {size}, {column}")
                found[kind][size][column] = step.measured_apart(column, f"{kind} {size}", quick=False, script=__file__)
                bar.update()
    measured = found["size"]
    parts = [f"# Memory\n\n{step.circumstances('memory.py')}", METHOD, "![Memory](memory.png)", table(measured)]
    report = "\n\n".join([*parts, ADAPTED, frozen_table(found["adapted"])]) + "\n"
    print(report)
    if arguments.save:
        step.save("memory", report, found)
        picture(measured, step.RESULTS / "memory.png")


if __name__ == "__main__":
    main()
