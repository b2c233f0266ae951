"""What more cores bring: the table of README's speed section for this machine, for 1, 2, 4, ... cores of it.

    python benchmarks/cores.py                      # all counts up to the cores of this machine, all jobs
    python benchmarks/cores.py --cores 1,2 --job photos --rounds 3
    python benchmarks/cores.py --busy 2             # two processes beside it take what they get
    python benchmarks/cores.py --quick              # one short round: does everything run?

On C cores (the processes may run on no others): the plain loop with C threads, DistributedDataParallel over Gloo and
over ``phalanx`` with C workers, and phalanx with R = W = C. ``photos`` is what people have: a BatchNorm CNN, fed by a
dataset that crops, flips and adds noise. The plain loop reads it with a DataLoader of C workers, DDP with one for each
rank, phalanx with its readers. Fresh processes, rounds interleaved; the whole batch is the same everywhere.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import models
import peers
import step
import torch
import tqdm
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PLAIN, GLOO, BACKEND, OURS = "plain", "DDP, Gloo", "DDP, phalanx", "phalanx"
COLUMNS = (PLAIN, GLOO, BACKEND, OURS)
PHOTOS, SIDE, COUNT, BATCH = "photos", 32, 512, 64
STEPS = {"tiny": 1000, "lenet": 60, "mlp": 30, "gpt": 30, PHOTOS: 40}
BUSY = "while True: pass"


class Photos(Dataset):
    """Pictures that are drawn here, 3 x 32 x 32; each is cropped, flipped and made noisy when it is read."""

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(COUNT, 3, SIDE + 8, SIDE + 8, generator=draw)
        self.y = torch.randint(10, (COUNT,), generator=draw)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        top, left, flip = torch.randint(8, (3,)).tolist()
        picture = self.x[index, :, top : top + SIDE, left : left + SIDE]
        picture = picture.flip(2) if flip % 2 else picture
        return picture + 0.1 * torch.randn(3, SIDE, SIDE), self.y[index]


def network():
    """A small residual-free CNN with BatchNorm, as in many tutorials."""
    layers = []
    for into, out in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def case_of(job: str, steps: int) -> models.Case:
    """A job as the other benchmarks have it; that of photos has its dataset in the place of x."""
    if job == PHOTOS:
        return models.Case(network, Photos(), torch.empty(0), nn.functional.cross_entropy, BATCH, steps)
    return models.dataclasses.replace(models.case(job), steps=steps)


def epochs(loader):
    """Batches without end; a sampler over ranks is told each epoch."""
    for epoch in itertools.count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader


def batches_of(case: models.Case, rank: int, workers: int, readers: int):
    """One rank's part of each batch."""
    if isinstance(case.x, torch.Tensor):
        return peers.shuffled(case, rank, workers)
    sampler = DistributedSampler(case.x, workers, rank) if workers > 1 else None
    options = {"num_workers": readers, "persistent_workers": True, "drop_last": True}
    return epochs(DataLoader(case.x, case.batch_size // workers, shuffle=sampler is None, sampler=sampler, **options))


def trained(case: models.Case, rank: int, workers: int, backend: str | None, ready) -> dict:
    """The loop by hand, alone or under DistributedDataParallel."""
    torch.manual_seed(0)
    model = case.make_model()
    if backend is not None:
        wrapped = nn.parallel.DistributedDataParallel
        model = wrapped(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = models.OPTIMIZER(model.parameters())
    readers = int(os.environ["READERS"])
    return peers.timed(
        case, batches_of(case, rank, workers, readers), lambda x, y: peers.step(model, optimizer, case, x, y), ready
    )


def worker(rank: int, workers: int, case: models.Case, store: str, results) -> None:
    """One rank of DistributedDataParallel."""
    backend = os.environ["BACKEND"]
    if backend == "phalanx":
        import phalanx.backend  # noqa: F401  registers it
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(backend, store=distributed.FileStore(store, workers), rank=rank, world_size=workers)
    results.put((rank, trained(case, rank, workers, backend, distributed.barrier)))
    distributed.barrier()
    distributed.destroy_process_group()


def ours(case: models.Case, cores: int) -> dict:
    """Trained by phalanx, with as many replicas and workers as cores."""
    if isinstance(case.x, torch.Tensor):
        return step.phalanx_facts(case, cores, cores)
    import phalanx

    recipe = phalanx.Recipe(
        case.make_model, case.x, case.loss_fn, replicas=cores, batch_size=case.batch_size,
        steps=case.warm_up + case.steps, optimizer=models.OPTIMIZER, drop_last=True,
    )  # fmt: skip
    where = {"workers": cores, "engine": "processes"} if cores > 1 else {"engine": "inline"}
    with recipe.start(**where, progress=False) as run:
        for _ in itertools.islice(run, case.warm_up):
            pass
        began = step.time.perf_counter()
        run.finish()
        seconds = (step.time.perf_counter() - began) / case.steps
    return {"seconds": seconds, "digest": run.result().digest}


def measure(column: str, job: str, cores: int, steps: int) -> dict:
    """Facts of one column, in this process, which may use so many cores and no more."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    case = case_of(job, steps)
    os.environ["READERS"] = str(cores if column == PLAIN else 1)
    if column == OURS:
        return ours(case, cores)
    if column == PLAIN:
        torch.set_num_threads(cores)
        return trained(case, 0, 1, None, lambda: None)
    os.environ["BACKEND"] = "gloo" if column == GLOO else "phalanx"
    return peers.spawned(worker, cores, case)[0]


def apart(column: str, job: str, cores: int, steps: int) -> dict:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--job", job, "--cores", str(cores), "--column", column, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise SystemExit(f"{job}, {column}, {cores} cores failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def busy(count: int):
    """So many processes beside, which compute as much as they get."""
    beside = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()


def compared(jobs, counts, rounds: int, shorter: int) -> dict[str, step.Facts]:
    """Facts by job, cores, column and round."""
    found = {}
    with tqdm.tqdm(total=len(jobs) * len(counts) * len(COLUMNS) * rounds, unit="process") as bar:
        for job, cores in itertools.product(jobs, counts):
            facts = found[f"{job}, {cores}"] = {column: [] for column in COLUMNS}
            for number in range(rounds):
                for column in COLUMNS if number % 2 == 0 else reversed(COLUMNS):
                    bar.set_description(f"{job}, {cores} cores, {column}")
                    facts[column].append(apart(column, job, cores, max(4, STEPS[job] // shorter)))
                    bar.update()
    return found


def report(found: dict[str, step.Facts], rounds: int, beside: int) -> str:
    """The table: milliseconds a step; above 1, phalanx is faster."""
    rows = []
    for name, facts in found.items():
        times = [step.spelled(step.milliseconds(facts, column)) for column in COLUMNS]
        ratios = [f"**{step.ratio(facts, column, OURS):.2f}**" for column in COLUMNS[:-1]]
        rows.append([*name.split(", "), *times, *ratios])
    header = [
        "job",
        "cores",
        *(f"{column}, ms" for column in COLUMNS),
        "plain / phalanx",
        "Gloo / phalanx",
        "DDP over phalanx / phalanx",
    ]
    beside_it = f" Beside it {beside} busy processes." if beside else ""
    method = f"Rounds: {rounds}, interleaved, a fresh process for each; medians, ratios of each round.{beside_it}"
    return f"# Cores\n\n{step.circumstances('cores.py')}\n\n{method}\n\n{step.markdown(header, rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", help="as in 1,2,4; by default powers of two up to those of this machine")
    parser.add_argument("--job", help=f"one of {', '.join(STEPS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="so many busy processes beside it")
    parser.add_argument("--quick", action="store_true", help="one round of a tenth of the steps")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cores.*, or cores_busy.*")
    parser.add_argument("--column", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.column:
        print(json.dumps(measure(given.column, given.job, int(given.cores), given.steps)))
        return
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else peers.CORES
    counts = [2**power for power in range(7) if 2**power <= most]
    counts = [int(count) for count in given.cores.split(",")] if given.cores else counts
    if max(counts) > most:
        parser.error(f"--cores is {given.cores}, but this machine lets this process use {most}")
    rounds = 1 if given.quick else given.rounds
    with busy(given.busy):
        found = compared([given.job] if given.job else list(STEPS), counts, rounds, 10 if given.quick else 1)
    text = report(found, rounds, given.busy)
    print(text)
    if given.save:
        step.save("cores_busy" if given.busy else "cores", text, found)


if __name__ == "__main__":
    main()
