"""The torch.distributed backend "phalanx" beside Gloo: latency and bandwidth of all_reduce, and steps under DDP.

Both backends live in the same ranks and take turns, a few calls each, so that they meet the same machine.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import models
import peers
import step
import torch
from torch import distributed as dist
from tqdm import tqdm

RESULTS = pathlib.Path(__file__).parent / "results" / "backend.md"
COUNTS = (1, 16, 256, 1024, 1 << 14, 1 << 18, 10_000_000, 25_000_000)
BACKENDS = ("gloo", "phalanx")
TURNS = 6


def calls(count):
    """How often a tensor of so many elements is reduced, by each."""
    return max(12, min(300, 40_000_000 // count))


def measured(size):
    """Seconds of an all_reduce by elements and backend: at the group itself, and through torch.distributed."""
    world, other = dist.group.WORLD, dist.new_group(backend="gloo")
    groups = {"gloo": other, "phalanx": world}
    found = {}
    for count in COUNTS:
        tensor = torch.ones(count)
        times = {name: ([], []) for name in BACKENDS}
        for turn in range(TURNS):
            for name in BACKENDS if turn % 2 else BACKENDS[::-1]:
                for kind, call in enumerate((bare, through)):
                    for number in range(calls(count) // TURNS + 1):
                        tensor.fill_(1)
                        dist.barrier(groups[name])
                        began = time.perf_counter()
                        call(groups[name], tensor)
                        if number:  # the other backend's threads may still be awake
                            times[name][kind].append(time.perf_counter() - began)
        found[count] = {name: [statistics.median(each) for each in pair] for name, pair in times.items()}
    return found


def bare(group, tensor):
    group.allreduce([tensor]).wait()


def through(group, tensor):
    dist.all_reduce(tensor, group=group)


def stepped(case, backend, rank, size):
    """Seconds of a step under DDP, tuned as its users would."""
    from torch.nn.parallel import DistributedDataParallel

    group = dist.group.WORLD if backend == "phalanx" else dist.new_group(backend="gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        case.make_model(), process_group=group, gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = models.OPTIMIZER(model.parameters())
    batches = peers.shuffled(case, rank, size)
    return peers.timed(case, batches, lambda x, y: peers.step(model, optimizer, case, x, y))["seconds"]


def be(rank, size, store, what, target):
    """One rank of a measurement; the first writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("phalanx", init_method=f"file://{store}", rank=rank, world_size=size)
    if what == "calls":
        found = measured(size)
    else:
        name, backend = what.split()
        found = stepped(models.case(name), backend, rank, size)
    if rank == 0:
        torch.save(found, target)
    dist.destroy_process_group()


def run(what, size):
    """Start the ranks of a measurement; what the first one found."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), f"{folder}/store", what, f"{folder}/found"], env=environment
            )
            for rank in range(size)
        ]
        codes = [rank.wait() for rank in ranks]
        if not os.path.exists(f"{folder}/found"):  # Gloo sometimes aborts at the very end
            raise RuntimeError(f"{what}: ranks ended with {codes}")
        return torch.load(f"{folder}/found", weights_only=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank, size, store, what, target = given.rank
        be(int(rank), int(size), store, what, target)
        return
    names = ("tiny", "lenet", "mlp", "gpt")
    jobs = [(f"{name} {backend}", size) for name in names for size in (2, 4) for backend in BACKENDS]
    found: dict = {job: [] for job in [("calls", 2), ("calls", 4), *jobs]}
    with tqdm(total=given.rounds * len(found), unit="run") as bar:
        for turn in range(given.rounds):
            for job in list(found) if turn % 2 else list(found)[::-1]:
                bar.set_description(f"{job[0]}, {job[1]} ranks")
                found[job].append(run(*job))
                bar.update()
    text = report(found, names, peers.copying())
    print(text)
    if given.save:
        RESULTS.write_text(text)


def report(found, names, copying):
    lines = ["# The backend beside Gloo", "", step.circumstances("backend.py"), ""]
    for size in (2, 4):
        lines += [
            f"## all_reduce of float32, {size} ranks", "",
            "| elements | Gloo, us | phalanx, us | ratio | through torch.distributed: Gloo, us | phalanx, us | ratio "
            "| phalanx over its limit |",
            "|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for count in COUNTS:
            cells = {name: [statistics.median([one[count][name][kind] for one in found["calls", size]]) * 1e6
                            for kind in (0, 1)] for name in BACKENDS}  # fmt: skip
            least = least_bytes(count, size) / copying["bytes_per_second"] * 1e6
            (gloo, gloo2), (ours, ours2) = cells["gloo"], cells["phalanx"]
            over = f"{ours / least:.1f}" if count >= 1 << 18 else ""
            lines.append(f"| {count} | {gloo:.1f} | {ours:.1f} | {gloo / ours:.1f} | {gloo2:.1f} | {ours2:.1f} "
                         f"| {gloo2 / ours2:.1f} | {over} |")  # fmt: skip
        lines.append("")
    lines += ["The limit: every rank reads its tensor and writes the sum once, at the bandwidth of copying with all "
              f"cores ({copying['bytes_per_second'] / 1e9:.1f} GB/s read and written).", "",
              "## Steps under DistributedDataParallel, ms", "",
              "| model | 2 ranks: Gloo | phalanx | ratio | 4 ranks: Gloo | phalanx | ratio |",
              "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name in names:
        cells = []
        for size in (2, 4):
            pairs = list(zip(found[f"{name} gloo", size], found[f"{name} phalanx", size], strict=True))
            gloo, ours = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
            cells += [f"{gloo:.3g}", f"{ours:.3g}", f"{statistics.median(a / b for a, b in pairs):.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def least_bytes(count, size):
    """Bytes that must be read and written in memory, all ranks together."""
    return 2 * 4 * count * size


if __name__ == "__main__":
    main()
