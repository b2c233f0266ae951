"""Resuming a stream of shards at 90 % of an epoch of 1,000,000 samples, without a shuffle buffer and with some.

    python benchmarks/stream_resume.py                      # about two minutes
    python benchmarks/stream_resume.py --samples 100000     # does it run?

Batches are drawn, nothing is trained. The iterable tells its place. What is timed is reading until the next batch can
be drawn again, which is compared with that of the uninterrupted stream.
"""

import argparse
import contextlib
import time

import torch

import phalanx
from phalanx.definition.passes import Readings
from phalanx.definition.shards import Sharded
from phalanx.definition.streams import Supply

SHARDS, REPLICAS, BATCH, BUFFERS = 8, 4, 1000, (0, 1000, 10_000)


def rows_of(samples):
    """Iterables of so many samples over all shards, which tell their place."""

    class Rows:
        def __init__(self, shard, shards):
            self.at, self.shard, self.shards = 0, int(shard), shards

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

        def __iter__(self):
            while self.at < samples // self.shards:
                self.at += 1
                yield self.at * self.shards + self.shard, 0

    return Rows


def supply(recipe):
    """What deals the recipe's stream."""
    dealer = Sharded(recipe, Readings(recipe).opened, contextlib.nullcontext(), apart=False)
    return Supply(dealer, contextlib.nullcontext())


def measured(samples, buffer):
    """Seconds to read 90 %, and to resume there."""
    stream = phalanx.Stream(rows_of(samples), buffer, shards=SHARDS)
    loss = torch.nn.functional.mse_loss
    recipe = phalanx.Recipe(lambda: torch.nn.Linear(1, 1), stream, loss, replicas=REPLICAS, batch_size=BATCH, epochs=1)
    steps, whole, began = samples * 9 // 10 // BATCH, supply(recipe), time.perf_counter()
    for step in range(steps):
        whole.draw(step)
    read, state, resumed = time.perf_counter() - began, whole.state(steps), supply(recipe)
    began = time.perf_counter()
    resumed.go_on(state, lambda numbers, _: numbers)
    seconds = time.perf_counter() - began
    if resumed.draw(steps).hash != whole.draw(steps).hash:
        raise SystemExit("the next batch is another")
    return read, seconds


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    samples = parser.parse_args().samples
    print("| shuffle_buffer | reading 90 %, s | resuming there, s |", "|---|---|---|", sep="\n")
    for buffer in BUFFERS:
        read, seconds = measured(samples, buffer)
        print(f"| {buffer:,} | {read:.1f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
