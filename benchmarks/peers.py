"""What phalanx is measured beside: the plain loop, DistributedDataParallel, computing alone, and copying memory.

Each function returns facts: ``seconds`` a step and, where it matters, the ``span`` that was timed (perf_counter, which
is one clock for all processes). The first steps warm up and are not counted.
"""

import contextlib
import ctypes
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time

import models
import torch
from torch import distributed, multiprocessing

COPIED_BYTES = 256 << 20
COPIES = 9
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
CORES = os.cpu_count() or 1


def plain(case: models.Case, threads: int) -> dict:
    """The loop one writes by hand: shuffled batches, AdamW fused, the loss as a number after each step."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = case.make_model()
    optimizer = models.OPTIMIZER(model.parameters())
    return timed(case, shuffled(case), lambda x, y: step(model, optimizer, case, x, y))


def ddp(case: models.Case, workers: int) -> dict:
    """The same loop in worker processes under DistributedDataParallel over Gloo on loopback, one thread each."""
    return spawned(_ddp_worker, workers, case)[0]


def compute(case: models.Case, workers: int) -> dict:
    """Forward and backward of one share per worker, all workers at once, nothing else; the slowest worker's facts.

    Memory is handled as in phalanx's workers, or page faults would hide how fast computing alone can be.
    """
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # for the workers: it is read when a process starts
    return max(spawned(_compute_worker, workers, case), key=lambda facts: facts["seconds"])


def copying() -> dict:
    """Seconds of copying 256 MiB with all cores, and bytes read and written per second."""
    torch.set_num_threads(CORES)
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = []
    for _ in range(COPIES):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times)
    return {"seconds": seconds, "bytes_per_second": 2 * COPIED_BYTES / seconds}


def loss_of(model, case: models.Case, x, y) -> torch.Tensor:
    """The loss of a batch, under autocast where the case says so."""
    with torch.autocast("cpu", torch.bfloat16) if case.precision else contextlib.nullcontext():
        return case.loss_fn(model(x), y)


def step(model, optimizer, case: models.Case, x, y) -> float:
    """One step of the plain loop."""
    loss = loss_of(model, case, x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def shuffled(case: models.Case, rank: int = 0, workers: int = 1):
    """One rank's part of each batch, epoch after epoch."""
    while True:
        order = torch.randperm(len(case.x))
        for start in range(0, len(case.x), case.batch_size):
            batch = order[start : start + case.batch_size].tensor_split(workers)[rank]
            yield case.x[batch], case.y[batch]


def timed(case: models.Case, batches, do, ready=lambda: None) -> dict:
    """Do the warm steps, wait until ``ready()``, and time the others."""
    for x, y in itertools.islice(batches, case.warm_up):
        do(x, y)
    ready()
    began = time.perf_counter()
    for x, y in itertools.islice(batches, case.steps):
        do(x, y)
    ended = time.perf_counter()
    return {"seconds": (ended - began) / case.steps, "span": [began, ended]}


def spawned(function, workers: int, case: models.Case) -> list[dict]:
    """Run ``function`` in worker processes; the facts of each, by rank."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(pathlib.Path(folder) / "store")
        multiprocessing.spawn(function, (workers, case, store, results), nprocs=workers)
    found = dict(results.get() for _ in range(workers))
    return [found[rank] for rank in range(workers)]


def _ddp_worker(rank: int, workers: int, case: models.Case, store: str, results) -> None:
    _join(rank, workers, store)
    model = torch.nn.parallel.DistributedDataParallel(
        case.make_model(), gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = models.OPTIMIZER(model.parameters())

    def do(x, y) -> None:
        step(model, optimizer, case, x, y)

    facts = timed(case, shuffled(case, rank, workers), do, distributed.barrier)
    results.put((rank, facts))
    distributed.barrier()
    distributed.destroy_process_group()


def _compute_worker(rank: int, workers: int, case: models.Case, store: str, results) -> None:
    _keep_memory()
    _join(rank, workers, store)
    model = case.make_model()
    share = slice(rank * case.batch_size // workers, (rank + 1) * case.batch_size // workers)
    batches = itertools.repeat((case.x[share].clone(), case.y[share].clone()))

    def do(x, y) -> None:
        model.zero_grad()
        loss_of(model, case, x, y).backward()

    results.put((rank, timed(case, batches, do, distributed.barrier)))
    distributed.destroy_process_group()


def _keep_memory() -> None:
    """Big blocks that are freed stay with the process, where the C library can be told so."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def _join(rank: int, workers: int, store: str) -> None:
    """Meet the other workers through a file, so that no port is taken from anybody."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = distributed.FileStore(store, workers)
    distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=workers)
