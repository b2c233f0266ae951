"""The time of a step on a device, and its memory: plain loops, R = 1 to 8, several devices, and what extras cost.

    python benchmarks/gpu/speed.py                   # nine minutes; the same call goes on where the time was over
    python benchmarks/gpu/speed.py gpt2 extras       # some parts
    CAMPAIGN_DEVICE=cpu python benchmarks/gpu/speed.py

All in one process, in rounds whose columns take turns; DistributedDataParallel (DDP) and workers have their own. Ratios
are medians of those of each round. A step is batch from host memory, forward, backward, AdamW, and its loss as a
number.
"""

import collections
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import common
import loops
import recipes
import torch
from common import Case, Outcome
from recipes import models
from torch import distributed, nn
from torch.nn import functional as F

import phalanx

PLAIN, STRICT, FIRST = "plain", "plain, deterministic", "R=1"
ROUNDS, EXTRA_ROUNDS = (2, 1) if common.SMALL else (3, 2)
SIZES = (1, 4) if common.SMALL else (1, 2, 4, 8)
WARM, STEPS = (2, 4) if common.SMALL else (12, 12)  # in steps 0, 1 and 10 phalanx computes a replica twice


class Work(NamedTuple):
    """A model with what it is trained on. There are two batches, which come again and again."""

    make_model: Callable[[], nn.Module]
    x: torch.Tensor
    y: torch.Tensor
    loss_fn: Callable[..., torch.Tensor]
    batch: int
    precision: str | None = None


def gpt2() -> nn.Module:
    """GPT-2 with 124 million parameters: the head is the embedding."""
    model = models.Gpt(*(64, 16, 32, 4, 2) if common.SMALL else (50304, 1024, 768, 12, 12))
    model.head.weight = model.token.weight
    nn.init.normal_(model.token.weight, std=0.02)
    return model


def resnet50() -> nn.Module:
    import torchvision  # pyright: ignore[reportMissingImports]  which not every machine has

    return torchvision.models.resnet50(weights=None)


def work(name: str) -> Work:
    """What a model is called here, with its data."""
    random = torch.Generator().manual_seed(0)
    if name == "gpt2":
        batch, vocabulary, tokens = (8, 64, 16) if common.SMALL else (16, 50304, 1024)
        x, y = torch.randint(vocabulary, (2, 2 * batch, tokens), generator=random)
        return Work(gpt2, x, y, models.token_loss, batch, "bfloat16")
    if name == "resnet50":
        make_model, batch, size = (recipes.conv, 8, 8) if common.SMALL else (resnet50, 64, 224)
        x = torch.randn(2 * batch, 3, size, size, generator=random)
        return Work(make_model, x, labels(batch, random), F.cross_entropy, batch, "bfloat16")
    make_model, batch, width = (models.tiny, 32, 4) if common.SMALL else (models.mlp, 256, 784)
    x = torch.randn(2 * batch, width, generator=random)
    return Work(make_model, x, labels(batch, random, 3), F.cross_entropy, batch)


def labels(batch: int, random: torch.Generator, classes: int = 10) -> torch.Tensor:
    return torch.randint(classes, (2 * batch,), generator=random)


# ---- columns


def batches(made: Work, device: torch.device, rank: int = 0, workers: int = 1) -> Iterator[Sequence[torch.Tensor]]:
    """One rank's part of shuffled batches, on the device."""
    while True:
        for rows in torch.randperm(len(made.x)).split(made.batch):
            columns = (column[rows.tensor_split(workers)[rank]] for column in (made.x, made.y))
            if device.type == "cpu":
                yield list(columns)
            else:
                yield [column.pin_memory().to(device, non_blocking=True) for column in columns]


def trained(made: Work, model: Any, device: torch.device, shares: Any, ready: Callable[[], object]) -> float:
    """Seconds of a step of the loop that one writes by hand."""
    optimizer = models.OPTIMIZER(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=made.precision is not None):
            loss = made.loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for x, y in itertools.islice(shares, WARM):
        step(x, y)
    ready()
    began = time.perf_counter()
    for x, y in itertools.islice(shares, STEPS):
        step(x, y)
    ready()
    return (time.perf_counter() - began) / STEPS


