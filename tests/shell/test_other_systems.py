"""On macOS and Windows runs compute in their own process, to the same bits: tried by hiding what those lack."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import phalanx
from phalanx.callbacks import EMA, Log
from tests.callbacks.jobs import HELD_OUT, evaluation, recipe

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("error")
from tests.shell import hidden
import phalanx
from phalanx.callbacks import EMA, Log
from tests.callbacks.jobs import HELD_OUT, evaluation, recipe
folder, told = sys.argv[1], []
job = recipe(epochs=2)
told.append(job.train().digest)
run = {"run_dir": f"{folder}/run", "evaluation": evaluation(), "callbacks": [EMA(0.9), Log("csv")]}
first, again = job.train(**run), job.train(**run)
assert (again.resumed_from, again.digest) == (first.steps, first.digest)
told += [first.digest, first.chain, first.metrics, phalanx.verify(job, f"{folder}/run").status]
with job.start() as held:
    for report in held:
        pass
    held.save(f"{folder}/snapshot")
    told.append(held.predict(HELD_OUT).tolist())
with job.start(run_dir=f"{folder}/other"):
    try:
        job.start(run_dir=f"{folder}/other")
    except phalanx.UsageError as error:
        told.append(str(error))
first.save(f"{folder}/model.safetensors")
for options in ({"workers": 2}, {"engine": "processes"}, {"devices": ["cpu", "cpu"]}):
    try:
        job.train(**options)
    except phalanx.UsageError as error:
        told.append(str(error))
print(json.dumps(told))
"""


def ran(system, *line, folder):
    names = {"SYSTEM": system, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, *line], cwd=folder, env={**os.environ, **names}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_runs_have_the_same_bits(tmp_path, system):
    """Recipes, evaluations, directories, resumes, locks, proofs and snapshots work; two workers are refused."""
    found = json.loads(ran(system, "-c", PROGRAM, str(tmp_path), folder=pathlib.Path.cwd()))
    plain, kept, chain, metrics, status, outputs, locked, *refused = found
    options = {"evaluation": evaluation(), "callbacks": [EMA(0.9)]}
    here = recipe(epochs=2).train(workers=1, run_dir=tmp_path / "here", **options)
    assert [plain, kept, chain, metrics, status] == [here.digest, here.digest, here.chain, here.metrics, 0]
    assert "another" in locked
    assert [words.split(",")[0] for words in refused][:2] == ["workers is 2", "engine is 'processes'"]
    assert all(f"need Linux, and this is {system}" in words for words in refused)
    options = {"evaluation": evaluation(), "callbacks": [EMA(0.9), Log("csv")]}
    assert recipe(epochs=2).train(run_dir=tmp_path / "run", **options).resumed_from == here.steps
    with recipe(epochs=2).start(workers=1) as run:
        run.finish()
        assert run.predict(HELD_OUT).tolist() == outputs
    assert phalanx.load(tmp_path / "snapshot").weights


@pytest.mark.long
def test_the_command_works(tmp_path):
    """``phalanx train`` of a file, with its default of workers."""
    (tmp_path / "job.py").write_text(
        "import torch, phalanx\n"
        "x, y = torch.ones(8, 2), torch.ones(8, 1)\n"
        "recipe = phalanx.Recipe(lambda: torch.nn.Linear(2, 1), (x, y), torch.nn.functional.mse_loss, steps=3)\n"
    )
    command = "from tests.shell import hidden; from phalanx.cli.app import main; main()"
    told = json.loads(ran("win32", "-c", command, "train", "job.py", "--json", folder=tmp_path))
    assert told["steps"] == 3
    told = json.loads(ran("darwin", "-c", command, "check", "job.py", "--json", folder=tmp_path))
    assert [told["same"], [row["what"].rpartition(" ")[2] for row in told["rows"]]] == [True, ["process"] * 3]
    told = json.loads(ran("darwin", "-c", command, "check", "--json", folder=tmp_path))
    assert all(one["digest"] and one["same with two workers"] is None for one in told["recipes"].values())
