"""Changes files of a run at random, and reads them in every way: nothing but errors of phalanx's own and right answers.

    python benchmarks/fuzz.py --mutations 10000 --save       # of each kind of file
    python benchmarks/fuzz.py --kind chain --seed 17 --mutations 1     # plays one again

The kinds of files, what is changed in them and how they are read is in tests/state/fuzz.py. Each mutation has a seed of
its own, which is printed with whatever it finds. Time is that of the processor; memory is the highest that the process
came to, less what it had before.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import signal
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "src")]

import step  # noqa: E402
import torch  # noqa: E402
import tqdm  # noqa: E402

from tests.state import fuzz  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "fuzz.md"
SECONDS, BYTES = 1.0, 100 << 20  # that one may take
HANGS = 60  # seconds after which one is a hang
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


class Tally:
    """What came of the mutations of one kind of file."""

    def __init__(self, name: str) -> None:
        self.name, self.done, self.refused, self.findings = name, 0, 0, list[tuple[int, str, str]]()
        self.seconds, self.bytes = 0.0, 0

    def strike(self, setting: fuzz.Setting, place: pathlib.Path, seed: int) -> None:
        """One mutation more."""
        signal.alarm(HANGS)
        before, began = memory(), time.process_time()
        what, wrong = fuzz.strike(setting, place, self.name, random.Random(f"{self.name} {seed}"))
        seconds, more = time.process_time() - began, memory(highest=True) - before
        signal.alarm(0)
        self.done, self.refused = self.done + 1, self.refused + (wrong is fuzz.REFUSED)
        self.seconds, self.bytes = max(self.seconds, seconds), max(self.bytes, more)
        costly = [f"{seconds:.1f} s"] * (seconds > SECONDS) + [f"{more >> 20} MB"] * (more > BYTES)
        for found in costly + [wrong] * bool(wrong and wrong is not fuzz.REFUSED):
            self.findings.append((seed, what, found))
            tqdm.tqdm.write(f"{self.name}, seed {seed}: {what}: {found}")

    @property
    def row(self) -> list[str]:
        """Of the table."""
        figures = [f"{self.done:,}", len(self.findings), f"{self.refused:,}", f"{self.seconds:.2f}", self.bytes >> 20]
        return [self.name, *map(str, figures)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000, help="of each kind of file")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="for all of it: fewer mutations, if need be"
    )
    parser.add_argument("--kind", action="append", help="only this one", choices=list(fuzz.KINDS))
    parser.add_argument("--seed", type=int, default=0, help="of the first mutation")
    parser.add_argument("--save", action="store_true", help="into benchmarks/results/fuzz.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, hang)
    began, tallies = time.monotonic(), [Tally(name) for name in arguments.kind or fuzz.KINDS]
    with tempfile.TemporaryDirectory() as scratch:
        (pathlib.Path(scratch) / "made").mkdir()
        setting, place = fuzz.Setting.make(pathlib.Path(scratch) / "made"), pathlib.Path(scratch) / "changed"
        for name in fuzz.KINDS:  # what is imported when it is first needed is no memory of a mutation
            for seed in range(20):
                fuzz.strike(setting, place, name, random.Random(f"before {name} {seed}"))
        for seed in tqdm.tqdm(range(arguments.seed, arguments.seed + arguments.mutations), unit=" of each"):
            if time.monotonic() - began > 60 * arguments.minutes:
                break
            for tally in tallies:
                tally.strike(setting, place, seed)
    rows = [HEAD, ["---"] * len(HEAD), *(tally.row for tally in tallies)]
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
        *(f"- {tally.name}, seed {seed}: {what}: {found}" for tally in tallies for seed, what, found in tally.findings),
    ]
    print("\n".join(lines))
    if arguments.save:
        RESULTS.write_text("\n".join(lines).rstrip() + "\n")
    sys.exit(any(tally.findings for tally in tallies))


if __name__ == "__main__":
    main()
