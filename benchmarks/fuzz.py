"""Changes files of a run at random, and reads them in every way: nothing but errors of phalanx's own and right answers.

    python benchmarks/fuzz.py --mutations 10000 --save       # of each kind of file
    python benchmarks/fuzz.py --kind chain --seed 17 --mutations 1     # plays one again

The kinds of files, what is changed in them and how they are read is in tests/state/fuzz.py. Each mutation has a seed of
its own, which is printed with whatever it finds. Time is that of the processor; memory is the highest that the process
came to, less what it had before.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import multiprocessing
import pathlib
import random
import signal
import sys
import tempfile
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "src")]

import step  # noqa: E402
import torch  # noqa: E402
import tqdm  # noqa: E402

from tests.state import fuzz  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "fuzz.md"
SECONDS, BYTES = 1.0, 100 << 20  # that one may take
HANGS = 60  # seconds after which one is a hang
AT_ONCE = 50  # mutations of one kind that a process is given
HEAD = ["file", "mutations", "wrong", "refused", "slowest, s", "most memory, MB"]


class HangError(Exception):
    """It took far too long."""


def hang(*_: Any) -> None:
    raise HangError(f"it took more than {HANGS} s")


def memory(*, highest: bool = False) -> int:
    """Bytes that this process has now, or the most since the last time that it was asked for what it has now."""
    if not highest:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    name = "VmHWM:" if highest else "VmRSS:"
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


class Part(NamedTuple):
    """What came of some mutations of one kind of file."""

    name: str
    done: int
    refused: int
    seconds: float
    bytes: int
    findings: list[tuple[int, str, str]]

    def and_then(self, other: Part) -> Part:
        """Both together."""
        worst = max(self.seconds, other.seconds), max(self.bytes, other.bytes)
        counts = self.done + other.done, self.refused + other.refused
        return Part(self.name, *counts, *worst, self.findings + other.findings)

    @property
    def row(self) -> list[str]:
        """Of the table."""
        figures = [f"{self.done:,}", len(self.findings), f"{self.refused:,}", f"{self.seconds:.2f}", self.bytes >> 20]
        return [self.name, *map(str, figures)]


def strike(setting: fuzz.Setting, place: pathlib.Path, name: str, seed: int) -> Part:
    """One mutation."""
    signal.alarm(HANGS)
    before, began = memory(), time.process_time()
    what, wrong = fuzz.strike(setting, place, name, random.Random(f"{name} {seed}"))
    seconds, more = time.process_time() - began, memory(highest=True) - before
    signal.alarm(0)
    refused = wrong is fuzz.REFUSED
    found = [f"{seconds:.1f} s"] * (seconds > SECONDS) + [f"{more >> 20} MB"] * (more > BYTES)
    found += [wrong] * bool(wrong and not refused)
    return Part(name, 1, refused, seconds, more, [(seed, what, one) for one in found])


def prepare(scratch: str) -> None:
    """Make the files once for this process, and import all that reading them needs: that is no memory of a mutation."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, hang)
    folder = pathlib.Path(tempfile.mkdtemp(dir=scratch))
    (folder / "made").mkdir()
    HERE.update(setting=fuzz.Setting.make(folder / "made"), place=folder / "changed")
    for name in fuzz.KINDS:
        for seed in range(20):
            fuzz.strike(**HERE, name=name, rng=random.Random(f"before {name} {seed}"))


HERE: dict[str, Any] = {}  # the files of this process, and where copies of them are changed


def stretch(name: str, seeds: range) -> Part:
    """These mutations of one kind."""
    return functools.reduce(Part.and_then, (strike(**HERE, name=name, seed=seed) for seed in seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000, help="of each kind of file")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="for all of it: fewer mutations, if need be"
    )
    parser.add_argument("--kind", action="append", help="only this one", choices=list(fuzz.KINDS))
    parser.add_argument("--seed", type=int, default=0, help="of the first mutation")
    parser.add_argument("--save", action="store_true", help="into benchmarks/results/fuzz.md")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    began, first, last = time.monotonic(), arguments.seed, arguments.seed + arguments.mutations
    names, tallies = arguments.kind or list(fuzz.KINDS), dict[str, Part]()
    with (
        tempfile.TemporaryDirectory() as scratch,
        concurrent.futures.ProcessPoolExecutor(
            arguments.processes, multiprocessing.get_context("spawn"), prepare, (scratch,)
        ) as pool,
        tqdm.tqdm(total=arguments.mutations * len(names), unit="") as shown,
    ):
        stretches = [range(seed, min(seed + AT_ONCE, last)) for seed in range(first, last, AT_ONCE)]
        parts = [pool.submit(stretch, name, seeds) for seeds in stretches for name in names]
        for future in concurrent.futures.as_completed(parts):
            if time.monotonic() - began > 60 * arguments.minutes:
                pool.shutdown(cancel_futures=True)
            if future.cancelled():
                continue
            part = future.result()
            tallies[part.name] = tallies[part.name].and_then(part) if part.name in tallies else part
            shown.update(part.done)
            for seed, what, found in part.findings:
                tqdm.tqdm.write(f"{part.name}, seed {seed}: {what}: {found}")
    rows = [HEAD, ["---"] * len(HEAD), *(tallies[name].row for name in names if name in tallies)]
    lines = [
        "# Files that were changed at random",
        "",
        step.circumstances("fuzz.py"),
        "",
        "Bits, stretches and lines are changed, values of JSON, headers of tensors. In half of the snapshots and",
        "chains checksums are made to agree with that. Each file is then read in one of the ways that read it: train,",
        "load, warm_start, diff, verify, certify, replay, report, runs, export. Wrong is: an error not of phalanx,",
        f"another answer, more than {SECONDS:.0f} s or {BYTES >> 20} MB. Files grow by at most a few MB.",
        f"{(time.monotonic() - began) / 60:.0f} minutes.",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *(
            f"- {tally.name}, seed {seed}: {what}: {found}"
            for tally in tallies.values()
            for seed, what, found in tally.findings
        ),
    ]
    print("\n".join(lines))
    if arguments.save:
        RESULTS.write_text("\n".join(lines).rstrip() + "\n")
    sys.exit(any(tally.findings for tally in tallies.values()))


if __name__ == "__main__":
    main()
