"""What proofs cost while nothing is wrong, and which planted faults an audit, a chain or a verification finds.

    python benchmarks/proof.py --save
    python benchmarks/proof.py --faults --save
    python benchmarks/proof.py --bytes --save

The cost of the chain is what its observer takes of a run's time; that of an audit is the ratio of runs that audit every
step and none, taken in turn, divided by 100 for ``audit=0.01``. A campaign of faults flips single bits.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(1, str(pathlib.Path(__file__).parent.parent))

import models
import step
import torch
import tqdm

from tests.proof import faults

MODELS = ("lenet", "mlp", "gpt")
REPLICAS, WORKERS = 8, 2
SECONDS = 8.0  # of a run whose chain is timed
AUDITED = 10  # steps of each run with audits and without
ROUNDS = 2
RATES = (0.01, 0.1, 1.0)
WRITTEN = 1000  # steps of a run whose files are measured
SEEDS, STEPS = 4, 150
COMPUTED = {"gradient": "a gradient", "batch": "a batch"}
REMEMBERED = {"fold": "the fold", "update": "updated weights", "state": "updated optimizer state",
              "weight in memory": "a weight, between steps", "state in memory": "optimizer state, between steps",
              "data in memory": "the data"}  # fmt: skip


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
    header = [
        "model", "step, ms", "a link, us", f"digests in {SECONDS:.0f} s", 'chain="auto"', "audit=1",
        "audit=0.01, reckoned",
    ]  # fmt: skip
    return step.markdown(header, rows)


class Net(torch.nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

    def forward(self, x):
        return self.body(x)


def small(seed: int, steps: int, make_model=Net):
    """A recipe over such a net."""
    import phalanx

    random = torch.Generator().manual_seed(seed)
    x, y = torch.randn(64, 8, generator=random), torch.randint(3, (64,), generator=random)
    return phalanx.Recipe(
        make_model, (x, y), torch.nn.functional.cross_entropy, replicas=4, batch_size=16, steps=steps, seed=seed
    )


def computed(kind: str, times: int, rate: float) -> list[str]:
    """How many runs in two workers found a fault of one of them, after how many steps, and named the right one."""
    import phalanx

    found, waited, involved, named = 0, [], 0, 0
    for seed in range(SEEDS):
        make_model, fault = faults.in_workers(Net, kind, tempfile.mktemp(), 20, times)
        job = small(seed, STEPS, make_model)
        with tempfile.TemporaryDirectory() as folder:
            options = {"workers": 2, "engine": "processes", "progress": False, "audit": rate, "run_dir": folder}
            with job.start(**options) as run:
                pids = run.worker_pids
                try:
                    run.finish()
                except phalanx.CorruptionError as error:
                    found += 1
                    waited.append(error.step)
                    involved += pids.index(fault.culprit) in error.workers
            told = phalanx.verify(job, folder, progress=False)
            named += told.status == 1 or f"worker {pids.index(fault.culprit)} had the wrong one" in told.text
    ends = f"{statistics.median(waited):.0f}" if waited else ""
    return [f"{found} of {SEEDS}", ends, f"{involved} of {found}" if found else "", f"{named} of {SEEDS}"]


def remembered(kind: str) -> list[str]:
    """Single bits that flip in memory that all workers share: what audits of every step and verification find."""
    import phalanx

    found = {"audit": 0, "verify": 0}
    for seed in range(SEEDS):
        make_model, job = Net, small(seed, 40)
        if kind == "data in memory":
            spoiled = small(seed, 40)
            memory = spoiled.data[0].numpy().reshape(-1).view("int32")  # torch would notice its own functions
            note = [
                lambda report, memory=memory: (
                    memory.__setitem__(3, memory[3] ^ (1 << 14)) if report.step == 10 else None
                )
            ]
            options = {"engine": "inline", "callbacks": note}
        else:
            make_model, _ = faults.in_workers(Net, kind, tempfile.mktemp(), 10 + seed)
            spoiled, options = small(seed, 40, make_model), {"engine": "processes", "workers": 2}
        with tempfile.TemporaryDirectory() as folder:
            try:
                spoiled.train(run_dir=folder, progress=False, audit=1.0, chain=10, **options)
            except phalanx.CorruptionError:
                found["audit"] += 1
            known = job if kind == "data in memory" else spoiled  # faults are planted in workers only
            found["verify"] += phalanx.verify(known, folder, progress=False).status == 1
    return [f"{found['audit']} of {SEEDS}", f"{found['verify']} of {SEEDS}"]


def kept() -> list[str]:
    """Single bits that flip in the snapshot in memory, which is then needed: the run ends, rather than going on."""
    import phalanx

    found = 0
    for seed in range(SEEDS):
        dying, _ = faults.in_workers(Net, "death", tempfile.mktemp(), 12)
        make_model, _ = faults.in_workers(dying, "snapshot", tempfile.mktemp(), 0, 1 << 30)
        try:
            small(seed, 40, make_model).train(workers=2, engine="processes", progress=False)
        except phalanx.RunError as error:
            found += "the snapshot in memory is damaged" in str(error)
    return ["its checksum, when it is needed: " + f"{found} of {SEEDS}", ""]


def written() -> str:
    """The table of bytes that a step adds to the files of its run, by the number of replicas."""
    rows = []
    for replicas in (1, 2, 4, 8, 16):
        with tempfile.TemporaryDirectory() as folder:
            small(0, WRITTEN).replace(replicas=replicas).train(run_dir=folder, engine="inline", progress=False)
            sizes = [(pathlib.Path(folder) / name).stat().st_size / WRITTEN for name in ("chain.jsonl", "events.jsonl")]
        rows.append([str(replicas), *(f"{size:.0f}" for size in (*sizes, sum(sizes)))])
    return step.markdown(["R", "chain.jsonl", "events.jsonl", "both"], rows)


def found_faults() -> str:
    """The tables of faults."""
    rows = []
    with tqdm.tqdm(total=len(COMPUTED) * 2 * len(RATES) + 4, unit="campaign") as bar:
        for kind, named in COMPUTED.items():
            for times, often in ((1 << 30, "from then on"), (1, "once")):
                for rate in RATES:
                    rows.append([f"{named}, {often}", f"{rate:g}", *computed(kind, times, rate)])
                    bar.update()
        head = [
            "wrong in one worker",
            "audit",
            f"found in {STEPS} steps",
            "median step",
            "names that worker",
            "found by phalanx verify",
        ]
        first = step.markdown(head, rows)
        rows = []
        for kind, named in REMEMBERED.items():
            rows.append([named, *remembered(kind)])
            bar.update()
        rows.append(["the snapshot in memory", *kept()])
        bar.update()
    second = step.markdown(["a bit flips in", "found by audit=1", "found by phalanx verify"], rows)
    return f"{first}\n\n{second}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", action="store_true", help="plant faults, instead of timing")
    parser.add_argument("--bytes", action="store_true", help="measure what a step adds to its run's files, instead")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/proof*.md")
    arguments = parser.parse_args()
    faults = (
        "R = 4, two workers, four parameters; bit 14 of the largest element flips, for the first time in about step 10 "
        "(gradients, batches) or 20 (folds, updates)."
    )
    name, title, about, table = "proof.md", "The cost of proofs", f"{WORKERS} workers, R = {REPLICAS}.", costs
    if arguments.faults:
        name, title, about, table = "proof_faults.md", "Faults that are found", faults, found_faults
    elif arguments.bytes:
        name, title, table = "proof_bytes.md", "Bytes that a step adds to its run_dir", written
        about = f"Means over {WRITTEN:,} steps of one loss, without evaluations."
    report = f"# {title}\n\n{step.circumstances('proof.py')}\n\n{about}\n\n{table()}\n"
    print(report)
    if arguments.save:
        (step.RESULTS / name).write_text(report)


if __name__ == "__main__":
    main()
