"""By hand (on the devices named, or four CPUs), in one big batch, with DDP, DataParallel: equal up to rounding."""

import sys
import tempfile

import torch
from torch import distributed, multiprocessing, nn

from phalanx import manual

STEPS, SAMPLES, LR = 10, 23, 0.1  # 23 samples are dealt unevenly, so shares weigh differently
torch.manual_seed(0)
X, Y = torch.randn(STEPS, SAMPLES, 10), torch.randint(3, (STEPS, SAMPLES))
MODEL = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))


def by_hand(algorithm):
    replicas = manual.replicate(MODEL, sys.argv[1:] or ["cpu"] * 4)
    optimizers = [torch.optim.SGD(replica.parameters(), lr=LR) for replica in replicas]
    for batch in zip(X, Y, strict=True):
        manual.data_parallel_step(replicas, optimizers, batch, nn.functional.cross_entropy, algorithm=algorithm)
    return replicas[0].cpu().state_dict()


def plain(wrap, device="cpu", rank=0, processes=1):
    [model] = manual.replicate(MODEL, [device])
    wrapped, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=LR)
    for batch in zip(X, Y, strict=True):
        x, y = (column.tensor_split(processes)[rank].to(device) for column in batch)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(x), y, reduction="sum") / SAMPLES
        (loss * processes).backward()  # DDP divides by their number
        optimizer.step()
    return model.cpu().state_dict()


def ddp(rank, folder):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save(plain(nn.parallel.DistributedDataParallel, "cpu", rank, 2), f"{folder}/{rank}")
    distributed.destroy_process_group()


def tolerance(before, after):
    """What rounding may do: each step rounds each weight once, and each of the samples' terms in what it moves by."""
    return torch.finfo(after.dtype).eps * (STEPS * after.abs().max() + SAMPLES * (after - before).abs().max())


if __name__ == "__main__":
    reference = plain(nn.Sequential)
    allowed = {name: tolerance(before, reference[name]) for name, before in MODEL.state_dict().items()}
    ways = {name: by_hand(name) for name in ("ordered", "ring", "naive")}
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(ddp, (folder,), nprocs=2)
        ways["DDP"] = torch.load(f"{folder}/0")
    if torch.cuda.is_available():
        ways["DataParallel"] = plain(nn.DataParallel, "cuda")
    off = {way: {name: (found[name] - reference[name]).abs().max() for name in allowed} for way, found in ways.items()}
    for way, row in {**off, "may differ by": allowed}.items():
        print(f"{way:14}", *(f"{name} {value:.1e}" for name, value in row.items()))
    sys.exit(any(row[name] > allowed[name] for row in off.values() for name in allowed))
