"""Compares two checkouts bit by bit: digests of all families of the tests, and those that the examples print.

    git worktree add /tmp/before HEAD~20
    python benchmarks/golden.py /tmp/before

Run before and after a change that should not change the answer. Digests depend on the processor, so none are kept:
both checkouts are asked here and now. Each family (models, optimizers, schedulers, forms of data; torch and jax) is
trained inline and with two workers.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

HERE = pathlib.Path(__file__).resolve().parent.parent
DIGEST = re.compile(r"\b[0-9a-f]{64}\b")


def recipes():
    """Every recipe by name."""
    from tests import families
    from tests.jax import families as jax_families

    for name, family in families.FAMILIES.items():
        for replicas in family.replicas:
            yield f"torch {name} R={replicas}", family.recipe(replicas)
    mlp = families.FAMILIES["mlp"]
    optimizers = {**families.OPTIMIZERS, "muon_and_adamw": families.muon_and_adamw}
    for kind, options in (("optimizer", optimizers), ("scheduler", families.SCHEDULERS)):
        for name, option in options.items():
            yield f"torch mlp {kind} {name}", mlp.recipe(3, **{kind: option})
    yield "torch mlp clipped", mlp.recipe(3, max_norm=0.1)
    for name, changes in families.DATA.items():
        yield f"torch mlp data {name}", mlp.recipe(3, **changes)
    for name, family in jax_families.FAMILIES.items():
        yield f"jax {name}", family.recipe(3)
    for name, make in jax_families.OPTIMIZERS.items():
        yield f"jax mlp optimizer {name}", jax_families.FAMILIES["mlp"].recipe(3, optimizer=make())


def tell() -> None:
    """Print the digest of every recipe and engine, one JSON line each."""
    import phalanx

    warnings.simplefilter("ignore")
    for name, recipe in recipes():
        for engine, workers in (("inline", 1), ("processes", 2)):
            try:
                answer = recipe.train(engine=engine, workers=workers, progress=False).digest
            except phalanx.PhalanxError as error:
                answer = f"{type(error).__name__}: {error}"
            print(json.dumps([f"{name} {engine}", answer]), flush=True)


def answers(tree: pathlib.Path) -> dict[str, str]:
    """What one checkout answers: digests of families, and those that its examples print."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(HERE)]), "OMP_NUM_THREADS": "1"}
    environment["MPLBACKEND"] = "agg"
    told: dict[str, str] = {}
    command = [sys.executable, __file__, "--tell"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            name, answer = json.loads(line)
            told[name] = answer
            print(f"\r{tree}: {len(told)} recipes", end="", file=sys.stderr, flush=True)
    if process.returncode:
        raise SystemExit(f"{tree}: ended with {process.returncode}")
    for path in sorted((HERE / "examples").glob("*.py")):
        print(f"\r{tree}: {path.name:30}", end="", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, str(path)], capture_output=True, text=True, env=environment, cwd=folder, timeout=600
            )
        told[path.name] = " ".join(DIGEST.findall(done.stdout)) or f"no digest, status {done.returncode}"
    print(file=sys.stderr)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=pathlib.Path, nargs="?", help="the root of another checkout")
    parser.add_argument("--tell", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tell:
        tell()
        return
    here, there = answers(HERE), answers(arguments.other.resolve())
    differing = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    for name in differing:
        print(f"{name}: {here.get(name)} here, {there.get(name)} there")
    print(f"{len(here)} answers, {len(differing)} differ; {len(set(here.values()))} are distinct")
    raise SystemExit(bool(differing))


if __name__ == "__main__":
    main()
