"""Facts of a machine that decide what phalanx has to do there. Two minutes.

    python benchmarks/gpu/probe.py
    CAMPAIGN_DEVICE=cpu python benchmarks/gpu/probe.py

machine: versions. norm: whether the norm's bits follow the address, and the cut. attention: whether it repeats.
refused: operations in deterministic mode, forward and backward. copies: bandwidth to and from the host. launches: what
a step asks of the device.
"""

import collections
import functools
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import loops
import recipes
import torch
from common import DEVICE, Case, Outcome
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.frameworks.torch.arithmetic import spec_of
from phalanx.frameworks.torch.norm import PIECE, norm_of_pieces

REPEATS = 3 if common.SMALL else 20
WATCHED = "cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaStreamSynchronize"
RUNTIME = "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventSynchronize", "cudaDeviceSynchronize"


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor on the device that needs a gradient."""
    host = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return host.to(DEVICE, dtype).requires_grad_()


def timed(do: Callable[[], object]) -> float:
    """Median seconds, each of which is waited for."""
    times = []
    for number in range(REPEATS + 2):
        common.sync()
        began = time.perf_counter()
        do()
        common.sync()
        times += [time.perf_counter() - began] * (number >= 2)
    return statistics.median(times)


# ---- the machine


def facts() -> Outcome:
    """Versions and sizes."""
    found = {**common.circumstances(), "system": platform.platform(), "threads": torch.get_num_threads()}
    if DEVICE.type == "cuda":
        kind = torch.cuda.get_device_properties(DEVICE)
        found |= {"capability": f"{kind.major}.{kind.minor}", "GB": round(kind.total_memory / 1e9, 1)}
        found |= {"nccl": nccl(), "driver": driver()}
        found |= {"tf32 products": torch.backends.cuda.matmul.allow_tf32, "tf32 convolutions": tf32()}
    return Outcome("measured", "", found)


def tf32() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


def nccl() -> str:
    """The version of NCCL that torch has."""
    version: Any = getattr(torch.cuda, "nccl", None)
    return ".".join(map(str, version.version())) if version else "unknown"


def driver() -> str:
    """The driver's version, by its own tool."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown"


def peers() -> Outcome:
    """Which pairs of devices reach each other's memory."""
    count = common.device_count()
    if DEVICE.type != "cuda" or count < 2:
        return Outcome("not tried", "there is one device")
    able = [torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b]
    return Outcome("measured", "", {"pairs": len(able), "direct": sum(able)})


def machine() -> Iterator[Case]:
    yield Case("machine", "facts", facts)
    yield Case("machine", "pairs of devices", peers)


# ---- norms and attention


def norms(size: int) -> Outcome:
    """The norm of the same numbers at an even address and one element further: bits, and microseconds."""
    numbers = drawn(size).detach()
    rooms = [torch.zeros(size + 64, device=DEVICE) for _ in range(2)]
    views = [room[offset : offset + size].copy_(numbers) for offset, room in enumerate(rooms)]
    found = [torch.nn.utils.get_total_norm([view]) for view in views]
    times = {
        f"us at {offset}": 1e6 * timed(lambda v=view: torch.nn.utils.get_total_norm([v]))
        for offset, view in enumerate(views)
    }
    return Outcome("equal bits" if torch.equal(*found) else "other bits", "", times)


def sliced() -> Outcome:
    """The norm of a gradient in one, in slices and piece by piece, which must be the same; microseconds beside torch's.

    phalanx takes it for R > 1.
    """
    sizes = [70_000, 5] if common.SMALL else [38_597_376, 1_000_003, 262_144, 768, 5]
    whole = [drawn(size, seed=size).detach() for size in sizes]
    at = PIECE if common.SMALL else 37 * PIECE
    slices = [part for entry in whole for part in (entry[:at], entry[at:]) if len(part)]
    alone = [nn.Parameter(torch.zeros_like(entry)) for entry in whole]
    for parameter, entry in zip(alone, whole, strict=True):
        parameter.grad = entry

    def taken(entries: list[torch.Tensor]) -> torch.Tensor:
        return norm_of_pieces(entries, list(map(spec_of, entries)), DEVICE)

    found = [taken(whole), taken(slices), loops.by_hand.norm_by_pieces(alone)]
    times = {
        "us": 1e6 * timed(lambda: taken(whole)),
        "torch's, us": 1e6 * timed(lambda: nn.utils.get_total_norm(whole)),
    }
    return Outcome("same" if found[0] == found[1] == found[2] else "different", "", times)


def norm() -> Iterator[Case]:
    yield Case("norm", "in slices", sliced)
    for size in (64, 1000) if common.SMALL else (64, 1000, 4096, 50_000, 262_144, 1_000_000, 38_597_376):
        yield Case("norm", f"{size} elements", functools.partial(norms, size))


