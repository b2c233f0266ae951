"""The price of replicas: processor time of a step in one process with one thread, over that of the plain loop.

    python benchmarks/price.py                        # all models
    python benchmarks/price.py --model VAE --rounds 3
    python benchmarks/price.py --quick                # one short round: does everything run?

Each model has a process of its own, in which the plain loop and recipes with R = 1, 2, 4 and 8 take turns. Processor
time is taken, not the clock's: it says what R costs, whatever else the machine does. Samples are fresh in every step
and the same for all columns.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import models
import peers
import step
import torch
import tqdm
from real_models import REAL

REPLICAS = (1, 2, 4, 8)
SHARES = 8
ALL = (*REAL, *models.CASES)
ASKED = {  # what R = 8 is to cost at most
    "BERT": 1.7, "resnet18": 2.2, "mobilenet, bf16": 2.5, "ViT": 1.6, "VAE": 2.4, "LSTM": 2.2, "minGPT": 2.0,
    "mlp": 3.0, "lenet": 1.1, "gpt": 1.15, "tiny": 5.5,
}  # fmt: skip
METHOD = """Rounds: {rounds}, in each of which the columns take turns in one process with one thread; processor time of
the steps after warm ones, medians of each round's ratio. `plain`: the loop that one writes by hand, same model, data,
optimizer (fused AdamW)."""


def plain(case: models.Case) -> float:
    """Seconds of processor time that a step of the plain loop takes."""
    torch.manual_seed(0)
    model = case.make_model()
    optimizer = models.OPTIMIZER(model.parameters())
    batches = zip(case.x.split(case.batch_size), case.y.split(case.batch_size), strict=True)
    for x, y in itertools.islice(batches, case.warm_up):
        peers.step(model, optimizer, case, x, y)
    began = time.process_time()
    for x, y in itertools.islice(batches, case.steps):
        peers.step(model, optimizer, case, x, y)
    return (time.process_time() - began) / case.steps


def accumulated(case: models.Case) -> float:
    """The same for a loop that adds up gradients of 8 shares in ``.grad``, as people do by hand: what shares cost."""
    torch.manual_seed(0)
    model = case.make_model()
    optimizer = models.OPTIMIZER(model.parameters())
    batches = zip(case.x.split(case.batch_size), case.y.split(case.batch_size), strict=True)

    def do(x, y):
        for share in zip(x.tensor_split(SHARES), y.tensor_split(SHARES), strict=True):
            peers.loss_of(model, case, *share).div(SHARES).backward()
        optimizer.step()
        optimizer.zero_grad()

    for x, y in itertools.islice(batches, case.warm_up):
        do(x, y)
    began = time.process_time()
    for x, y in itertools.islice(batches, case.steps):
        do(x, y)
    return (time.process_time() - began) / case.steps


def ours(case: models.Case, replicas: int) -> float:
    """The same for a recipe, inline."""
    import phalanx

    recipe = phalanx.Recipe(
        case.make_model, (case.x, case.y), case.loss_fn, replicas=replicas, batch_size=case.batch_size, shuffle=False,
        steps=case.warm_up + case.steps, optimizer=models.OPTIMIZER, precision=case.precision,
    )  # fmt: skip
    with recipe.start(workers=1, engine="inline", progress=False) as run:
        for _ in itertools.islice(run, case.warm_up):
            pass
        began = time.process_time()
        run.finish()
        return (time.process_time() - began) / case.steps


HAND = {"plain": plain, "by hand": accumulated}


def measure(case: models.Case, rounds: int) -> dict[str, list[float]]:
    """Seconds a step by column, a number for each round."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in (*HAND, *(f"R={count}" for count in REPLICAS))}
    for number in range(rounds):
        for name in found if number % 2 == 0 else reversed(found):
            found[name].append(HAND[name](case) if name in HAND else ours(case, int(name[2:])))
    return found


def apart(model: str, rounds: int, *, quick: bool) -> dict[str, list[float]]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--model", model, "--rounds", str(rounds), "--alone"]
    done = subprocess.run([*command, *(["--quick"] if quick else [])], capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{model} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def ratio(found: dict[str, list[float]], column: str) -> float:
    return statistics.median(one / other for one, other in zip(found[column], found["plain"], strict=True))


def table(measured: dict[str, dict[str, list[float]]]) -> str:
    """Prices, with what they were asked to be."""
    rows = []
    for model, found in measured.items():
        case = models.case(model)
        size = sum(parameter.numel() for parameter in case.make_model().parameters())
        cells = [f"{model}, {case.batch_size}", f"{size:,}", step.spelled(statistics.median(found["plain"]) * 1e3)]
        cells += [f"{ratio(found, f'R={count}'):.2f}" for count in REPLICAS]
        rows.append([*cells, f"{ratio(found, 'by hand'):.2f}", str(ASKED.get(model, ""))])
    header = [
        "model, batch",
        "parameters",
        "plain, ms",
        *(f"R={count}" for count in REPLICAS),
        "8 shares by hand",
        "R=8 at most",
    ]
    return step.markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help=f"one of {', '.join(ALL)}; may be given several times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a tenth of the steps: does everything run?")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/price.*")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    if arguments.alone:
        case = models.case(arguments.model[0])
        print(json.dumps(measure(case.shortened() if arguments.quick else case, rounds)))
        return
    bar = tqdm.tqdm(arguments.model or ALL, unit="model")
    measured = {model: apart(model, rounds, quick=arguments.quick) for model in bar}
    report = f"# The price of R\n\n{step.circumstances('price.py')}\n\n{METHOD.format(rounds=rounds)}\n\n"
    report += table(measured) + "\n"
    print(report)
    if arguments.save:
        step.save("price", report, measured)


if __name__ == "__main__":
    main()
