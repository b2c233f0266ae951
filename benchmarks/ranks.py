"""Workers with devices, on CPUs: the exchange over Gloo beside DistributedDataParallel over Gloo, and the arena.

    python benchmarks/ranks.py                    # ten minutes; --rounds 5, --models lenet gpt

Fresh processes in interleaved rounds, timed as in benchmarks/step.py. `P=2` is `devices=["cpu", "cpu"]`, `W=2` are two
workers over the arena. Says nothing of accelerators.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import step
import tqdm

COLUMNS = ("P=2", "DDP W=2", "W=2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["lenet", "gpt"])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    rows = []
    with tqdm.tqdm(total=len(given.models) * given.rounds * len(COLUMNS), unit="process") as bar:
        for model in given.models:
            facts: step.Facts = {column: [] for column in COLUMNS}
            for number in range(given.rounds):
                for column in COLUMNS if number % 2 == 0 else reversed(COLUMNS):
                    bar.set_description(f"{model}, {column}")
                    facts[column].append(step.measured_apart(column, model, quick=given.quick, script=step.__file__))
                    bar.update()
            assert {run["digest"] for run in facts["P=2"]} == {run["digest"] for run in facts["W=2"]}
            cells = [step.spelled(step.milliseconds(facts, column)) for column in COLUMNS]
            ratios = [f"{step.ratio(facts, other, 'P=2'):.2f}" for other in COLUMNS[1:]]
            rows.append([model, *cells, *ratios])
    print(step.markdown(["model", *(f"{column}, ms" for column in COLUMNS), "DDP / P=2", "W=2 / P=2"], rows))


if __name__ == "__main__":
    main()