def attends(dtype: torch.dtype, strict: bool) -> Outcome:
    """Whether SDPA's gradients repeat, which they must in deterministic mode, and its milliseconds."""
    shape = (2, 2, 16, 8) if common.SMALL else (8, 12, 1024, 64)
    q, k, v = (drawn(*shape, seed=seed, dtype=dtype) for seed in range(3))

    def do() -> list[torch.Tensor]:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), (q, k, v))]

    with common.deterministic(on=strict):
        first = do()
        same = all(all(map(torch.equal, first, do())) for _ in range(REPEATS))
        verdict = "repeats" if same else "different" if strict else "does not repeat"
        return Outcome(verdict, "", {"ms": 1e3 * timed(do)})


def attention() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for strict in (False, True):
            name = f"{str(dtype).removeprefix('torch.')}, {'deterministic' if strict else 'as it is'}"
            yield Case("attention", name, functools.partial(attends, dtype, strict))


# ---- what is refused


def whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def picture(size: int = 12) -> torch.Tensor:
    return drawn(2, 4, size, size)


def ctc() -> torch.Tensor:
    lengths = torch.tensor([20, 20]), torch.tensor([4, 4])
    return F.ctc_loss(drawn(20, 2, 5).log_softmax(-1), whole(4, 2, 4) + 1, *lengths)


def scattered(method: str) -> torch.Tensor:
    index = whole(3, 50)
    return getattr(drawn(3, 4), method)(
        0, index if method != "scatter_add" else index[:, None].expand(50, 4), drawn(50, 4)
    )


OPERATIONS: dict[str, Callable[[], torch.Tensor]] = {
    "adaptive_avg_pool2d to 1": lambda: F.adaptive_avg_pool2d(picture(), 1),
    "adaptive_avg_pool2d to 2": lambda: F.adaptive_avg_pool2d(picture(), 2),
    "adaptive_max_pool2d to 2": lambda: F.adaptive_max_pool2d(picture(), 2),
    "max_pool2d, overlapping": lambda: F.max_pool2d(picture(), 3, 2, 1),
    "avg_pool2d": lambda: F.avg_pool2d(picture(), 2),
    "max_pool3d": lambda: F.max_pool3d(drawn(1, 2, 6, 6, 6), 2),
    "avg_pool3d": lambda: F.avg_pool3d(drawn(1, 2, 6, 6, 6), 2),
    "reflection pad 1d": lambda: F.pad(drawn(2, 3, 8), (1, 1), mode="reflect"),
    "reflection pad 2d": lambda: F.pad(picture(), (1, 1, 1, 1), mode="reflect"),
    "replication pad 2d": lambda: F.pad(picture(), (1, 1, 1, 1), mode="replicate"),
    "interpolate, bilinear": lambda: F.interpolate(picture(), scale_factor=2, mode="bilinear"),
    "interpolate, nearest": lambda: F.interpolate(picture(), scale_factor=2),
    "grid_sample": lambda: F.grid_sample(picture(), drawn(2, 5, 5, 2), align_corners=False),
    "cross_entropy [N, C]": lambda: F.cross_entropy(drawn(8, 5), whole(5, 8)),
    "cross_entropy [N, C, d]": lambda: F.cross_entropy(drawn(8, 5, 6), whole(5, 8, 6)),
    "ctc_loss": ctc,
    "cumsum, float": lambda: drawn(4, 100).cumsum(1),
    "cumprod, float": lambda: drawn(4, 100).cumprod(1),
    "embedding": lambda: F.embedding(whole(10, 5, 7), drawn(10, 4)),
    "embedding_bag, mean": lambda: F.embedding_bag(whole(10, 3, 5), drawn(10, 4), mode="mean"),
    "embedding_bag, max": lambda: F.embedding_bag(whole(10, 3, 5), drawn(10, 4), mode="max"),
    "gather": lambda: drawn(4, 6).gather(1, whole(6, 4, 9)),
    "index_select": lambda: drawn(4, 6).index_select(0, whole(4, 20)),
    "indexing by a tensor": lambda: drawn(4, 6)[whole(4, 20)],
    "index_add": lambda: scattered("index_add"),
    "scatter_add": lambda: scattered("scatter_add"),
    "median of a dimension": lambda: drawn(4, 9).median(1).values,
    "kthvalue": lambda: drawn(4, 9).kthvalue(3, 1).values,
    "bincount, weighted": lambda: drawn(20) * torch.bincount(whole(5, 20), drawn(20).detach())[whole(5, 20)],
    "conv_transpose2d": lambda: F.conv_transpose2d(picture(), drawn(4, 3, 3, 3)),
    "conv3d": lambda: F.conv3d(drawn(1, 2, 6, 6, 6), drawn(3, 2, 3, 3, 3)),
    "LSTM": lambda: nn.LSTM(4, 8, 2, dropout=0.1).to(DEVICE)(drawn(5, 2, 4))[0],
}  # fmt: skip


