"""What disks may do to a run: killed at any operation, without power after any, and failing at any.

    python benchmarks/storage.py --save
    python benchmarks/storage.py --every 10     # a tenth of it

It is the campaign of tests/state/test_disks.py, whole. A run writes snapshots, a chain, a log, averages and the best
weights. Each of its operations on files is noted. Then each state that a disk may be left in is laid out, and the same
call goes on there; and each operation fails, with three errors, once and for good. All that a user can see must come
out as in the run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import collections
import errno
import itertools
import pathlib
import shutil
import sys
import tempfile
import time
import warnings

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "src")]

import step  # noqa: E402
import torch  # noqa: E402
import tqdm  # noqa: E402

from tests.state import disks, test_disks  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "storage.md"
LEFT = {
    "killed": "SIGKILL after an operation",
    "half": "SIGKILL, and half of the last write",
    "strict": "power loss: only what was synced, names too",
    "journal": "power loss: names as of the last sync of anything, contents as synced",
    "ahead": "power loss: all names, contents as synced",
}
ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS)


def left(log: list, folder: pathlib.Path, wanted: dict, every: int) -> list[list]:
    """A row for each way in which disks are left."""
    rows = []
    for kind in disks.KINDS:
        states = list(test_disks.left_over(log, folder, kind))[::every]
        wrong = collections.Counter()
        with tempfile.TemporaryDirectory() as scratch:
            for number, files in enumerate(tqdm.tqdm(states, desc=kind)):
                place = pathlib.Path(scratch, str(number))
                disks.lay_out(files, place)
                wrong.update(differing(place, wanted))
                shutil.rmtree(place)
        rows.append([LEFT[kind], len(states), *counted(wrong)])
    return rows


def differing(place: pathlib.Path, wanted: dict) -> list[str]:
    """What is wrong after the same call; an error of any kind is wrong, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return once(test_disks.differs(test_disks.train(place), wanted))
        except Exception as error:
            return once([f"{type(error).__name__}: {error}"])


def failing(count: int, wanted: dict, every: int) -> list[list]:
    """A row for each error, with which an operation fails once, or with all that follow."""
    rows = []
    for code, for_good in itertools.product(ERRORS, (False, True)):
        wrong, numbers = collections.Counter(), range(1, count + 11, every)
        what = f"{errno.errorcode[code]}, {'from then on' if for_good else 'once'}"
        with tempfile.TemporaryDirectory() as scratch:
            for number in tqdm.tqdm(numbers, desc=what):
                place = pathlib.Path(scratch, str(number))
                place.mkdir(mode=0o700)
                wrong.update(once(test_disks.attempt(place, wanted, fails_at(number, code, for_good=for_good))))
                shutil.rmtree(place)
        rows.append([f"an operation fails with {what}", len(numbers), *counted(wrong)])
    return rows


def fails_at(number: int, code: int, *, for_good: bool):
    """For ``disks.Disk``: an error number for one operation, or for all from there on."""
    return lambda at, _: code if at == number or (for_good and at > number) else 0


def once(what: list[str]) -> list[str]:
    """The whole of one try is wrong once, whatever is wrong in it."""
    return [WRONG, *what] if what else []


WRONG = "tries"


def counted(wrong: collections.Counter) -> list:
    """How many tries were wrong, and in what."""
    return [wrong.pop(WRONG, 0), ", ".join(f"{what} ({count})" for what, count in wrong.most_common(5))]


def table(rows: list[list]) -> list[str]:
    """As Markdown."""
    total = ["all", sum(row[1] for row in rows), sum(row[2] for row in rows), ""]
    head = ["| what is done to the disk | tried | wrong | what |", "| --- | --- | --- | --- |"]
    return head + [f"| {' | '.join(map(str, row))} |" for row in [*rows, total]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try every so-many-th state and operation")
    parser.add_argument("--save", action="store_true", help="into benchmarks/results/storage.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch, "run")
        folder.mkdir(mode=0o700)
        with disks.Disk(folder) as disk:
            wanted = test_disks.train(folder)
        rows = left(disk.log, folder, wanted, arguments.every)
    rows += failing(len(disk.log), wanted, arguments.every)
    text = [
        "# What disks do to a run", "",
        step.circumstances("storage.py"), "",
        f"A run of {test_disks.STEPS} steps with snapshots, a chain, a log, EMA, SaveBest and a schedule on a metric",
        f"does {len(disk.log)} operations on files. Wrong is: another digest, root, loss, metric or average, or a file",
        "with other content of which no warning told, after the same call went on. Equal states are tried once.",
        f"{(time.monotonic() - began) / 60:.0f} minutes.", "", *table(rows), "",
    ]  # fmt: skip
    print("\n".join(text))
    if arguments.save:
        RESULTS.write_text("\n".join(text))
    sys.exit(any(row[2] for row in rows))


if __name__ == "__main__":
    main()
