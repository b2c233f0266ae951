"""How long the exchange of a bucket takes between devices, beside an all-reduce: a process for each, as in a run."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.engines.devices.buckets import BUCKET
from phalanx.engines.devices.transport import FILE, Transport
from phalanx.engines.hosts.gloo import LOOPBACK
from phalanx.frameworks.torch.accelerators import expect, prepare, registered

ROUNDS, WARM_UP = 12, 4
FOUND = "found.json"
LIMIT_SECONDS, PAUSE_SECONDS = 120.0, 0.05


def measured(names: Sequence[str]) -> dict[str, str]:
    """Rows of a table: milliseconds for a bucket, and that bytes arrive between all pairs, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="phalanx-") as name, contextlib.ExitStack() as closing:
        folder = pathlib.Path(name)
        command = [sys.executable, "-m", "phalanx.lab.timing", name, json.dumps([*names])]
        started: list[subprocess.Popen[bytes]] = []
        for rank in range(len(names)):
            output = closing.enter_context((folder / f"{rank}").open("wb"))
            started.append(subprocess.Popen([*command, str(rank), *registered()], stdout=output, stderr=output))
        end = time.monotonic() + LIMIT_SECONDS
        try:
            while any(each.poll() is None for each in started) and not any(each.poll() for each in started):
                if time.monotonic() > end:
                    return {"exchange": f"it took more than {LIMIT_SECONDS:.0f} seconds"}
                time.sleep(PAUSE_SECONDS)
            codes = [each.poll() for each in started]
        finally:
            for each in started:
                each.kill()  # others wait for one that failed
                each.wait()
        failed = [
            (f"status {code}\n" + (folder / f"{rank}").read_text(errors="replace")).strip().splitlines()[-1]
            for rank, code in enumerate(codes)
            if code
        ]
        failed.sort(key=lambda words: "SeveredError" in words)  # those only lost the one that failed
        return {"exchange": failed[0]} if failed else json.loads((folder / FOUND).read_text())


def _measure(meeting: str, names: Sequence[str], rank: int) -> dict[str, str]:
    """One of the processes."""
    prepare(names, allow=False)
    size, device = len(names), torch.device(names[rank])
    link = Transport(FILE(meeting, size), rank, size, device, LIMIT_SECONDS, LOOPBACK, lambda: None)
    width = BUCKET // 4 // size
    whole, slices, mine = (torch.zeros(count, device=device) for count in (width * size, width * size, width))

    def exchange() -> None:
        link.wait(link.all_to_all(slices, whole, [width] * size, [width] * size))
        link.wait(link.gather(whole, mine))

    ways: dict[str, Callable[[], None]] = {
        "all-to-all and all-gather": exchange,
        "all-reduce": functools.partial(link.all_reduce, whole),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(row[WARM_UP:]) * 1000 for name, row in seconds.items()}
    kind = "bytes arrived" if device.type != "cpu" else "in host memory"
    return {
        f"a bucket of {BUCKET >> 20} MB": ", ".join(f"{name} {value:.1f} ms" for name, value in medians.items()),
        f"{size * (size - 1)} pairs of devices": kind,
    }


def main(folder: str, names: str, rank: str, *registered: Any) -> None:
    """Measure, and write what the first process found."""
    expect(list(registered))
    found = _measure(f"{folder}/meeting", json.loads(names), int(rank))
    if rank == "0":
        pathlib.Path(folder, FOUND).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
