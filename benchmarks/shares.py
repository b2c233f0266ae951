"""R replicas beside R shares by hand and the plain loop, taking turns in one process: what phalanx itself costs.

    python benchmarks/shares.py
    python benchmarks/shares.py --model LSTM --replicas 4 --seconds 20

Processor time of a step, medians. price.py has a fresh process for each column, as users have; here all have the same
memory, kept while a run is open, so that a difference of some percent can be seen.
"""

import argparse
import itertools
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import models
import peers
import torch

MODELS = ("tiny", "LSTM", "minGPT", "BERT", "VAE", "ViT", "mlp")
AT_ONCE = 5  # steps, before it is another's turn


def compare(name: str, replicas: int, seconds: float) -> str:
    """A row for one model."""
    import phalanx

    case = models.case(name)
    batches = list(zip(case.x.split(case.batch_size), case.y.split(case.batch_size), strict=True))
    loops = [(iter(itertools.cycle(batches)), case.make_model()) for _ in range(2)]
    optimizers = [models.OPTIMIZER(model.parameters()) for _, model in loops]

    def plain() -> None:
        source, model = loops[0]
        peers.step(model, optimizers[0], case, *next(source))

    def by_hand() -> None:
        source, model = loops[1]
        x, y = next(source)
        for share in zip(x.tensor_split(replicas), y.tensor_split(replicas), strict=True):
            peers.loss_of(model, case, *share).div(replicas).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    recipe = phalanx.Recipe(
        case.make_model, (case.x, case.y), case.loss_fn, replicas=replicas, batch_size=case.batch_size, shuffle=False,
        steps=1_000_000, optimizer=models.OPTIMIZER, precision=case.precision,
    )  # fmt: skip
    with recipe.start(workers=1, engine="inline", progress=False) as run:
        turns = {"plain": plain, "by hand": by_hand, "phalanx": lambda: next(run)}
        times: dict[str, list[float]] = {column: [] for column in turns}
        ended = time.monotonic() + seconds
        while time.monotonic() < ended or not times["phalanx"]:
            for column, do in turns.items():
                do()
                began = time.process_time()
                for _ in range(AT_ONCE):
                    do()
                times[column].append(time.process_time() - began)
    middle = {column: statistics.median(found) for column, found in times.items()}
    over = statistics.median(ours / theirs for ours, theirs in zip(times["phalanx"], times["by hand"], strict=True))
    cells = [f"{middle['plain'] / AT_ONCE * 1e3:.2f}", *(f"{middle[c] / middle['plain']:.2f}" for c in list(turns)[1:])]
    return " | ".join([name, *cells, f"{over:.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help=f"{', '.join(MODELS)}; may be given several times")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8, help="for each model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count = arguments.replicas
    print(f"model | plain, ms | {count} shares by hand / plain | R={count} / plain | R={count} / by hand")
    for name in arguments.model or MODELS:
        print(compare(name, arguments.replicas, arguments.seconds), flush=True)


if __name__ == "__main__":
    main()