def plain(name: str, *, strict: bool) -> Outcome:
    made = work(name)
    with common.deterministic(on=strict):
        torch.manual_seed(0)
        model = made.make_model().to(common.DEVICE)
        return told(trained(made, model, common.DEVICE, batches(made, common.DEVICE), common.sync))


def told(seconds: float, peak: float | None = None) -> Outcome:
    """A time, and the most memory since the case began."""
    peak = common.peak_gb() if peak is None else peak
    values = {"ms": seconds * 1e3} | ({"peak GB": round(peak, 2)} if peak else {})
    return Outcome("measured", "", values)


def ours(name: str, replicas: int, devices: int = 1, extra: dict[str, Any] | None = None, **options: Any) -> Outcome:
    """The same as a recipe. ``extra`` are fields of the recipe, ``options`` those of the run."""
    made = work(name)
    recipe = phalanx.Recipe(
        made.make_model, (made.x, made.y), made.loss_fn, replicas=replicas, batch_size=made.batch, steps=WARM + STEPS,
        optimizer=models.OPTIMIZER, precision=made.precision, **extra or {},
    )  # fmt: skip
    given = {**loops.options(devices), "progress": False, **options}
    with loops.sharing(recipe, devices) as shared, shared.start(**given) as run:
        for _ in itertools.islice(run, WARM):
            pass
        common.sync()
        began = time.perf_counter()
        run.finish()
        common.sync()
        return told((time.perf_counter() - began) / STEPS, None if devices == 1 else 0.0)


def ddp(name: str, workers: int) -> Outcome:
    """DDP in processes of torchrun, each with a share of the same batch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(workers)]
    where = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if common.DEVICE.type == "cpu" else {})
    found = common.alone([*command, __file__, "--apart", name], 70, 2, **where)
    return told(found["seconds"], found["peak"])


def ddp_here(name: str) -> None:
    """One of these processes; the first one says how it went."""
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = common.DEVICE.type == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else common.DEVICE
    if cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    made = work(name)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        made.make_model().to(device), gradient_as_bucket_view=True, static_graph=True
    )

    def ready() -> None:
        distributed.barrier()
        common.sync()

    seconds = trained(made, model, device, batches(made, device, rank, workers), ready)
    if rank == 0:
        print(json.dumps({"seconds": seconds, "peak": common.peak_gb()}), flush=True)
    distributed.barrier()
    time.sleep(0.5)  # others may still be on their way out of it
    os._exit(0)  # what ends in order aborts now and then


# ---- rounds


def columns(name: str) -> dict[str, Callable[[], Outcome]]:
    """All ways to train a model."""
    found: dict[str, Callable[[], Outcome]] = {
        PLAIN: functools.partial(plain, name, strict=False),
        STRICT: functools.partial(plain, name, strict=True),
    }
    found |= {f"R={count}": functools.partial(ours, name, count) for count in SIZES}
    for count in (2, 4, 8):
        if count <= common.device_count():
            found[f"R={count} D={count}"] = functools.partial(ours, name, count, count)
            found[f"DDP D={count}"] = functools.partial(ddp, name, count)
    return found


def model(name: str) -> Iterator[Case]:
    """Rounds of all columns, every second one backwards."""
    if name == "resnet50" and not common.SMALL and importlib.util.find_spec("torchvision") is None:
        yield Case(name, "resnet50, round 0", lambda: Outcome("not tried", "there is no torchvision"))
        return
    yield from in_rounds(name, columns(name), ROUNDS)
    if common.device_count() == 1:
        yield Case(name, "D=2, round 0", lambda: Outcome("not tried", "there is one device"))


def in_rounds(part: str, found: dict[str, Callable[[], Outcome]], rounds: int) -> Iterator[Case]:
    for number in range(rounds):
        for column, do in found.items() if number % 2 == 0 else reversed(found.items()):
            yield Case(part, f"{column}, round {number}", do)


def extras(name: str = "gpt2") -> Iterator[Case]:
    """What is added to R = 1: clipping, a directory, snapshots, evaluations."""
    made = work(name)
    evaluation = phalanx.Evaluation(made.loss_fn, (made.x[: made.batch], made.y[: made.batch]), batch_size=made.batch)
    found: dict[str, Callable[[], Outcome]] = {
        FIRST: functools.partial(ours, name, 1),
        "max_norm": functools.partial(ours, name, 1, extra={"max_norm": 1.0}),
        "run_dir": functools.partial(within, name),
        "a snapshot every 2 steps": functools.partial(within, name, snapshot_every=2),
        "an evaluation of a batch every 2 steps": functools.partial(ours, name, 1, evaluation=evaluation),
    }
    yield from in_rounds("extras", found, EXTRA_ROUNDS)


def within(name: str, **options: Any) -> Outcome:
    """R = 1 with a directory."""
    with tempfile.TemporaryDirectory() as folder:
        return ours(name, 1, run_dir=folder, **options)


def idle() -> Iterator[Case]:
    """How long the device has nothing to do between the norm's way home and the first kernel of the update."""
    for name in ("mlp", "gpt2"):
        for replicas in (1, 4):
            yield Case("idle", f"{name}, R={replicas}", functools.partial(gaps, name, replicas))


