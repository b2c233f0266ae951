"""What a run takes besides the time of its steps: memory of all its processes, and time to its first step."""

import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import models
import peers
import psutil
import step
import torch

SAMPLE_SECONDS = 0.05
IMPORT = "import time; began = time.perf_counter(); import torch; print(time.perf_counter() - began)"


class Sampler(threading.Thread):
    """Notes the summed PSS of this process and all that descend from it: shared pages count once."""

    def __init__(self):
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self._ended = threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self.join()

    def run(self):
        me = psutil.Process()
        while not self._ended.wait(SAMPLE_SECONDS):
            pids = [me.pid, *(child.pid for child in me.children(recursive=True))]
            self.samples.append((time.perf_counter(), held(pids)))


def held(pids: Sequence[int]) -> int:
    """Bytes that processes hold together: a page that several map counts once, and so does one that none maps now."""
    told = [pss_bytes(pid) for pid in pids]
    mapped, files = sum(each["Pss_Shmem"] for each in told), {}
    for pid in pids:
        files |= memory_files(pid)
    return sum(each["Pss"] for each in told) + max(0, sum(files.values()) - mapped)


def pss_bytes(pid: int) -> dict[str, int]:
    """Memory of a process, each shared page divided by those that share it, and what is shared of that; 0: ended."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        lines = []
    return {"Pss": 0, "Pss_Shmem": 0} | {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def memory_files(pid: int) -> dict[int, int]:
    """Bytes of the shared memory that a process holds a descriptor of, by inode."""
    found = {}
    with contextlib.suppress(OSError):
        for file in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(file).startswith("/memfd:"):
                    facts = file.stat()
                    found[facts.st_ino] = facts.st_blocks * 512
    return found


def memory_facts(column: str, case: models.Case) -> dict:
    """Peak and median of the memory while training, and the peak from beginning to end."""
    with Sampler() as sampler:
        began, ended = step.measure(column, case)["span"]
    training = [size for when, size in sampler.samples if began <= when <= ended]
    everything = [size for _, size in sampler.samples]
    return {"peak": max(training), "median": statistics.median(training), "whole peak": max(everything)}


def start_facts(kind: str, case: models.Case) -> dict:
    """Seconds to the first finished step, twice in one process that has imported everything."""
    import phalanx  # noqa: F401  the import is not counted

    first_step = plain_start if kind == "plain loop" else phalanx_start
    return {"first": first_step(kind, case), "second": first_step(kind, case)}


def plain_start(kind: str, case: models.Case) -> float:
    """The plain loop: from nothing to the end of its first step."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    model = case.make_model()
    optimizer = models.OPTIMIZER(model.parameters())
    peers.step(model, optimizer, case, case.x[: case.batch_size], case.y[: case.batch_size])
    return time.perf_counter() - began


def phalanx_start(kind: str, case: models.Case) -> float:
    """From the call of `train()` to the report of its first step."""
    import phalanx

    reported = []
    began = time.perf_counter()
    phalanx.train(
        case.make_model, (case.x, case.y), case.loss_fn, replicas=2, batch_size=case.batch_size, steps=5,
        optimizer=models.OPTIMIZER, progress=False, callbacks=[lambda report: reported.append(time.perf_counter())],
        **({"workers": 2} if kind == "workers=2" else {}),
    )  # fmt: skip
    return reported[0] - began


def import_seconds() -> float:
    """Seconds of `import torch` in a fresh interpreter."""
    return float(subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True).stdout)
