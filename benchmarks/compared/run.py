"""One job in six libraries: lines, seconds, bits, and what happens when processes are killed.

    pip install -r benchmarks/compared/requirements.txt
    python benchmarks/compared/run.py
    python benchmarks/compared/run.py --rounds 1 --epochs 4 --only DDP --only phalanx

Runs of all libraries take turns, and each run is a fresh job. Every run has a limit, and what it leaves is ended.
With ``--save`` each finding is written at once to benchmarks/results/compared.json. ``--go-on`` keeps what is there.
"""

import argparse
import collections
import itertools
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import tqdm

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import launched
import parts
import table

WORKERS = (1, 2, 4)
FEW = 2  # workers of what is killed
LIMIT = 300.0  # seconds for a run
Task = tuple[str, Callable[[], list[dict]]]


class Measuring:
    """The runs of one call."""

    def __init__(self, epochs: int, limit: float) -> None:
        self.epochs, self.limit = epochs, limit
        self.middle = (epochs // 2 + 0.5) * parts.SAMPLES  # samples computed when processes are killed

    def undisturbed(self, library: launched.Library, workers: int) -> list[dict]:
        """A run that nobody disturbs."""
        with tempfile.TemporaryDirectory() as folder:
            job = self._job(library, workers, folder)
            try:
                job.wait(self.limit)
                return [{"kind": "undisturbed", "workers": workers, **facts(job)}]
            finally:
                job.close()

    def one_killed(self, library: launched.Library) -> list[dict]:
        """A run, one of whose workers is killed in the middle."""
        with tempfile.TemporaryDirectory() as folder:
            job = self._job(library, FEW, folder)
            try:
                job.wait(self.limit, self.middle)
                *others, victim = job.computing() or [0]
                killed = time.time()
                if victim:
                    os.kill(victim, signal.SIGKILL)
                job.wait(self.limit)
                return [{"kind": "one killed", "workers": FEW, **facts(job), **after(job, killed, others)}]
            finally:
                job.close()

    def all_killed(self, library: launched.Library) -> list[dict]:
        """A run that is killed as a whole, and started again from the same files with each number of workers."""
        with tempfile.TemporaryDirectory() as root:
            folder, kept = pathlib.Path(root) / "run", pathlib.Path(root) / "kept"
            folder.mkdir()
            job = self._job(library, FEW, folder)
            try:
                job.wait(self.limit, self.middle)
                job.kill_everything()
                before = sum(each.samples for each in job.passes())
            finally:
                job.close()
            folder.rename(kept)
            found = []
            for workers in (FEW, 4, 1):
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(kept, folder)
                job = self._job(library, workers, folder)
                try:
                    job.wait(self.limit)
                    found.append({"kind": "all killed", "workers": workers, "before": before, **facts(job)})
                finally:
                    job.close()
            return found

    def _job(self, library: launched.Library, workers: int, folder) -> launched.Job:
        return launched.Job(library, workers, pathlib.Path(folder), epochs=self.epochs)


def facts(job: launched.Job) -> dict:
    """What can be said of every run that ended, or did not."""
    passes = job.passes()
    finished = job.over()
    return {
        "ended": finished, "code": job.code() if finished else None, "weights": job.weights(),
        "seconds": (job.ended or time.time()) - job.began, "samples": sum(each.samples for each in passes),
        "training": passes[-1].at - passes[0].at if passes else None,
        "said": [] if finished and job.code() == 0 else errors(job.text()),
    }  # fmt: skip


def errors(text: str) -> list[str]:
    """The last lines of an output that name an error, without the paths of this machine."""
    return [re.sub(r"/[\w./-]+", "...", line)[:300] for line in text.splitlines() if re.search(r"Error\b", line)][-4:]


def after(job: launched.Job, killed: float, others: list[int]) -> dict:
    """How long nothing was computed after a kill, and whether the other workers went on."""
    passes = [each for each in job.passes() if each.at > killed - 1]
    gaps = [(b.at - a.at, b) for a, b in itertools.pairwise(passes) if b.at > killed]
    gap, first = max(gaps, key=lambda each: each[0], default=(0.0, None))
    went_on = first is not None and any(each.process in others and each.at >= first.at for each in passes)
    return {"standstill": gap, "went_on": went_on, "until_end": (job.ended or time.time()) - killed}


def tasks(measuring: Measuring, libraries: list[launched.Library], rounds: int, kills: int) -> Iterator[Task]:
    """All that is to be measured, each with its name; the libraries take turns, back and forth."""
    forth = itertools.cycle((libraries, libraries[::-1]))
    for each in libraries:
        yield f"{each.name}, all killed", lambda each=each: measuring.all_killed(each)
    for number in range(max(rounds, kills)):
        for workers in WORKERS if number < rounds else ():
            for each in next(forth):
                yield (
                    f"{each.name}, workers: {workers}, round {number}",
                    lambda each=each, workers=workers: measuring.undisturbed(each, workers),
                )
        for each in next(forth) if number < kills else ():
            yield f"{each.name}, one killed, round {number}", lambda each=each: measuring.one_killed(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of what is timed")
    parser.add_argument("--kills", type=int, default=3, help="times that one worker is killed")
    parser.add_argument("--epochs", type=int, default=parts.EPOCHS)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds until a run counts as hanging")
    parser.add_argument("--only", action="append", choices=[each.name for each in launched.LIBRARIES])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/compared.*")
    parser.add_argument("--go-on", action="store_true", help="keep what is in compared.json, measure what is missing")
    parser.add_argument("--remark", default="", help="a sentence for the report, as of what else the machine does")
    arguments = parser.parse_args()
    chosen = [each for each in launched.LIBRARIES if arguments.only is None or each.name in arguments.only]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that jobs are ended, too
    measuring = Measuring(arguments.epochs, arguments.limit)
    installed = [each for each in chosen if each.version]
    measured = table.loaded() if arguments.go_on else {"tasks": {}}
    measured |= {"versions": {each.name: each.version for each in chosen}, "epochs": arguments.epochs}
    measured["remark"] = arguments.remark or measured.get("remark", "")
    missing = [
        (name, do) for name, do in tasks(measuring, installed, arguments.rounds, arguments.kills)
        if name not in measured["tasks"]
    ]  # fmt: skip
    with tqdm.tqdm(missing, unit="task") as bar:
        for name, do in bar:
            bar.set_description(name)
            library = name.split(",")[0]
            measured["tasks"][name] = [{"library": library, **found} for found in do()]
            if arguments.save:
                table.save(measured)
    print(table.text(measured))
    ends = collections.Counter(each["code"] for found in measured["tasks"].values() for each in found)
    print(f"exit codes: {dict(ends)}", file=sys.stderr)
    if arguments.save:
        (table.RESULTS / "compared.md").write_text(table.text(measured))


if __name__ == "__main__":
    main()
