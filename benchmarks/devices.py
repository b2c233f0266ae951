"""Several devices in one process, on the fake accelerator of the tests: time, bytes and memory over their number.

    python benchmarks/devices.py --save

Kernels of the fake accelerator compute at once on the CPU and take as long as they are told to on the timeline of their
device; its clock moves only while the host waits. So the figures say what the schedule of a step makes of devices whose
kernels take two milliseconds each, not how fast any hardware is. The picture shows when each device computes and when
the host waits.
"""

import argparse
import functools
import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import matplotlib.pyplot as plt
import torch
import tqdm

import phalanx
from phalanx.plan.fold import place, remaining
from tests import accelerator

KERNEL_SECONDS = 0.002
WIDTH, LAYERS, SAMPLES = 64, 12, 96
RESULTS = pathlib.Path(__file__).parent / "results"
COLORS = {"fold": "#7aa6c2", "copy": "#d8973c", "update": "#8c6bb1", "compute": "#4c956c"}
UPDATES = ("lerp", "addcmul", "addcdiv", "sqrt", "div", "mul_")


def model():
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 3))


def recipe(replicas):
    random = torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, WIDTH, generator=random), torch.randint(0, 3, (SAMPLES,), generator=random)
    return phalanx.Recipe(
        model, data, torch.nn.functional.cross_entropy, replicas=replicas, batch_size=48, steps=6,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    )  # fmt: skip


def measured(fake, replicas, count):
    """Seconds of a step on the devices' clock, bytes that each sends, peak bytes of each, trace and digest."""
    fake.reset()
    with recipe(replicas).start(devices=[f"fake:{number}" for number in range(count)], progress=False) as run:
        next(run)
        fake.set_virtual_time(True)
        fake.set_kernel_seconds(KERNEL_SECONDS)
        fake.reset_counts()
        for number in range(count):
            fake.reset_peak_memory_stats(number)
        fake.trace(True)
        began = fake.now()
        next(run)
        for number in range(count):
            fake.synchronize(number)
        seconds, trace, counts = fake.now() - began, fake.take_trace(), fake.counts()
        fake.trace(False)
        fake.set_kernel_seconds(0)
        peaks = [fake.max_memory_allocated(number) for number in range(count)]
        run.finish()
        digest = run.result().digest
    pairs = [[f"fake:{a}>fake:{b}" for b in range(count) if a != b] for a in range(count)]
    sent = [sum(counts.get(pair, (0, 0))[1] for pair in mine) for mine in pairs]
    return seconds, sent, peaks, trace, digest


def kind(name):
    """Which part of a step a kernel belongs to, by its name."""
    if name.startswith("copy"):
        return "copy"
    if any(part in name for part in UPDATES):
        return "update"
    return "fold" if name == "aten::add" or "norm" in name or "cat" in name else "compute"


def picture(traces, path):
    """When each device does what, and when the host waits, for each number of devices."""
    figure, axes = plt.subplots(len(traces), 1, figsize=(10, 1.2 + sum(0.45 * (n + 2) for n in traces)), sharex=True)
    for axis, (count, trace) in zip(axes, traces.items(), strict=True):
        start = min(event[3] for event in trace if event[0] != "host")
        for event in trace:
            if event[0] == "host":
                axis.barh(count, event[3] - event[2], left=event[2] - start, color="#c44536", height=0.7)
            else:
                device, _, name, _, begins, ends = event
                axis.barh(device, ends - begins, left=begins - start, color=COLORS[kind(name)], height=0.7)
        axis.set_yticks([*range(count + 1)], [*(f"fake:{number}" for number in range(count)), "host waits"])
        axis.invert_yaxis()
        axis.set_title(f"{count} device{'s' * (count > 1)}", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds of one step, R = 8, each kernel 2 ms")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in [*COLORS.values(), "#c44536"]]
    figure.legend(handles, [*COLORS, "host waits"], loc="upper right", ncols=5, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/devices.md and .png")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    fake = accelerator.load()
    size = sum(parameter.nbytes for parameter in model().parameters())
    lines = [
        "| R | devices | step / on 1 | bytes sent / ring, each | by the formula | peak memory / weights | digest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    traces = {}
    for replicas in tqdm.tqdm((8, 16, 6)):
        alone = None
        for count in (1, 2, 3, 4):
            seconds, sent, peaks, trace, digest = measured(fake, replicas, count)
            alone = alone or seconds
            ring = 2 * size * (count - 1) / count
            nodes = [len(remaining(replicas, block)) for block in place(replicas, count).blocks]
            ratios = ", ".join(f"{one / ring:.2f}" for one in sent) if ring else "-"
            formula = ", ".join(f"{(k + 1) / 2:.2f}" for k in nodes) if ring else "-"
            peak = f"{max(peaks) / size:.2f}"
            lines.append(
                f"| {replicas} | {count} | {seconds / alone:.3f} | {ratios} | {formula} | {peak} | `{digest[:12]}` |"
            )
            if replicas == 8:
                traces[count] = trace
    table = "\n".join(lines)
    print(table)
    if arguments.save:
        picture(traces, RESULTS / "devices.png")
        told = __doc__.split("--save")[1].strip()
        text = f"# Several devices in one process\n\n{told}\n\n{table}\n\n![One step](devices.png)\n"
        (RESULTS / "devices.md").write_text(text)


if __name__ == "__main__":
    main()