def gaps(name: str, replicas: int) -> Outcome:
    """The gap behind the last copy to the host of each step, by torch's profiler."""
    if common.DEVICE.type != "cuda":
        return Outcome("not tried", "torch's profiler sees kernels of CUDA alone")
    made = work(name)
    recipe = phalanx.Recipe(
        made.make_model, (made.x, made.y), made.loss_fn, replicas=replicas, batch_size=made.batch, steps=WARM + STEPS,
        optimizer=models.OPTIMIZER, precision=made.precision,
    )  # fmt: skip
    with recipe.start(**loops.options(), progress=False) as run:
        for _ in itertools.islice(run, WARM):
            pass
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            run.finish()
            common.sync()
    # Without the runtime's own calls, which are events of the host.
    events = [event for event in seen.events() or [] if "CUDA" in str(event.device_type)]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    found = []
    for at, (_, end, name) in enumerate(spans):
        kernels = (begin for begin, _, other in spans[at + 1 :] if not other.startswith("Mem"))
        if "DtoH" in name and (begin := next(kernels, None)) is not None:
            found.append(begin - end)
    return told(statistics.median(found) / 1e6) if found else Outcome("failed", "no copy to the host was seen")


PARTS = {name: functools.partial(model, name) for name in ("mlp", "resnet50", "gpt2")} | {
    "idle": idle,
    "extras": extras,
}


def report(rows: common.Rows) -> str:
    """A table for each model."""
    parts = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in rows.rows:
        column, _, number = row["case"].rpartition(", round ")
        if row["values"]:
            parts[row["part"]][column][int(number)] = {**row["values"], "process": row["process"]}
    texts = [common.heading(rows, "Speed")]
    for part, found in parts.items():
        base = FIRST if part == "extras" else STRICT
        lines = [line(column, rounds, found.get(base, {})) for column, rounds in found.items()]
        rounds = max(len(each) for each in found.values())
        head = f"### {part}\n\nMedians of {rounds} rounds of {STEPS} steps after {WARM} warm ones."
        texts += [head, common.table(["", "ms", f"x {base}", "peak, GB"], lines)]
    return "\n\n".join(texts)


def line(column: str, rounds: dict[int, dict[str, float]], base: dict[int, dict[str, float]]) -> list[str]:
    """A column of a model: time, ratio of the rounds in which one process did both, memory."""
    beside = {number: base[number]["ms"] for number in base if number in rounds}
    ratios = [
        rounds[number]["ms"] / milliseconds
        for number, milliseconds in beside.items()
        if rounds[number]["process"] == base[number]["process"]
    ]
    ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
    peaks = [values["peak GB"] for values in rounds.values() if "peak GB" in values]
    milliseconds = statistics.median(values["ms"] for values in rounds.values())
    return [column, common.shown(milliseconds), ratio, f"{max(peaks):.2f}" if peaks else ""]


def main() -> int:
    given = common.arguments(__doc__ or "", list(PARTS)).parse_args()
    if given.apart:
        ddp_here(*given.apart)
        return 0
    rows = common.Rows("speed", again=given.again, wrong=given.wrong)
    left = common.run(rows, itertools.chain(*(PARTS[part]() for part in given.parts or PARTS)), given.minutes)
    text = report(rows)
    common.save("gpu", "speed", text, given.save)
    return common.finish(rows, left, text)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
