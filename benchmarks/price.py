"""The price of replicas: a step of the plain loop beside steps with R = 1, 2, 4 and 8, on models as people train them.

    python benchmarks/price.py                        # all models, three rounds, 50 minutes
    python benchmarks/price.py --model VAE --rounds 1
    python benchmarks/price.py --quick                # one short round: does everything run?

Three questions. In one process with one thread, what does R cost? Processor time answers that. Where in a step is that?
On all cores, is the plain loop faster, or DistributedDataParallel? The clock answers these. Each column and round has a
fresh process, columns take turns, and samples are fresh in every step and the same for all columns.
"""

import argparse
import itertools
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import models
import peers
import step
import torch
import tqdm
from real_models import REAL

SHARES = 8
REPLICAS = (1, 2, 4, 8)
ALONE = ("plain", "by hand", *(f"R={count}" for count in REPLICAS))
TOGETHER = ("plain all cores", "DDP W=2", "R=2 W=2", "R=4 W=2")
COMPUTING = "compute W=2"
COLUMNS = (*ALONE, *TOGETHER, COMPUTING, "copy")
ALL = (*REAL, *models.CASES)
ASKED = {  # what R = 8 is to cost at most
    "BERT": 1.7, "resnet18": 2.2, "mobilenet, bf16": 2.5, "ViT": 1.6, "VAE": 2.4, "LSTM": 2.2, "minGPT": 2.0,
    "mlp": 3.0, "lenet": 1.1, "gpt": 1.15, "tiny": 5.5,
}  # fmt: skip
METHOD = """Rounds: {rounds}; a fresh process per column and round, columns in turn, medians of each round's ratio, warm
steps left out. The plain loop and DDP: what one writes by hand, same model, data and optimizer (fused AdamW)."""
PRICE = """One process, one thread, processor time of a step over that of the plain loop. `8 shares by hand` is the loop
that adds up the gradients of 8 shares in `.grad`: what cutting a batch into 8 costs without phalanx. Where R=8 is not
above it, what is left is the price of small shares in torch itself."""
SPEED = """All cores, the clock. `plain` uses all cores for each operation; DDP and phalanx have two workers of one
thread. Above 1, phalanx is faster. R=4 is what a recipe has where nothing is said. The limit of R=2, W=2 is computing
(two processes at once, forward and backward of half a batch each, nothing else) plus traffic (each gradient read once,
weights and AdamW's two states read and written once, at the bandwidth of copying 256 MiB with all cores). Where
`plain / limit` is below 1, two shares of half a batch cost more than the whole step of the plain loop."""


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


def recipe_of(case: models.Case, replicas: int, steps: int):
    import phalanx

    return phalanx.Recipe(
        case.make_model, (case.x, case.y), case.loss_fn, replicas=replicas, batch_size=case.batch_size, shuffle=False,
        steps=steps, optimizer=models.OPTIMIZER, precision=case.precision,
    )  # fmt: skip


def ours(case: models.Case, replicas: int) -> float:
    """The same for a recipe, inline."""
    with recipe_of(case, replicas, case.warm_up + case.steps).start(workers=1, engine="inline", progress=False) as run:
        for _ in itertools.islice(run, case.warm_up):
            pass
        began = time.process_time()
        run.finish()
        return (time.process_time() - began) / case.steps


def measure(column: str, case: models.Case) -> dict:
    """Seconds a step of one column, in this process."""
    if column in ALONE:
        torch.set_num_threads(1)
        by_hand = {"plain": plain, "by hand": accumulated}.get(column)
        return {"seconds": by_hand(case) if by_hand else ours(case, int(column[2:]))}
    return step.measure(column, case)


def compare(model: str, rounds: int, bar: tqdm.tqdm, *, quick: bool) -> step.Facts:
    """Facts per column and round, rounds interleaved."""
    facts: step.Facts = {column: [] for column in COLUMNS}
    for number in range(rounds):
        for column in facts if number % 2 == 0 else reversed(facts):
            bar.set_description(f"{model}, {column}")
            facts[column].append(step.measured_apart(column, model, quick=quick, script=__file__))
            bar.update()
    return facts


def price_table(measured: dict[str, step.Facts]) -> str:
    """Prices, with what they were asked to be."""
    rows = []
    for model, facts in measured.items():
        case = models.case(model)
        size = sum(parameter.numel() for parameter in case.make_model().parameters())
        cells = [f"{model}, {case.batch_size}", f"{size:,}", step.spelled(step.milliseconds(facts, "plain"))]
        cells += [f"{step.ratio(facts, f'R={count}', 'plain'):.2f}" for count in REPLICAS]
        rows.append([*cells, f"{step.ratio(facts, 'by hand', 'plain'):.2f}", str(ASKED.get(model, ""))])
    header = ["model, batch", "parameters", "plain, ms", *(f"R={count}" for count in REPLICAS)]
    return step.markdown([*header, "8 shares by hand", "R=8 at most"], rows)


def speed_table(measured: dict[str, step.Facts]) -> str:
    """The plain loop on all cores, and DDP, over phalanx with two workers."""
    rows = []
    for model, facts in measured.items():
        cells = [step.spelled(step.milliseconds(facts, column)) for column in TOGETHER]
        ratios = [(peer, ours) for ours in ("R=2 W=2", "R=4 W=2") for peer in ("plain all cores", "DDP W=2")]
        shares = [f"**{step.ratio(facts, *pair):.2f}**" for pair in ratios]
        limited = {**facts, "limit": limits(model, facts)}
        shares += [f"{step.ratio(limited, column, 'limit'):.2f}" for column in ("plain all cores", "R=2 W=2")]
        rows.append([model, *cells, *shares])
    header = ["model", *(f"{column}, ms" for column in TOGETHER)]
    header += ["plain / R=2", "DDP / R=2", "plain / R=4", "DDP / R=4", "plain / limit", "R=2 W=2 / limit"]
    return step.markdown(header, rows)


def limits(model: str, facts: step.Facts) -> list[dict]:
    """Seconds of computing and traffic in a step of two workers, in each round: about what it takes at least."""
    size = step.traffic_bytes(model, gradients=2)
    rounds = zip(facts[COMPUTING], facts["copy"], strict=True)
    return [{"seconds": computing["seconds"] + size / copy["bytes_per_second"]} for computing, copy in rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help=f"one of {', '.join(ALL)}; may be given several times")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of a tenth of the steps: does everything run?")
    parser.add_argument("--column", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/price.*")
    arguments = parser.parse_args()
    if arguments.column:
        case = models.case(arguments.model[0])
        print(json.dumps(measure(arguments.column, case.shortened() if arguments.quick else case)))
        return
    chosen, rounds = arguments.model or ALL, 1 if arguments.quick else arguments.rounds
    with tqdm.tqdm(total=len(chosen) * rounds * len(COLUMNS), unit="process") as bar:
        measured = {model: compare(model, rounds, bar, quick=arguments.quick) for model in chosen}
    parts = [f"# The price of R\n\n{step.circumstances('price.py')}\n\n{METHOD.format(rounds=rounds)}"]
    parts += [f"## In one process\n\n{PRICE}\n\n{price_table(measured)}"]
    parts += [f"## On all cores\n\n{SPEED}\n\n{speed_table(measured)}"]
    report = "\n\n".join(parts) + "\n"
    print(report)
    if arguments.save:
        step.save("price", report, measured)


if __name__ == "__main__":
    main()
