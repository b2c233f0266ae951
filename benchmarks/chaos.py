"""A campaign of random SIGKILLs: many short runs of several model families, each of which must end in its quiet digest.

    python benchmarks/chaos.py --kills 2000 --save     # the whole campaign
    python benchmarks/chaos.py --minutes 5             # as long as `make chaos`

The nemesis kills, the run trains, the checker compares digests and losses and looks for what was left behind. Seeds are
printed; `--seed` repeats a campaign.
"""

import argparse
import collections
import itertools
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import step
import torch
import tqdm

from phalanx.proof import chaos
from tests.families import ADAMW, FAMILIES

FAMILIES_HUNTED = ("mlp", "conv_norm", "transformer", "lstm", "tied", "two_groups", "embedding", "counting")
STEPS = 120
REPLICAS = 4
WORKERS = (1, 2, 3, 4)
KILLS_A_RUN = 25
COSINE = torch.optim.lr_scheduler.CosineAnnealingLR


def recipes() -> dict:
    """Name to recipe: the families as they are, and the first two with AdamW, clipping and a schedule."""
    found = {name: FAMILIES[name].recipe(REPLICAS, steps=STEPS) for name in FAMILIES_HUNTED}
    for name in FAMILIES_HUNTED[:2]:
        found[f"{name}, AdamW, clipped, scheduled"] = FAMILIES[name].recipe(
            REPLICAS, steps=STEPS, optimizer=ADAMW, max_norm=0.5, scheduler=lambda optimizer: COSINE(optimizer, STEPS)
        )
    return found


def hunt(kills: int, minutes: float, seed: int) -> dict[str, list[chaos.Trial]]:
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
            name, str(len(all_)), str(sum(one.kills for one in all_)), str(sum(not one.right for one in all_)),
            str(sum(bool(one.problem) for one in all_)),
        ]
        for name, all_ in trials.items()
    ]  # fmt: skip
    total = [str(sum(int(row[column]) for row in rows)) for column in range(1, 5)]
    table = step.markdown(
        ["recipe", "runs", "SIGKILLs", "wrong digests", "other problems"], [*rows, ["**all**", *total]]
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


def facts(one: chaos.Trial) -> list:
    return [one.seed, one.workers, one.kills, one.right, one.problem]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/chaos.*")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    began = time.monotonic()
    trials = hunt(arguments.kills, arguments.minutes, arguments.seed)
    report = text(trials, arguments.seed, time.monotonic() - began)
    print(report)
    everything = [one for all_ in trials.values() for one in all_]
    if arguments.save:
        facts = {
            name: [[t.seed, t.workers, t.kills, t.right, t.problem] for t in all_] for name, all_ in trials.items()
        }
        step.save("chaos", report, facts)
    if not all(one.right and not one.problem for one in everything):
        raise SystemExit("FAILED: see above")


if __name__ == "__main__":
    main()