def asked(operation: Callable[[], torch.Tensor]) -> Outcome:
    """Forward and backward in deterministic mode."""
    with common.deterministic():
        try:
            operation().sum().backward()
            common.sync()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            return Outcome("refused", str(error).split(". ")[0][:110])
    return Outcome("ran")


def refused() -> Iterator[Case]:
    for name, operation in OPERATIONS.items():
        yield Case("refused", name, functools.partial(asked, operation))


# ---- copies and launches


def copied(pinned: bool, home: bool) -> Outcome:
    """GB/s of a copy to the host (home) or from it."""
    count = 1 << (16 if common.SMALL else 26)
    there, here = torch.ones(count, device=DEVICE), torch.ones(count)
    here = here.pin_memory() if pinned else here
    into, source = (here, there) if home else (there, here)
    return Outcome(
        "measured", "", {"GB/s": there.nbytes / 1e9 / timed(lambda: into.copy_(source, non_blocking=pinned))}
    )


def copies() -> Iterator[Case]:
    for pinned in (False, True) if DEVICE.type == "cuda" else (False,):
        for home in (True, False):
            name = f"{'device to host' if home else 'host to device'}, {'pinned' if pinned else 'pageable'}"
            yield Case("copies", name, functools.partial(copied, pinned, home))


def counted(do: Callable[[], object]) -> dict[str, Any]:
    """Calls of the device's runtime in a step, by name; on the CPU operations of torch."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if DEVICE.type == "cuda" else []
    with torch.profiler.profile(activities=kinds) as profile:
        do()
        common.sync()
    found: collections.Counter[str] = collections.Counter()
    for event in profile.key_averages():
        found[event.key] += event.count
    if DEVICE.type == "cpu":
        return {"operations": sum(count for name, count in found.items() if name.startswith("aten::"))}
    names = [*WATCHED, *RUNTIME]
    return {name: total for name in names if (total := sum(n for key, n in found.items() if key.startswith(name)))}


def by_hand(recipe: phalanx.Recipe) -> Outcome:
    """A step of the plain deterministic loop."""
    x, y = (column[: recipes.BATCH] for column in recipes.IMAGES)
    with common.deterministic():
        model = recipe.make_model().to(DEVICE)
        assert recipe.optimizer
        optimizer: Any = recipe.optimizer(list(model.named_parameters()))

        def step() -> None:
            F.cross_entropy(model(common.moved(x)), common.moved(y)).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        return Outcome("measured", "", counted(step))


def ours(recipe: phalanx.Recipe) -> Outcome:
    """A step of a run in this process. Steps 0, 1 and 10 have more."""
    with recipe.start(devices=[str(DEVICE)], engine="inline", progress=False) as run:
        for _ in range(3):
            next(run)
        return Outcome("measured", "", counted(lambda: next(run)))


def launches() -> Iterator[Case]:
    made = functools.partial(recipes.recipe, recipes.conv, recipes.IMAGES, steps=6, optimizer=torch.optim.AdamW)
    yield Case("launches", "plain, deterministic", functools.partial(by_hand, made(replicas=1)))
    for replicas in (1, 4):
        yield Case("launches", f"R={replicas}", functools.partial(ours, made(replicas=replicas)))


PARTS = {
    "machine": machine, "norm": norm, "attention": attention, "refused": refused, "copies": copies,
    "launches": launches,
}  # fmt: skip


def report(rows: common.Rows) -> str:
    """A table for each part."""
    texts = [common.heading(rows, "Facts")]
    for part in dict.fromkeys(row["part"] for row in rows.rows):
        found = [row for row in rows.rows if row["part"] == part]
        lines = [
            [
                row["case"],
                row["verdict"],
                ", ".join(f"{k} {common.shown(v)}" for k, v in row["values"].items()),
                row["note"],
            ]
            for row in found
        ]
        texts += [f"### {part}", common.table(["", "", "", ""], lines)]
    return "\n\n".join(texts)


def main() -> int:
    given = common.arguments(__doc__ or "", list(PARTS)).parse_args()
    rows = common.Rows("probe", again=given.again, wrong=given.wrong)
    left = common.run(rows, [case for part in given.parts or PARTS for case in PARTS[part]()], given.minutes)
    text = report(rows)
    common.save("gpu", "probe", text, given.save)
    return common.finish(rows, left, text)


if __name__ == "__main__":
    sys.exit(main())
