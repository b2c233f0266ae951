"""What the scripts of this folder share: rows that are kept in a file, cases that may fail, settings of the device.

Environment: ``CAMPAIGN_DEVICE`` is the first device, "cuda:0" if nothing is said; "cpu" makes everything small. Rows
are kept in out/gpu; ``OUT`` is a folder that gets a copy of them.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "src"))
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read before the first product of matrices
# For whatever is started from here: torchrun's processes, and timings of phalanx itself.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*map(str, (pathlib.Path(__file__).resolve().parents[2] / "src", pathlib.Path(__file__).resolve().parents[2])),
     *filter(None, [os.environ.get("PYTHONPATH")])]
)  # fmt: skip

import torch

from benchmarks import step

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = torch.device(os.environ.get("CAMPAIGN_DEVICE", "cuda:0"))
SMALL = "CAMPAIGN_DEVICE" in os.environ and DEVICE.type == "cpu"
KEPT = ROOT / "out" / "gpu"
RESULTS = ROOT / "benchmarks" / "results"
BEGAN = "CAMPAIGN_BEGAN"  # when the first process of this call began, for those that take its place
WRONG = "failed", "different"
LEFT_OVER = 2  # exit status: what was tried is right, but there was no time for all
DEATHS = 2  # processes that may end in the middle of a case: the first one may have been out of time
LIMIT = 180.0  # seconds of a case
NEEDS = {  # of each part; times on one H100 are estimates
    "machine": "one GPU; some seconds", "norm": "one GPU; some seconds", "attention": "one GPU; 20 seconds",
    "refused": "one GPU; 20 seconds", "copies": "one GPU; 10 seconds", "launches": "one GPU; half a minute",
    "plain": "one GPU; a minute", "runs": "one GPU; 70 seconds, and 5 GB of disk",
    "folded": "one GPU; 3 minutes, all of which may be left out in a first hour",
    "nccl": "one GPU with NCCL; 2 minutes", "spread": "one GPU, better several; 4 minutes",
    "world": "one GPU, better two; a minute", "compiled": "one GPU, a C compiler and Triton; 4 minutes",
    "mlp": "one GPU; a minute", "resnet50": "one GPU with 20 GB, torchvision; 2 minutes",
    "gpt2": "one GPU with 30 GB; 2 minutes", "extras": "the same, and 12 GB in TMPDIR (/dev/shm); 3 minutes",
    "idle": "one GPU; half a minute",
}  # fmt: skip
PARTING = 20.0  # seconds for a process to end in order


class Outcome(NamedTuple):
    """What came of a case: a word or two, a note, and numbers by name."""

    verdict: str
    note: str = ""
    values: dict[str, Any] = {}  # noqa: RUF012  nobody writes it


class Case(NamedTuple):
    """Something to try. ``do`` returns an ``Outcome``, or raises; ``limit`` are its seconds."""

    part: str
    name: str
    do: Callable[[], Outcome]
    limit: float = LIMIT


SAME = Outcome("same")


def arguments(text: str, parts: Sequence[str]) -> argparse.ArgumentParser:
    """What all scripts understand."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"which of {', '.join(parts)}; all by default")
    parser.add_argument("--again", action="store_true", help="forget the rows of earlier calls")
    parser.add_argument("--wrong", action="store_true", help="try again what failed or differed")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no case after so many; call again to go on")
    parser.add_argument("--save", metavar="FILE", nargs="?", const="", help="put the table into benchmarks/results")
    parser.add_argument("--apart", nargs="+", help=argparse.SUPPRESS)
    return parser


