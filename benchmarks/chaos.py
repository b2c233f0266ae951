"""A campaign with a witness: many short runs of every recipe are struck, and each must end in its quiet digest.

    python benchmarks/chaos.py --kills 2000 --minutes 40 --faults 60 --save     # the whole campaign
    python benchmarks/chaos.py --minutes 5                                      # as long as `make chaos`
    python benchmarks/chaos.py --kills 100000 --minutes 600 --progress out/night.jsonl

The nemesis kills, the run trains, the checker compares digests and losses and looks for what was left behind. A kill
counts once it hit a living worker; the table says how many deaths the runs noticed, too. `--faults` strikes whole hosts
after that, as `phalanx chaos --hosts 3` does. Seeds are printed; `--seed` repeats a campaign.
"""

import argparse
import collections
import contextlib
import itertools
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import step
import torch
import tqdm

import phalanx
from phalanx.lab import chaos, falls
from tests.exactness.test_phases import recipe as with_phases
from tests.families import ADAMW, FAMILIES

JOB = pathlib.Path(__file__).parent.parent / "tests" / "hosts" / "campaign_job.py"
STEPS = 120
REPLICAS = 4
WORKERS = (1, 2, 3, 4)
KILLS_A_RUN = 25
COSINE = torch.optim.lr_scheduler.CosineAnnealingLR


def recipes() -> dict:
    """Name to recipe: all families of torch, some with more, phases, a stream, and jax (tinygrad has no workers)."""
    found = {name: family.recipe(REPLICAS, steps=STEPS) for name, family in FAMILIES.items()}
    for name in ("mlp", "conv_norm"):
        found[f"{name}, AdamW, clipped, scheduled"] = FAMILIES[name].recipe(
            REPLICAS, steps=STEPS, optimizer=ADAMW, max_norm=0.5, scheduler=lambda optimizer: COSINE(optimizer, STEPS)
        )
    found["gan, phases"] = with_phases("gan", REPLICAS, steps=STEPS, batch_size=22)
    columns = FAMILIES["conv_norm"].data
    stream = phalanx.Stream(lambda: zip(*columns, strict=True))
    found["conv_norm, stream"] = found["conv_norm"].replace(data=stream)
    with contextlib.suppress(ImportError):
        from tests.jax.families import FAMILIES as OF_JAX

        found |= {f"{name}, jax": OF_JAX[name].recipe(REPLICAS, steps=STEPS) for name in ("mlp", "lenet", "dropout")}
    return found


def hunt(kills: int, minutes: float, seed: int, progress: str) -> dict[str, list[chaos.Trial]]:
    """Trials by recipe, until so many workers were killed or the time is over."""
    hunted = recipes()
    quiet = {name: recipe.train(engine="inline", progress=False) for name, recipe in hunted.items()}
    trials: dict[str, list[chaos.Trial]] = {name: [] for name in hunted}
    end = time.monotonic() + 60 * minutes
    done = 0
    with tqdm.tqdm(total=kills, unit="kill", dynamic_ncols=True) as bar:
        for number, (workers, name) in enumerate(itertools.cycle(itertools.product(WORKERS, hunted))):
            if done >= kills or time.monotonic() > end:
                return trials
            one = chaos.trial(hunted[name], quiet[name], min(KILLS_A_RUN, kills - done), seed + number, workers)
            trials[name].append(one)
            done += one.kills
            bar.set_postfix(wrong=sum(not trial.right for all_ in trials.values() for trial in all_))
            bar.update(one.kills)
            if progress:
                with open(progress, "a") as file:
                    file.write(json.dumps([name, *facts(one)]) + "\n")
            if not one.right or one.problem:
                bar.write(f"{name}, W={workers}, seed {one.seed}: {one.problem or 'WRONG DIGEST'}")
    return trials


def text(trials: dict[str, list[chaos.Trial]], seed: int, seconds: float) -> str:
    """The report."""
    everything = [one for all_ in trials.values() for one in all_]
    pauses = [pause for one in everything for pause in one.pauses]
    kinds = collections.Counter(incident.kind for one in everything for incident in one.incidents)
    rows = [
        [
            name, str(len(all_)), str(sum(one.kills for one in all_)),
            str(sum(each.kind == "death" for one in all_ for each in one.incidents)),
            str(sum(not one.right for one in all_)),
            str(sum(bool(one.problem) for one in all_)),
        ]
        for name, all_ in trials.items()
    ]  # fmt: skip
    total = [str(sum(int(row[column]) for row in rows)) for column in range(1, 6)]
    table = step.markdown(
        ["recipe", "runs", "SIGKILLs", "deaths noticed", "wrong digests", "other problems"],
        [*rows, ["**all**", *total]],
    )
    return f"""# Chaos

{step.circumstances("chaos.py")}

Runs of {STEPS} steps with {REPLICAS} replicas on {", ".join(map(str, WORKERS))} workers, which are killed at random;
each run must end in the digest and the losses of the undisturbed inline run, with nothing left behind. Seed {seed},
{seconds / 60:.1f} minutes, {kinds["death"]} deaths noticed, {kinds["rollback"]} of them in an update.

{table}

From a death that is noticed to a replacement that is ready: median {statistics.median(pauses) * 1e3:.0f} ms, 95 %
{sorted(pauses)[int(0.95 * len(pauses))] * 1e3:.0f} ms.
"""


def of_hosts(runs: list[falls.Campaign]) -> str:
    """The part of the report that is about hosts."""
    struck = collections.defaultdict(list)
    for fault in (fault for run in runs for fault in run.faults):
        struck[fault.what].append(fault.seconds)
    rows = [[what, str(len(seconds)), f"{statistics.median(seconds):.1f}"] for what, seconds in sorted(struck.items())]
    table = step.markdown(["fault", "struck and noticed", "median seconds until the others had done a step"], rows)
    problems = [run.problem for run in runs if run.problem]
    return f"""
## Hosts

Three hosts in network namespaces, {len(runs)} runs, {sum(len(run.faults) for run in runs)} faults. A host that is
silent for {falls.LOST_AFTER:g} s is lost. Hosts came back {sum(run.joined for run in runs)} times. Wrong digests:
{sum(not run.right for run in runs)}. Problems: {"; ".join(problems) or "none"}.

{table}
"""


def facts(one: chaos.Trial) -> list:
    return [one.seed, one.workers, one.kills, one.right, one.problem]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=0, help="then strike hosts so often")
    parser.add_argument("--progress", default="", help="add a line to this file for each run")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/chaos.*")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    began = time.monotonic()
    trials = hunt(arguments.kills, arguments.minutes, arguments.seed, arguments.progress)
    report = text(trials, arguments.seed, time.monotonic() - began)
    fallen = []
    if arguments.faults:
        job = {"file": str(JOB), "arguments": ["steps=400"], "workers": 3}
        recipe = FAMILIES["conv_norm"].recipe(REPLICAS, steps=400)
        fallen = falls.campaign(recipe, job, arguments.faults, arguments.seed, 3, tqdm.tqdm.write)
        report += of_hosts(fallen)
    print(report)
    everything = [one for all_ in trials.values() for one in all_]
    if arguments.save:
        told = {name: [facts(one) for one in all_] for name, all_ in trials.items()}
        step.save("chaos", report, told)
    if not all(one.right and not one.problem for one in (*everything, *fallen)):
        raise SystemExit("FAILED: see above")


if __name__ == "__main__":
    main()
