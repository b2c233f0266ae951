"""Times steps of two checkouts, this one and another, interleaved, so that a change that slows them down is seen.

    git worktree add /tmp/before HEAD~20
    python benchmarks/against.py /tmp/before --rounds 5

Each round starts a fresh process per column and checkout in turn. The ratio is this checkout's time over the other's:
the median over the rounds of the ratio within each. Below 1 is faster.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys

import tqdm

HERE = pathlib.Path(__file__).parent.parent
MODELS = ("tiny", "lenet", "mlp", "gpt")
COLUMNS = ("R=1", "R=8", "W=2", "W=4")


def seconds(tree: pathlib.Path, model: str, column: str) -> float:
    """A step's time in one checkout, in a fresh process."""
    command = [sys.executable, str(tree / "benchmarks" / "step.py"), "--model", model, "--column", column]
    places = [str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    if done.returncode:
        raise SystemExit(f"{tree}, {model}, {column} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=pathlib.Path, help="the root of another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; may be given again")
    arguments = parser.parse_args()
    cases = list(itertools.product(arguments.model or MODELS, COLUMNS))
    times: dict = {case: [] for case in cases}
    with tqdm.tqdm(total=arguments.rounds * len(cases)) as bar:
        for number in range(arguments.rounds):
            for case in cases:
                bar.set_description(", ".join(case))
                pair = [HERE, arguments.other.resolve()][:: 1 if number % 2 else -1]
                found = {tree: seconds(tree, *case) for tree in pair}
                times[case].append((found[HERE], found[arguments.other.resolve()]))
                one, other = times[case][-1]
                bar.write(f"{', '.join(case)}: {one * 1e3:.3g} ms here, {other * 1e3:.3g} there: {one / other:.3f}")
                bar.update()
    print("| model | column | here, ms | there, ms | here / there | rounds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (model, column), pairs in times.items():
        here, there = (statistics.median(pair[side] for pair in pairs) * 1e3 for side in (0, 1))
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"| {model} | {column} | {here:.3g} | {there:.3g} | {ratio:.3f} | {len(pairs)} |")


if __name__ == "__main__":
    main()
