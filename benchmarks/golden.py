"""Compares two checkouts bit by bit: digests of all families of the tests, and those that the examples print.

    git worktree add /tmp/before HEAD~20
    python benchmarks/golden.py /tmp/before

Run before and after a change that should not change the answer. Digests depend on the processor, so both checkouts
are asked here and now. Each family (models, optimizers, schedulers, forms of data; torch and jax) is trained inline
and with two workers.

    python benchmarks/golden.py --keep out/pinned.json     # then install another torch, and
    python benchmarks/golden.py --before out/pinned.json   # which digests differ?

``--keep`` adds to a file: a column for each version of torch and class of processor. ``benchmarks/golden.json`` has
those that the project keeps.
"""

import argparse
import contextlib
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


def answer(recipe, engine: str, workers: int) -> str:
    """The digest of a recipe, or the error that it ended with."""
    import phalanx

    try:
        return recipe.train(engine=engine, workers=workers, progress=False).digest
    except phalanx.PhalanxError as error:
        return f"{type(error).__name__}: {error}"


def tell() -> None:
    """Print the digest of every recipe and engine, one JSON line each."""
    warnings.simplefilter("ignore")
    for name, recipe in recipes():
        for engine, workers in (("inline", 1), ("processes", 2)):
            print(json.dumps([f"{name} {engine}", answer(recipe, engine, workers)]), flush=True)


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


def surroundings() -> str:
    """The version of torch and the class of the processor: the name of a column."""
    import torch

    maker = "unknown"
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        maker = next(
            line.partition(":")[2].strip() for line in lines if line.startswith(("vendor_id", "CPU implementer"))
        )
    return f"torch {torch.__version__.partition('+')[0]}, {maker} {torch.backends.cpu.get_cpu_capability()}"


def families_alone() -> dict[str, str]:
    """The digests of all families here, inline, without the examples."""
    warnings.simplefilter("ignore")
    told: dict[str, str] = {}
    for name, recipe in recipes():
        told[name] = answer(recipe, "inline", 1)
        print(f"\r{len(told)} recipes", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return told


def keep(path: pathlib.Path) -> None:
    """Add the column of this torch and processor to a file, or write it anew."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[surroundings()] = families_alone()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def before(path: pathlib.Path) -> int:
    """Print which digests differ from those of a file, column by column of this class of processor; 1 if any does."""
    here, found, kept = surroundings(), families_alone(), json.loads(path.read_text())
    processor = here.partition(", ")[2]
    columns = {name: column for name, column in kept.items() if name.partition(", ")[2] == processor}
    if not columns:
        raise SystemExit(f"{path} has no digests of {processor}, only of {', '.join(kept)}")
    changed = 0
    for name, column in columns.items():
        common = column.keys() & found.keys()
        differing = sorted(recipe for recipe in common if column[recipe] != found[recipe])
        changed += len(differing)
        print(f"{name}, now {here}: {len(differing)} of {len(common)} recipes have other bits")
        print("".join(f"- {recipe}: {column[recipe][:12]}, now {found[recipe][:12]}\n" for recipe in differing), end="")
    return int(changed > 0)


def main() -> None:
    sys.path.insert(0, str(HERE))  # the tests
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=pathlib.Path, nargs="?", help="the root of another checkout")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FILE", help="add the digests of this torch to a file")
    parser.add_argument("--before", type=pathlib.Path, metavar="FILE", help="compare with the digests in a file")
    parser.add_argument("--tell", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tell:
        tell()
        return
    if arguments.keep is not None:
        keep(arguments.keep)
        return
    if arguments.before is not None:
        raise SystemExit(before(arguments.before))
    if arguments.other is None:
        parser.error("give the root of another checkout, --keep FILE or --before FILE")
    here, there = answers(HERE), answers(arguments.other.resolve())
    differing = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    for name in differing:
        print(f"{name}: {here.get(name)} here, {there.get(name)} there")
    print(f"{len(here)} answers, {len(differing)} differ; {len(set(here.values()))} are distinct")
    raise SystemExit(bool(differing))


if __name__ == "__main__":
    main()
