"""The tables of the comparison, from what was measured."""

import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import launched
import parts
import step
from jobs import count

RESULTS = step.RESULTS
PATH = RESULTS / "compared.json"
METHOD = """Each run is a fresh job, and the libraries take turns. *Whole* is from the command to its end, *training*
from the first forward pass to the last. Medians of all rounds, and the range. Each worker has one thread: with two,
one worker of phalanx and of DDP was slower while other programs ran. phalanx has R = 4 everywhere, and pays for four
replicas with one worker, too. Each library writes a checkpoint after each epoch. Traffic is on loopback."""
KILLS = """Two workers. Processes are killed in the middle of an epoch, half-way. *Nothing computed for* is the longest
pause between forward passes after the kill, of both workers together. *More work* is what was computed beyond an
undisturbed run, in steps of 64 samples. *Same bits*: as an undisturbed run of two workers."""


def loaded() -> dict:
    """What was measured before."""
    return json.loads(PATH.read_text())


def save(measured: dict) -> None:
    """Write it for machines."""
    RESULTS.mkdir(exist_ok=True)
    PATH.write_text(json.dumps(measured, indent=1) + "\n")


def text(measured: dict) -> str:
    """The report."""
    rows = [found for each in measured["tasks"].values() for found in each]
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in measured["versions"].items())
    remark = f"{measured['remark']}\n\n" if measured["remark"] else ""
    return (
        f"# One job in six libraries\n\n{step.circumstances('compared/run.py')}. {versions}.\n\n{remark}"
        f"A CNN with dropout on {parts.SAMPLES} digits, SGD with momentum, batches of {parts.BATCH} over all workers, "
        f"{measured['epochs']} epochs of {parts.PER_EPOCH} steps.\n\n## Lines, seconds, bits\n\n{METHOD}\n\n"
        f"{speed(measured, rows)}\n\n## One worker is killed\n\n{KILLS}\n\n{one(measured, rows)}\n\n"
        f"## Everything is killed, and started again with the same command\n\n{everything(measured, rows)}\n"
    )


def speed(measured: dict, rows: list[dict]) -> str:
    """Lines, seconds for each number of workers, and whether the bits are the same."""
    header = [
        "", "lines", "launched by", "1 worker: training, s", "2", "4", "1 worker: whole, s", "2", "4",
        "same bits twice", "same bits for 1, 2, 4",
    ]  # fmt: skip
    lines = []
    for library in named(measured):
        runs = of(rows, library, "undisturbed")
        cells = [lines_of(library), library.launcher]
        for field in ("training", "seconds"):
            for workers in (1, 2, 4):
                cells.append(spread([each[field] for each in runs if each["workers"] == workers]))
        lines.append([library.name, *cells, *bits(runs)] if runs else missing(library, header))
    return step.markdown(header, lines)


def bits(runs: list[dict]) -> list[str]:
    """Whether runs of equal numbers had equal bits, and those of 1, 2 and 4 workers."""
    found = {workers: hashes([each for each in runs if each["workers"] == workers]) for workers in (1, 2, 4)}
    differ = [str(workers) for workers, those in found.items() if len(those) > 1]
    return [f"no ({' and '.join(differ)} workers)" if differ else "yes", "yes" if len(hashes(runs)) == 1 else "no"]


def one(measured: dict, rows: list[dict]) -> str:
    """What happens when a worker is killed."""
    header = ["", "what happens", "nothing computed for, s", "more work, steps", "same bits"]
    lines = []
    for library in named(measured):
        runs = of(rows, library, "one killed")
        usual = [each for each in of(rows, library, "undisturbed") if each["workers"] == 2]
        if not runs or not usual:
            lines.append(missing(library, header))
            continue
        work = statistics.median(each["samples"] for each in usual)
        good = [each for each in runs if each["code"] == 0]
        lines.append([
            library.name, " / ".join(sorted({happened(each) for each in runs})),
            spread([each["standstill"] for each in good]),
            spread([(each["samples"] - work) / parts.BATCH for each in good]), same(good, hashes(usual)),
        ])  # fmt: skip
    return step.markdown(header, lines)


def everything(measured: dict, rows: list[dict]) -> str:
    """What happens when all processes are killed and the same command is given again."""
    header = [
        "", "2 workers: what happens", "more work, steps", "same bits", "4 workers: what happens",
        "same bits as 2; as 4", "1 worker: what happens", "same bits as 2; as 1",
    ]  # fmt: skip
    lines = []
    for library in named(measured):
        runs = {each["workers"]: each for each in of(rows, library, "all killed")}
        usual = of(rows, library, "undisturbed")
        if not runs or not usual:
            lines.append(missing(library, header))
            continue
        ours = {workers: hashes([each for each in usual if each["workers"] == workers]) for workers in (1, 2, 4)}
        work = statistics.median(each["samples"] for each in usual if each["workers"] == 2)
        again = runs[2]
        more = f"{(again['before'] + again['samples'] - work) / parts.BATCH:.0f}" if again["code"] == 0 else "-"
        lines.append([
            library.name, resumed(again), more, same([again], ours[2]),
            *(cell for workers in (4, 1) for cell in (
                resumed(runs[workers]), f"{same([runs[workers]], ours[2])}; {same([runs[workers]], ours[workers])}",
            )),
        ])  # fmt: skip
    return step.markdown(header, lines)


def happened(run: dict) -> str:
    """In words, what a kill of one worker led to."""
    if not run["ended"]:
        return "hangs"
    if run["code"] != 0:
        return f"ends with an error after {run['until_end']:.0f} s"
    return "the other goes on, and a new one joins" if run["went_on"] else "both start again from the last checkpoint"


def resumed(run: dict) -> str:
    """In words, what starting again led to."""
    if not run["ended"]:
        return "hangs"
    return "goes on" if run["code"] == 0 else "an error"


def lines_of(library: launched.Library) -> str:
    """Lines of code of its program."""
    return str(count.counted((launched.HERE / library.program).read_text())[0])


def named(measured: dict) -> list[launched.Library]:
    """The libraries of this report."""
    return [each for each in launched.LIBRARIES if each.name in measured["versions"]]


def of(rows: list[dict], library: launched.Library, kind: str) -> list[dict]:
    """The runs of a library, of one kind."""
    return [each for each in rows if each["library"] == library.name and each["kind"] == kind]


def hashes(runs: list[dict]) -> set[str | None]:
    """Their different ends."""
    return {each["weights"] for each in runs}


def same(runs: list[dict], usual: set[str | None]) -> str:
    """Whether all runs ended in the bits that undisturbed ones have."""
    if not runs or any(each["code"] != 0 for each in runs):
        return "-"
    return "yes" if len(usual) == 1 and hashes(runs) == usual else "no"


def spread(values: list[float]) -> str:
    """A median, and the range."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def missing(library: launched.Library, header: list[str]) -> list[str]:
    """The row of a library that was not measured."""
    why = "not measured" if library.version else "not installed"
    return [library.name, why, *["-"] * (len(header) - 2)]
