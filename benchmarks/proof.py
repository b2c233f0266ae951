"""What proofs cost while nothing is wrong, and which planted faults an audit, a chain or a verification finds.

    python benchmarks/proof.py --save
    python benchmarks/proof.py --faults --save

The cost of the chain is what its observer takes of a run's time; that of an audit is the ratio of runs that audit every
step and none, taken in turn, divided by 100 for ``audit=0.01``. A campaign of faults flips single bits.
"""

import argparse
import functools
import os
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import models
import step
import torch
import tqdm

MODELS = ("lenet", "mlp", "gpt")
REPLICAS, WORKERS = 8, 2
SECONDS = 15.0  # of a run whose chain is timed
AUDITED = 15  # steps of each run with audits and without
ROUNDS = 2
RATES = (0.01, 0.1, 1.0)
SEEDS, STEPS = 10, 200


def recipe(model: str, steps: int):
    """A recipe of the usual models, in 8 replicas."""
    import phalanx

    case = models.case(model)
    return phalanx.Recipe(
        case.make_model, (case.x, case.y), case.loss_fn, replicas=REPLICAS, batch_size=case.batch_size, steps=steps,
        optimizer=models.OPTIMIZER,
    )  # fmt: skip


def chain_cost(model: str, chain: object) -> dict[str, float]:
    """The share of the time between the first and the last step that the chain's observer takes."""
    from phalanx.checkpoint.chained import Chained

    job, spent, digests = recipe(model, 1 << 30), [], []
    plain, digest = Chained.step, Chained._digest

    def timed(observer, report):
        began = time.perf_counter()
        plain(observer, report)
        spent.append(time.perf_counter() - began)

    def counted(observer, steps):
        digests.append(steps)
        digest(observer, steps)

    Chained.step, Chained._digest = timed, counted
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            job.start(workers=WORKERS, engine="processes", progress=False, run_dir=folder, chain=chain) as run,
        ):
            run._watched = False
            for _ in range(10):
                next(run)
            spent.clear()
            digests.clear()
            began = time.perf_counter()
            while time.perf_counter() - began < SECONDS:
                next(run)
            seconds = time.perf_counter() - began
            run._loop._observers = run._loop._observers[:1]  # no last snapshot
    finally:
        Chained.step, Chained._digest = plain, digest
    links = [value for value in spent if value < 10 * statistics.median(spent)]
    return {
        "share": sum(spent) / seconds, "steps": len(spent), "digests": len(digests), "link": statistics.median(links),
        "step": seconds / len(spent),
    }  # fmt: skip


def audit_cost(model: str) -> float:
    """The ratio of a step that is audited to one that is not, the median of runs in turn."""
    ratios = []
    for number in range(ROUNDS):
        pace = {}
        for audit in (0.0, 1.0) if number % 2 else (1.0, 0.0):
            marks: list[float] = []
            with recipe(model, AUDITED + 5).start(
                workers=WORKERS, engine="processes", progress=False, audit=audit
            ) as run:
                run._watched = False
                for _ in run:
                    marks.append(time.perf_counter())
            pace[audit] = (marks[-1] - marks[4]) / AUDITED
        ratios.append(pace[1.0] / pace[0.0])
    return statistics.median(ratios)


def costs() -> str:
    """The table of costs."""
    rows = []
    for model in tqdm.tqdm(MODELS, unit="model"):
        auto, audited = chain_cost(model, "auto"), audit_cost(model)
        rows.append([
            model, step.spelled(1e3 * auto["step"]), f"{1e6 * auto['link']:.0f}", str(auto["digests"]),
            f"{100 * auto['share']:.2f} %", f"{100 * (audited - 1):.0f} %", f"{audited - 1:.2f} %",
        ])  # fmt: skip
    header = ["model", "step, ms", "a link, us", f"digests in {SECONDS:.0f} s", 'chain="auto"', "audit=1", "audit=0.01"]
    return step.markdown(header, rows)


