"""Reading: phalanx with readers beside torch's DataLoader with as many processes, for transforms that wait or compute.

    python benchmarks/input.py                  # everything: about a minute and a half
    python benchmarks/input.py --seconds 1      # does it run?
    python benchmarks/input.py --save           # writes results/input.md

A sample waits 2 ms, as one from a disk or a network does, or computes for 1 ms; the model is small, so that
reading is what takes the time. Samples a second after the first second, in interleaved rounds; the digests of all of
phalanx's columns are compared.
"""

import argparse
import datetime
import os
import pathlib
import platform
import statistics
import time

import numpy as np
import torch

import phalanx

RESULTS = pathlib.Path(__file__).parent / "results" / "input.md"
BATCH, WARM, REPLICAS, SHARDS = 32, 12, 4, 8
LOSS = torch.nn.functional.cross_entropy


class Waiting(torch.utils.data.Dataset):
    """2 ms from anywhere."""

    processes = (0, 2, 4, 8)

    def __len__(self):
        return 4096

    def __getitem__(self, number):
        time.sleep(0.002)
        return torch.full((32,), number % 7 / 7), torch.tensor(number % 3)


class Computing(Waiting):
    """A millisecond of this processor."""

    processes = (0, 1, 2)

    def __init__(self):
        self.rounds = 100
        times = []
        for number in range(200):
            began = time.perf_counter()
            self[number]
            times.append(time.perf_counter() - began)
        self.rounds = max(1, round(self.rounds * 0.001 / statistics.median(times)))

    def __getitem__(self, number):
        values = np.arange(4_000, dtype=np.float64) + number
        for _ in range(self.rounds):
            values = np.sqrt(values * 1.0001)
        return torch.from_numpy(values[:32].astype(np.float32)), torch.tensor(number % 3)


def model():
    """Small."""
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))


def loader(data, processes):
    """What everybody writes."""
    persistent = {"persistent_workers": True, "prefetch_factor": 4} if processes else {}
    return torch.utils.data.DataLoader(data, BATCH, shuffle=True, num_workers=processes, **persistent)


def endless(data, processes):
    """Its batches, epoch after epoch."""
    batches = loader(data, processes)
    while True:
        yield from batches


def paced(advance, seconds):
    """Samples a second of ``advance()``, which does a step, after the first ones."""
    began, steps = time.perf_counter(), 0
    while steps < WARM or time.perf_counter() - began < 1.0:
        advance()
        steps += 1
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        advance()
        steps += 1
    return steps * BATCH / (time.perf_counter() - began)


def plain(data, processes, seconds):
    """A plain loop over a DataLoader."""
    net, batches = model(), endless(data, processes)
    optimizer = torch.optim.Adam(net.parameters())

    def advance():
        x, y = next(batches)
        optimizer.zero_grad()
        LOSS(net(x), y).backward()
        optimizer.step()

    return paced(advance, seconds), None


def brought(data, processes, seconds):
    """Batches of a DataLoader, brought to two workers."""
    batches = endless(data, processes)
    with phalanx.Recipe(model, None, LOSS, replicas=REPLICAS).start(engine="processes", workers=2) as run:
        return paced(lambda: run.step(tuple(next(batches))), seconds), None


def sharded(data):
    """The same samples as a stream of shards."""

    def rows(shard, shards):
        return (data[number] for number in range(int(shard), len(data), shards))

    return phalanx.Stream(rows, shards=SHARDS)


def ahead(workers, replicas, of=lambda data: data):
    """Runs with so many workers, and readers."""

    def measure(data, processes, seconds):
        recipe = phalanx.Recipe(model, of(data), LOSS, replicas=replicas, batch_size=BATCH, steps=10**6)
        where = {"engine": "processes", "workers": workers} if workers > 1 else {"engine": "inline"}
        with recipe.start(readers=processes, **where) as run:
            digests = []

            def advance():
                next(run)
                if run.steps == WARM:
                    digests.append(run.result().digest)

            return paced(advance, seconds), digests[0]

    return measure


COLUMNS = {
    "DataLoader, plain loop": plain,
    "DataLoader, run.step, W=2": brought,
    "readers, R=1, W=1": ahead(1, 1),
    "readers, R=4, W=1": ahead(1, REPLICAS),
    "readers, R=4, W=2": ahead(2, REPLICAS),
    "shards, R=1, W=1": ahead(1, 1, sharded),
    "shards, R=4, W=1": ahead(1, REPLICAS, sharded),
}


def main():
    """Measure, print, and save if that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(data, processes) for data in (Waiting(), Computing()) for processes in data.processes]
    found, digests = {}, {}
    for _ in range(options.rounds):
        for data, processes in cases:
            for name, measure in COLUMNS.items():
                rate, digest = measure(data, processes, options.seconds)
                found.setdefault((type(data).__name__, processes, name), []).append(rate)
                if digest is not None:
                    digests.setdefault((type(data).__name__, name.partition(", W")[0]), set()).add(digest)
    lines = ["| a sample | processes that read | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for data, processes in cases:
        kind = type(data).__name__
        rates = [statistics.median(found[kind, processes, name]) for name in COLUMNS]
        what = "waits 2 ms" if kind == "Waiting" else "computes 1 ms"
        lines.append(f"| {what} | {processes} | " + " | ".join(f"{rate:,.0f}" for rate in rates) + " |")
    same = all(len(values) == 1 for values in digests.values())
    text = (
        "# Reading ahead\n\n"
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, phalanx "
        f"{phalanx.__version__}; `python benchmarks/input.py --rounds {options.rounds} --seconds {options.seconds}`\n\n"
        "Samples a second, medians of interleaved rounds, a small model, batches of 32; run.step with R = 4. "
        f"Digests of phalanx's columns of one kind of data and one R {'are equal' if same else 'DIFFER'} after {WARM} "
        "steps, for any number of processes.\n\n"
    )
    text += "\n".join(lines) + "\n"
    print(text)
    if options.save:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
