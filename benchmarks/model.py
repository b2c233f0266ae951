"""A model of step time over hosts, beside ring and tree all-reduce, drawn to 1,000 hosts; and one for accelerators.

    python benchmarks/model.py            # writes benchmarks/results/model.png and prints the tables of docs/scaling.md

Hosts: seconds = alone + traffic / bandwidth + rounds x latency, with ``alone`` the step of one host that exchanges
nothing. Accelerators: buckets leave while the backward pass goes on; see ``Step``. Nothing here was measured by us.
"""

import argparse
import math
import pathlib
from typing import NamedTuple

from phalanx.plan.levels import grouped

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
    """Latencies that follow one another. phalanx sends slices and sums directly, or in two levels."""
    if hosts == 1:
        return 0
    return {
        "phalanx": 1 if hosts == 2 else 2 * len(grouped(hosts)),  # of two each gets the whole of the other's sums
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


# One H100 SXM in a machine of eight. The reasons are in docs/scaling.md.
MEMORY = 0.8 * 3.35e12  # bytes a second: four fifths of the data sheet's
NVLINK = 360e9  # bytes a second and direction, what NCCL reaches of 450e9: NVIDIA/nccl-tests #326, #212
NETWORK = 48e9  # bytes a second for each GPU's adapter of 400 Gbit/s: NVIDIA/nccl-tests #267
WITHIN, ACROSS = 25e-6, 50e-6  # seconds of a collective without content; half an all-reduce of 4 MiB, and a guess
LAUNCH = 10e-6  # seconds of the host for an operation of torch with its gradient's bookkeeping; a guess
WAIT = 0.25e-3  # seconds from the norm until the host has read it and met the other workers: naps, barriers; a guess
BUCKET = 25 << 20  # bytes
FOLD_LAUNCHES = 12  # operations of a bucket


class Network(NamedTuple):
    """What the model of accelerators knows of a network.

    Attributes
    ----------
    parts : list of (parameters, tensors, share)
        In the order in which the backward pass comes to them. Their gradients are there when that share of its work
        was done, in addition to those before.
    seconds : float
        Forward and backward pass of a GPU's batch.
    operations : int
        That torch launches for these.
    passes : int
        How often the update reads or writes memory of the size of the weights.
    host : float
        Seconds of the host between the norm and the end of the update, in which a device idles: host_work.py.
    """

    parts: list[tuple[int, int, float]]
    seconds: float
    operations: int
    passes: int
    host: float

    @property
    def bytes(self) -> int:
        """The bytes of all gradients."""
        return BYTES * sum(parameters for parameters, _, _ in self.parts)


RESNET = [  # shares are those of the multiplications: 4.09e9 for an image
    (2_049_000, 2, 0.001),
    (14_964_736, 10, 0.198),
    (7_098_368, 19, 0.358),
    (1_219_584, 13, 0.251),
    (215_808, 10, 0.163),
    (9_536, 3, 0.029),
]
BLOCK = [(768 * 3072, 1, 0.019), (768 * 3072, 1, 0.019), (768 * 768, 1, 0.005), (768 * 2304 + 9984, 1, 0.0143)]
GPT2 = [(1_536, 2, 0.312), *BLOCK * 12, (1024 * 768, 1, 0), (50257 * 768, 1, 0)]  # the head's weight is the embedding
NETWORKS = {
    "ResNet-50, 64 images": Network(RESNET, 64 / 5200, 521, 5, 0.72e-3),  # twice an A100's 2,600 a second: timm #1491
    "ResNet-50, 256 images": Network(RESNET, 256 / 5200, 521, 5, 0.72e-3),
    "GPT-2 124M, 16k tokens": Network(
        GPT2, 16384 / (1e10 / 2700 / 8), 636, 7, 0.47e-3
    ),  # 10e9 in 45 minutes on 8: llm.c
}


def buckets(network: Network) -> list[tuple[float, float]]:
    """For each bucket its bytes, and the share of the backward pass after which it is full."""
    filled, done, size = list[tuple[float, float]](), 0.0, 0.0
    for parameters, tensors, share in network.parts:
        for _ in range(tensors):
            one = BYTES * parameters / tensors
            if size and size + one > BUCKET:
                filled.append((size, done))
                size = 0.0
            done, size = min(1.0, done + share / tensors), size + one
    return [*filled, (size, 1.0)]


def sent(size: float, devices: int, nodes: int = 1, *, folded: bool = False) -> tuple[float, float]:
    """Bytes that a device sends in a collective for a bucket: to others of its node, and over the network.

    ``folded`` says that each node adds up its own first, so that only its sum crosses the network.
    """
    per = devices // nodes
    if folded:
        return size * (per - 1) / per, size / per * (nodes - 1) / nodes
    return size * (per - 1) / devices, size * (devices - per) / devices


def collective(size: float, devices: int, nodes: int = 1, *, folded: bool = False) -> float:
    """Seconds of an all-to-all or an all-gather. Both parts go at the same time, unless one needs the other's sums."""
    within, across = sent(size, devices, nodes, folded=folded)
    times = [WITHIN + within / NVLINK] + ([ACROSS + across / NETWORK] if nodes > 1 else [])
    return sum(times) if folded else max(times)


class Step(NamedTuple):
    """A step of the model, in seconds.

    Attributes
    ----------
    alone : float
        Of the plain loop on one device: the longer of launching and computing, the norm, clipping, and the update.
    exchange : float
        What collectives and additions take, hidden or not.
    exposed : float
        What is left of them after the backward pass.
    whole : float
        With all of that, the division by the weights, and the wait for the norm.
    """

    alone: float
    exchange: float
    exposed: float
    whole: float


def step(network: Network, devices: int, nodes: int = 1, *, folded: bool = False) -> Step:
    """One replica for each device: the least work to hide behind."""
    update = (3 + network.passes) * network.bytes / MEMORY  # the norm reads, clipping reads and writes
    launching, computing = network.operations * LAUNCH, network.seconds
    alone = max(launching, computing) + update
    if devices == 1:
        return Step(alone, 0, 0, alone + WAIT + network.host)
    filled = buckets(network)
    launching += (sum(tensors for _, tensors, _ in network.parts) + FOLD_LAUNCHES * len(filled)) * LAUNCH
    computing += 2 * network.bytes / MEMORY  # gradients are copied into buckets
    passes = max(launching, computing)
    free = exchange = 0.0
    for size, share in filled:
        took = 2 * collective(size, devices, nodes, folded=folded) + 3 * sent(size, devices)[0] / MEMORY
        free, exchange = max(free, passes / 3 + passes * 2 / 3 * share) + took, exchange + took
    divided = 2 * network.bytes / MEMORY
    return Step(alone, exchange, free - passes, free + divided + update + WAIT + network.host)


def device_table() -> str:
    """Milliseconds of a step on H100s, and what it takes beside one that computes alone."""
    heads = ["a GPU's batch", "GPUs", "alone, ms", "exchange, ms", "of it exposed, ms", "step, ms", "step / alone"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    ways = [(1, 1, False), (2, 1, False), (4, 1, False), (8, 1, False), (16, 2, False), (16, 2, True)]
    for name, network in NETWORKS.items():
        for devices, nodes, folded in ways:
            took = step(network, devices, nodes, folded=folded)
            where = str(devices) if nodes == 1 else f"2 x 8, in {'two levels' if folded else 'one level'}"
            cells = [f"{1000 * value:.2f}" for value in took]
            lines.append(f"| {name} | {where} | {' | '.join(cells)} | {took.whole / took.alone:.2f} |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    draw(pathlib.Path(__file__).parent / "results" / "model.png")
    print(table())
    print()
    print(device_table())


if __name__ == "__main__":
    main()
