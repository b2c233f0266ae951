"""A model of step time over hosts, beside ring and tree all-reduce, drawn to 1,000 hosts.

    python benchmarks/model.py            # writes benchmarks/results/model.png and prints the table of docs/scaling.md

seconds = alone + traffic / bandwidth + rounds x latency, with ``alone`` the step of one host that exchanges nothing.
"""

import argparse
import math
import pathlib

BYTES = 4
LATENCY = 50e-6  # seconds from host to host in one data centre, through TCP
CASES = {"mlp": (10_020_000, 0.070), "gpt": (1_890_000, 0.095)}  # parameters, seconds of a step alone (2 workers)
WAYS = ("phalanx", "ring", "tree")


def traffic(way: str, parameters: int, hosts: int) -> float:
    """Bytes that a host sends in a step."""
    if way == "tree":  # a whole sum up, a whole one down, at each of the inner hosts' two children
        return 2 * BYTES * parameters if hosts > 1 else 0
    return 2 * BYTES * parameters * (hosts - 1) / hosts


def rounds(way: str, hosts: int) -> float:
    """Latencies that follow one another. phalanx sends slices and sums directly, and losses beside the slices."""
    if hosts == 1:
        return 0
    return {
        "phalanx": 1 if hosts == 2 else 2,  # of two hosts each gets the whole of the other's sums
        "ring": 2 * (hosts - 1),
        "tree": 2 * math.ceil(math.log2(hosts)),
    }[way]


def seconds(way: str, parameters: int, alone: float, hosts: int, bandwidth: float, latency: float = LATENCY) -> float:
    """A step; ``bandwidth`` in bytes a second. A tree's levels follow one another, or are cut into pieces: the best."""
    return alone + traffic(way, parameters, hosts) / bandwidth + rounds(way, hosts) * latency


def table() -> str:
    """Efficiency at some numbers of hosts: the step alone over the step with all of them (each host adds its batch)."""
    counts = (2, 8, 64, 256, 1000)
    lines = ["| model | Gbit/s | way | " + " | ".join(f"{count} hosts" for count in counts) + " |"]
    lines.append("|" + " --- |" * (3 + len(counts)))
    for name, (parameters, alone) in CASES.items():
        for rate in (1, 10, 100):
            for way in WAYS:
                cells = [alone / seconds(way, parameters, alone, count, rate * 1e9 / 8) for count in counts]
                lines.append(f"| {name} | {rate} | {way} | " + " | ".join(f"{cell:.0%}" for cell in cells) + " |")
    return "\n".join(lines)


def draw(target: pathlib.Path) -> None:
    """Efficiency over hosts, one panel per model, one line per way, for two bandwidths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    counts = [round(1.25**power) for power in range(4, 32)]
    colors = ("#1f5a96", "#c1452b", "#8a5ca8")
    for ax, (name, (parameters, alone)) in zip(figure.subplots(1, 2, sharey=True), CASES.items(), strict=True):
        for rate, style in ((10, "-"), (1, ":")):
            for way, color in zip(WAYS, colors, strict=True):
                shares = [alone / seconds(way, parameters, alone, count, rate * 1e9 / 8) for count in counts]
                ax.plot(counts, shares, style, color=color, label=f"{way}, {rate} Gbit/s")
        ax.set_xscale("log")
        ax.set_xlabel("hosts")
        ax.set_ylim(0, 1)
        ax.grid(alpha=0.2)
        ax.set_title(f"{name}: {parameters / 1e6:.1f} M parameters, {alone * 1e3:.0f} ms a step alone", fontsize=10)
    figure.axes[0].set_ylabel("efficiency (step alone / step)")
    figure.axes[1].legend(fontsize=7, loc="lower left")
    figure.savefig(target)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    draw(pathlib.Path(__file__).parent / "results" / "model.png")
    print(table())


if __name__ == "__main__":
    main()