class Rows:
    """The rows of a script: printed and written as they come. A row that is there already is not made again.

    Parameters
    ----------
    script : str
        Its name.
    again, wrong : bool
        Whether to forget all earlier rows, or those that failed or differed.
    device : str
        What the rows are about; there is a file for each.
    """

    def __init__(self, script: str, *, again: bool, wrong: bool, device: str = DEVICE.type) -> None:
        folders = [pathlib.Path(os.environ.get("OUT", KEPT)), *[KEPT] * (not SMALL)]
        self._files = [folder / f"{script}-{device}{'-small' * SMALL}.jsonl" for folder in dict.fromkeys(folders)]
        self.facts, self._source = circumstances(), sources()
        self.rows: list[dict[str, Any]] = []
        for path in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not again and not self.rows:
                self._take(path, wrong=wrong)
        self._write(self.rows, "w")
        self._begun = self._files[-1].with_suffix(".begun")
        self._died = {} if again or not self._begun.exists() else json.loads(self._begun.read_text())

    def dies(self, case: Case) -> bool:
        """Note that a case begins, so that a later call knows of it; whether processes have died in it before."""
        count = self._died.get(f"{case.part}: {case.name}", 0)
        self._begun.write_text(json.dumps({f"{case.part}: {case.name}": count + 1}))
        return count >= DEATHS

    def _take(self, path: pathlib.Path, *, wrong: bool) -> None:
        """Rows of an earlier call, if they are of the same machine; else they get another name."""
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]  # the last one may be cut
        facts, *rows = map(json.loads, lines or ["{}"])
        if facts == self.facts:
            self.rows = [row for row in rows if not (wrong and row["verdict"] in WRONG)]
        else:
            other = path.with_suffix(f".{int(PROCESS)}.jsonl")
            print(f"{path.name} is of another machine or torch, and is called {other.name} from now on: {facts}")
            path.rename(other)

    @property
    def known(self) -> set[tuple[str, str]]:
        return {(row["part"], row["case"]) for row in self.rows}

    @property
    def wrong(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["verdict"] in WRONG]

    def add(self, case: Case, outcome: Outcome, seconds: float) -> None:
        """A row for a case."""
        row = {"part": case.part, "case": case.name, "verdict": outcome.verdict, "note": outcome.note}
        row |= {"values": outcome.values, "seconds": round(seconds, 2), "at": round(elapsed(), 1)}
        self.rows.append(row | {"source": self._source, "process": PROCESS})
        numbers = ", ".join(f"{name} {shown(value)}" for name, value in outcome.values.items())
        texts = f"{case.part:9} {case.name:44}", outcome.verdict, numbers, outcome.note
        print(f"[{elapsed():6.1f} s]", " | ".join(filter(None, texts)), flush=True)
        self._write(self.rows[-1:], "a")
        self._begun.unlink(missing_ok=True)

    def _write(self, rows: Iterable[dict[str, Any]], mode: str) -> None:
        for path in self._files:
            with path.open(mode) as file:
                for row in [self.facts, *rows] if mode == "w" else rows:
                    file.write(json.dumps(row, default=str) + "\n")


def run(rows: Rows, cases: Iterable[Case], minutes: float) -> int:
    """Try every case that has no row yet; returns how many are left because the time is over."""
    left, part = 0, ""
    for case in cases:
        if (case.part, case.name) in rows.known:
            continue
        if case.part != part:
            part = case.part
            print(f"{part}: it needs {NEEDS.get(part, 'the CPU alone')}", flush=True)
        if elapsed() > 60 * minutes:
            left += 1
            continue
        _try(rows, case)
        if not answers():
            print("the device does not answer any more: going on in a new process", flush=True)
            restart()
    return left


def _try(rows: Rows, case: Case) -> None:
    """One case. One that hangs gets its row from a thread, which puts a new process in the place of this one."""
    began = time.monotonic()
    if rows.dies(case):
        rows.add(case, Outcome("failed", f"{DEATHS} processes have died in it"), 0.0)
        return

    def give_up() -> None:
        rows.add(case, Outcome("failed", f"not done after {case.limit:.0f} s"), time.monotonic() - began)
        restart()

    watch = threading.Timer(case.limit, give_up)
    watch.daemon = True
    watch.start()
    try:
        with warnings.catch_warnings(action="ignore"):
            outcome = case.do()
    except Exception as error:
        outcome = Outcome("failed", told(error))
        if os.environ.get("CAMPAIGN_TRACE"):
            traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # they hold memory of the device
    watch.cancel()
    rows.add(case, outcome, time.monotonic() - began)
    free()


def told(error: BaseException) -> str:
    """An error in a line: its kind, its first line, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = (str(error).strip() or "no text").splitlines()[0][:200]
    return f"{type(error).__name__}: {line} ({pathlib.Path(last.filename).name}:{last.lineno})"


def restart() -> None:
    """Begin this script anew in the same process, without what it has loaded. Rows that are there stay."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(number, False)
    os.environ[BEGAN] = str(time.time() - elapsed())
    sys.stdout.flush()
    kept = [argument for argument in sys.argv if argument not in ("--again", "--wrong")]
    os.execv(sys.executable, [sys.executable, *kept])


def elapsed() -> float:
    """Seconds since the call began, also over ``restart``."""
    return time.time() - FIRST


PROCESS = time.time()  # no other process, nor what takes the place of this one, has the same
FIRST = float(os.environ.pop(BEGAN, PROCESS))


def finish(rows: Rows, left: int, report: str) -> int:
    """Print the table and what is wrong; returns the exit status."""
    print(f"\n{report}\n")
    for row in rows.wrong:
        print(f"{row['verdict'].upper()}: {row['part']} | {row['case']} | {row['note']}")
    print(f"{len(rows.rows)} rows, {len(rows.wrong)} wrong, {left} left; {elapsed():.0f} s")
    if left:
        print("there was no time for what is left: the same call goes on")
    return 1 if rows.wrong else LEFT_OVER if left else 0