class Net(torch.nn.Module):
    """A small net that computes something else in the one process that wrote ``path``, ``times`` times."""

    def __init__(self, path: str, after: int, times: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        self.path, self.after, self.times, self.count = path, after, times, 0
        self.body[2].weight.register_hook(self.flip)

    def forward(self, x):
        return self.body(x)

    def flip(self, gradient):
        """Flip a bit of the largest element, if this process is the faulty one and has come so far."""
        self.count += 1
        if self.count <= self.after:
            return None
        try:
            with open(self.path, "x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            pass
        with open(self.path) as file:
            faulty = file.read() == str(os.getpid())
        if not faulty or self.count > self.after + self.times:
            return None
        gradient = gradient.clone()
        gradient.view(-1)[gradient.abs().argmax()].view(torch.int32).bitwise_xor_(1 << 12)
        return gradient


def faulty(seed: int, path: str, after: int, times: int, steps: int):
    """A recipe with such a net."""
    import phalanx

    random = torch.Generator().manual_seed(seed)
    x, y = torch.randn(64, 8, generator=random), torch.randint(3, (64,), generator=random)
    return phalanx.Recipe(
        functools.partial(Net, path, after, times), (x, y), torch.nn.functional.cross_entropy, replicas=4,
        batch_size=16, steps=steps, seed=seed,
    )  # fmt: skip


def campaign(times: int, rate: float) -> list[str]:
    """How many of ten runs in three workers found a fault, after how many steps, and named the right process."""
    waited, right = [], 0
    for seed in range(SEEDS):
        path = tempfile.mktemp()
        job = faulty(seed, path, 20, times, STEPS)
        with job.start(workers=3, engine="processes", progress=False, audit=rate) as run:
            pids = {}
            for _ in run:
                pids |= dict(enumerate(run.worker_pids)) if not run.incidents else {}
            found = [incident for incident in run.incidents if incident.kind == "corruption"]
        if found:
            blamed = int(pathlib.Path(path).read_text())
            waited.append(found[0].step)
            right += pids.get(found[0].worker) == blamed
    ends = f"{statistics.median(waited):.0f}" if waited else ""
    return [f"{len(waited)} of {SEEDS}", ends, f"{right} of {len(waited)}" if waited else ""]


def written(kind: str) -> list[str]:
    """Single bits in memory that all workers share, or in state: what audits, digests and verification find."""
    import phalanx
    from phalanx.frameworks.torch.adapter import Torch

    update, found = Torch.update, {"audit": 0, "verify": 0}
    for seed in range(SEEDS):
        job = faulty(seed, os.devnull, 1 << 40, 0, 40)

        def flipped(framework, at, gradient, buffers, seed=seed):
            update(framework, at, gradient, buffers)
            if at == 10 + seed:
                snapshots = framework.snapshots
                weight = snapshots.model.body[0].weight
                state = snapshots.updates.optimizers[0].state[weight]["exp_avg"] if kind == "state" else weight.data
                state.view(-1)[state.abs().argmax()].view(torch.int32).bitwise_xor_(1 << 12)

        with tempfile.TemporaryDirectory() as folder:
            Torch.update = flipped
            try:
                result = job.train(engine="inline", run_dir=folder, progress=False, audit=1.0, chain=10)
            finally:
                Torch.update = update
            found["audit"] += any(incident.kind == "corruption" for incident in result.incidents)
            found["verify"] += phalanx.verify(job, folder, progress=False).status == 1
    return [f"{found['audit']} of {SEEDS}", f"{found['verify']} of {SEEDS}"]


def faults() -> str:
    """The tables of faults."""
    rows = []
    cases = [("a worker that computes wrong gradients from step ~7 on", 1 << 30), ("one wrong gradient", 1)]
    with tqdm.tqdm(total=len(cases) * len(RATES) + 2, unit="campaign") as bar:
        for name, times in cases:
            for rate in RATES:
                rows.append([name, f"{rate:g}", *campaign(times, rate)])
                bar.update()
        first = step.markdown(["fault", "audit", f"found in {STEPS} steps", "median step", "right worker"], rows)
        rows = []
        for name, kind in (("a weight between two steps", "weight"), ("Adam's first moment", "state")):
            rows.append([name, *written(kind)])
            bar.update()
    second = step.markdown(["a bit flips in", "found by audit=1", "found by phalanx verify"], rows)
    return f"{first}\n\n{second}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", action="store_true", help="plant faults, instead of timing")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/proof*.md")
    arguments = parser.parse_args()
    table = faults() if arguments.faults else costs()
    title = "Faults that are found" if arguments.faults else "The cost of proofs"
    about = (
        "R = 4, three workers; a bit in the mantissa of a gradient's largest element."
        if arguments.faults
        else f"{WORKERS} workers, R = {REPLICAS}."
    )
    report = f"# {title}\n\n{step.circumstances('proof.py')}\n\n{about}\n\n{table}\n"
    print(report)
    if arguments.save:
        (step.RESULTS / ("proof_faults.md" if arguments.faults else "proof.md")).write_text(report)


if __name__ == "__main__":
    main()
