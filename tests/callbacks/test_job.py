"""The job that docs/compared.md counts, run from that very file: any workers, killed and resumed, to the last bit."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Runs the file as it is, in a folder of its own, with options that are no part of the answer.
RUN = """
import os, pathlib, runpy, signal, sys
import phalanx
jobs, workers, killed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, str(jobs))
train = phalanx.Recipe.train
def kill(report):
    if report.step == killed:
        os.kill(os.getpid(), signal.SIGKILL)
def with_options(recipe, callbacks=(), **options):
    ours = {"run_dir": options.get("run_dir"), "snapshot_every": 40} if "run_dir" in options else {}
    return train(recipe, callbacks=[*callbacks, kill], workers=workers, **(options | ours))
phalanx.Recipe.train = with_options
names = runpy.run_path(str(jobs / "with_phalanx.py"))
sys.path.insert(0, sys.argv[4])
import hashlib, tests.callbacks.jobs
all_of_it = tests.callbacks.jobs.left(names["result"], pathlib.Path("runs/phalanx"))
print(hashlib.sha256(repr(all_of_it).encode()).hexdigest())
print(names["result"].steps, names["result"].resumed_from)
"""


def run(folder, workers, killed=-1):
    """The job's file in this folder: the hash of all that it left, its steps, and from where it went on."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", RUN, str(ROOT / "benchmarks" / "jobs"), str(workers), str(killed), str(ROOT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if killed >= 0:
        assert done.returncode == -9, done.stderr
        return None
    assert done.returncode == 0, done.stderr
    *shown, whole, facts = done.stdout.splitlines()
    return shown, whole, facts.split()


@pytest.mark.longest
def test_the_job_of_the_comparison_ends_in_the_same_bits(tmp_path):
    """Digest, steps, best file, averages, evaluations, log and suggested rate are equal for W = 1, 2, 3 and a kill."""
    shown, whole, (steps, _) = run(tmp_path / "one", 1)
    assert int(steps) < 100 * 23, "it stopped early"
    assert run(tmp_path / "two", 2)[:2] == (shown, whole)
    run(tmp_path / "three", 3, killed=150)
    again = run(tmp_path / "three", 2)
    assert again[:2] == (shown, whole)
    assert again[2][1] in ("0", "40", "80", "120"), "it went on from the newest that was whole on the disk"