def save(name: str, section: str, report: str, given: str | None) -> None:
    """Put a report into a file of results, between two marks, in the place of an earlier one. Small runs have none."""
    if given is None:
        return
    if SMALL:
        raise SystemExit("CAMPAIGN_DEVICE=cpu says nothing of real hardware; nothing is saved")
    path = pathlib.Path(given or RESULTS / f"{name}.md")
    begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
    before, _, rest = (path.read_text() if path.exists() else "").partition(begin)
    after = rest.partition(end)[2]
    path.write_text(f"{before.rstrip()}\n\n{begin}\n{report}\n{end}\n{after.lstrip()}".lstrip())


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    return step.markdown(list(header), [[str(cell).replace("|", "/") for cell in row] for row in rows])


def shown(value: Any) -> str:
    """A number with three digits or so; anything else as text."""
    return step.spelled(value) if isinstance(value, float) and 0 < value < 1e6 else str(value)


# ---- the machine


def circumstances() -> dict[str, Any]:
    """What rows are about: versions, processor and device."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    facts = {"processor": processor, "cores": cores(), "python": platform.python_version(), "torch": torch.__version__}
    facts |= {"small": SMALL}
    if DEVICE.type == "cuda" and torch.cuda.is_available():
        kind = torch.cuda.get_device_properties(DEVICE)
        facts |= {"device": kind.name, "devices": torch.cuda.device_count(), "cuda": torch.version.cuda}
        facts |= {"cudnn": torch.backends.cudnn.version(), "units": kind.multi_processor_count}
    return facts


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def sources() -> str:
    """What tells versions of this project apart: rows of several are marked."""
    total = hashlib.sha256()
    for path in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("benchmarks/gpu/*.py")]):
        total.update(path.read_bytes())
    return total.hexdigest()[:8]


def device_count() -> int:
    """Devices to spread over; the CPU counts as two."""
    return 2 if DEVICE.type == "cpu" else torch.get_device_module(DEVICE).device_count()


def sync() -> None:
    """Wait until the device has done all."""
    if DEVICE.type != "cpu":
        torch.get_device_module(DEVICE).synchronize(DEVICE)


def free() -> None:
    """Give memory of the device back, and count its peak anew. A device that failed is left alone."""
    gc.collect()
    if DEVICE.type == "cuda" and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(DEVICE)


def peak_gb() -> float:
    """The most memory that tensors of this process took on the device."""
    return torch.cuda.max_memory_allocated(DEVICE) / 1e9 if DEVICE.type == "cuda" else 0.0


def answers() -> bool:
    """Whether the device still computes. One that was not used yet is not started."""
    if DEVICE.type != "cuda" or not torch.cuda.is_initialized():
        return True
    try:
        return torch.ones(1, device=DEVICE).add_(1).item() == 2
    except RuntimeError:
        return False


@contextlib.contextmanager
def deterministic(*, on: bool = True) -> Iterator[None]:
    """What a careful user sets around a loop by hand."""
    cudnn: Any = torch.backends.cudnn
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(on)
    cudnn.benchmark, filling.fill_uninitialized_memory = False, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.benchmark, filling.fill_uninitialized_memory = before[1:]


def moved(tree: Any, device: torch.device = DEVICE) -> Any:
    """Tensors in tuples, lists and dicts, on the device."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {name: moved(value, device) for name, value in tree.items()}
    return tuple(moved(value, device) for value in tree) if isinstance(tree, tuple | list) else tree


def apart(script: str, *more: str, seconds: float = 120, tries: int = 1) -> Any:
    """What a script's ``--apart`` prints in a process of its own, as JSON in its last line."""
    return alone([sys.executable, script, "--apart", *more], seconds, tries)


def alone(command: Sequence[str], seconds: float, tries: int = 1, **variables: str) -> Any:
    """The last line that a command prints, as JSON. DDP may abort as it ends, so that it gets several tries."""
    for left in reversed(range(tries)):
        status, told, errors = ended(command, seconds, **variables)
        if not status and told:
            return json.loads(told[-1])
        if not left:
            reasons = [line for line in errors if "Error" in line and "ChildFailedError" not in line] or errors
            raise RuntimeError(f"status {status}: {reasons[-1].strip() if reasons else 'it said nothing'}")
    raise AssertionError


def ended(command: Sequence[str], seconds: float, **variables: str) -> tuple[int, list[str], list[str]]:
    """Exit status, and the lines of both streams. When the time is over its whole group of processes ends."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=out, stderr=log, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its own processes then, which are in groups of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PARTING)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        log.seek(0)
        return status, out.read().splitlines(), log.read().strip().splitlines()


def heading(rows: Rows, title: str) -> str:
    """A title, and what the rows are about."""
    facts = ", ".join(f"{name} {value}" for name, value in rows.facts.items() if name != "small")
    versions = sorted({row["source"] for row in rows.rows})
    return f"## {title}\n\n{facts}; sources {', '.join(versions)}; `{' '.join(['python', *sys.argv])}`"
