"""Bits on a device: phalanx beside loops by hand, several workers, and what happens to runs. Ten minutes.

    python benchmarks/gpu/bits.py                    # all of it; the same call goes on where the time was over
    python benchmarks/gpu/bits.py plain runs         # some parts
    CAMPAIGN_DEVICE=cpu python benchmarks/gpu/bits.py

plain: R = 1 beside the plain loop. folded: R > 1 beside the folded loop. nccl: one worker in a process of its own, so
that NCCL has one rank. spread: several workers, on a device each or on one together. world: two processes of torchrun.
runs: resumed, killed, refused, evaluated, verified. compiled: torch.compile.
"""

import collections
import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator

import common
import faults
import loops
import recipes
from common import Case, Outcome

import phalanx

COMPILING = 280.0  # seconds of a case


def beside(recipe: phalanx.Recipe) -> Outcome:
    """A run in this process beside the loop by hand."""
    return loops.compared(loops.hand(recipe), loops.answer(recipe))


def plain() -> Iterator[Case]:
    found = {name: family.recipe(1) for name, family in recipes.FAMILIES.items()}
    found |= {name: dataclasses.replace(recipe, replicas=1) for name, recipe in recipes.LARGE.items()}
    for name, recipe in found.items():
        yield Case("plain", name, functools.partial(beside, recipe))


def folded() -> Iterator[Case]:
    for name, recipe in recipes.folded().items():
        yield Case("folded", name, functools.partial(beside, recipe))


def several(recipe: phalanx.Recipe, workers: int) -> Outcome:
    """Workers beside the loop by hand; those that share a device exchange over Gloo."""
    return loops.compared(loops.hand(recipe), loops.answer(recipe, workers))


def spread() -> Iterator[Case]:
    """Each recipe with 2 workers and with as many as there are devices; one with any number."""
    count = common.device_count()
    for name, recipe in recipes.spread().items():
        assert isinstance(recipe.replicas, int)
        for workers in sorted({2, max(2, min(count, recipe.replicas))}):
            yield Case("spread", f"{name}, {workers} workers", functools.partial(several, recipe, workers))
    any_number = dataclasses.replace(recipes.CONV, replicas=8)
    for workers in range(3, max(3, min(count, 8)) + 1):
        yield Case("spread", f"conv, R=8, {workers} workers", functools.partial(several, any_number, workers))


def nccl() -> Iterator[Case]:
    """One worker, in a process of its own, with a communicator of one: NCCL is made, sent over, waited for and left."""
    for name, recipe in recipes.spread().items():
        yield Case("nccl", f"{name}, 1 worker", functools.partial(several, recipe, 0))


def world() -> Iterator[Case]:
    for replicas in (2,) if common.SMALL else (3, 8):
        yield Case("world", f"torchrun, 2 processes, R={replicas}", functools.partial(faults.world, replicas))


def compiled() -> Iterator[Case]:
    """Each recipe alone; the first one also with two workers, which compile by themselves."""
    made = recipes.recipe(functools.partial(recipes.dense, True), recipes.IMAGES)
    attending = recipes.recipe(functools.partial(recipes.gpt, True), recipes.TEXTS, recipes.TOKEN_LOSS)
    found = {"dense": made} if common.SMALL else {"dense": made, "GPT": attending}
    for name, recipe in found.items():
        for replicas in (1,) if common.SMALL else (1, 4):
            one = dataclasses.replace(recipe, replicas=replicas)
            yield Case("compiled", f"{name}, R={replicas}", functools.partial(compiling, one), COMPILING)
    both = dataclasses.replace(made, replicas=2)
    yield Case("compiled", "dense, 2 workers", functools.partial(compiling, both, 2), COMPILING)


def compiling(recipe: phalanx.Recipe, workers: int = 1) -> Outcome:
    """torch.compile beside the loop by hand, where a compiler is there."""
    if reason := uncompiled():
        return Outcome("not tried", reason)
    return several(recipe, workers)


def uncompiled() -> str:
    """What torch.compile lacks here, in words; else empty."""
    if not any(map(shutil.which, ("g++", "c++", "gcc", "cc", "clang"))):
        return "there is no C compiler"
    if common.DEVICE.type == "cuda" and not importlib.util.find_spec("triton"):
        return "there is no Triton"
    return ""


PARTS = {
    "plain": plain, "runs": lambda: iter(faults.cases()), "folded": folded, "nccl": nccl, "spread": spread,
    "world": world, "compiled": compiled,
}  # fmt: skip


def report(rows: common.Rows) -> str:
    """How many cases of each part came out how; those that are not the same, and what runs said."""
    counts = collections.defaultdict(collections.Counter)
    for row in rows.rows:
        counts[row["part"]][row["verdict"]] += 1
    verdicts = ["same", "different", "failed", "not tried"]
    lines = [[part, *(count[verdict] or "" for verdict in verdicts)] for part, count in counts.items()]
    told = [row for row in rows.rows if row["note"]]
    notes = [[row["part"], row["case"], row["verdict"], row["note"]] for row in told]
    parts = [common.heading(rows, "Bits"), common.table(["part", *verdicts], lines)]
    return "\n\n".join([*parts, common.table(["part", "case", "", "what was said"], notes)])


def here(name: str, *given: str) -> None:
    """What has to be done in a process of its own."""
    found = faults.out_of_range_here()._asdict() if name == "out_of_range" else faults.world_here(int(*given))
    if found is not None:
        print(json.dumps(found), flush=True)
    if name == "out_of_range":
        os._exit(0)  # what ends in order would meet the device that failed


def main() -> int:
    given = common.arguments(__doc__ or "", list(PARTS)).parse_args()
    if given.apart:
        here(*given.apart)
        return 0
    rows = common.Rows("bits", again=given.again, wrong=given.wrong)
    cases = [case for part in given.parts or PARTS for case in PARTS[part]()]
    left = common.run(rows, cases, given.minutes)
    text = report(rows)
    common.save("gpu", "bits", text, given.save)
    return common.finish(rows, left, text)


if __name__ == "__main__":
    sys.exit(main())
