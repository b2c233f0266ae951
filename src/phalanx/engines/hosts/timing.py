"""How long the exchange of a bucket takes between devices, beside an all-reduce: a process for each, as in a run."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.engines.hosts.gloo import LOOPBACK
from phalanx.engines.hosts.ranks import BUCKET, FILE, Transport
from phalanx.frameworks.torch.accelerators import expect, prepare, registered

ROUNDS, WARM_UP = 12, 4
LIMIT_SECONDS, PAUSE_SECONDS = 120.0, 0.05


def measured(names: Sequence[str]) -> dict[str, str]:
    """Rows of a table: milliseconds for a bucket, and that bytes arrive between all pairs, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        command = [sys.executable, "-m", "phalanx.engines.hosts.timing", f"{folder}/meeting", json.dumps([*names])]
        started = [
            subprocess.Popen(
                [*command, str(rank), *registered()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(len(names))
        ]
        end = time.monotonic() + LIMIT_SECONDS
        try:
            while any(each.poll() is None for each in started) and not any(each.poll() for each in started):
                if time.monotonic() > end:
                    return {"exchange": f"it took more than {LIMIT_SECONDS:.0f} seconds"}
                time.sleep(PAUSE_SECONDS)
        finally:
            for each in started:
                each.kill()  # others wait for one that failed
            told = [each.communicate() for each in started]
    failed = [
        words.strip().splitlines()[-1] for each, (_, words) in zip(started, told, strict=True) if each.returncode > 0
    ]
    failed.sort(key=lambda words: "SeveredError" in words)  # those only lost the one that failed
    return {"exchange": failed[0]} if failed else json.loads(told[0][0])


def _measure(meeting: str, names: Sequence[str], rank: int) -> dict[str, str]:
    """One of the processes."""
    prepare(names, allow=False)
    size, device = len(names), torch.device(names[rank])
    link = Transport(FILE(meeting, size), rank, size, device, LIMIT_SECONDS, LOOPBACK, lambda: None)
    width = BUCKET // 4 // size
    whole, slices, mine = (torch.zeros(count, device=device) for count in (width * size, width * size, width))

    def exchange() -> None:
        link.wait(link.all_to_all(slices, whole, [width] * size, [width] * size))
        link.wait(link.all_gather(whole, mine))

    ways: dict[str, Callable[[], None]] = {
        "all-to-all and all-gather": exchange,
        "all-reduce": functools.partial(link.all_reduce, whole),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            link.settle()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(row[WARM_UP:]) * 1000 for name, row in seconds.items()}
    kind = "bytes arrived" if device.type != "cpu" else "in host memory"
    return {
        f"a bucket of {BUCKET >> 20} MB": ", ".join(f"{name} {value:.1f} ms" for name, value in medians.items()),
        f"{size * (size - 1)} pairs of devices": kind,
    }


def main(meeting: str, names: str, rank: str, *registered: Any) -> None:
    """Measure, and print what the first process found."""
    expect(list(registered))
    found = _measure(meeting, json.loads(names), int(rank))
    if rank == "0":
        sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
