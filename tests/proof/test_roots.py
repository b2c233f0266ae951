"""The root of a chain is part of the answer: any engine, number of workers, kills, resumes, processes of a world."""

import os
import signal
import subprocess
import sys

import pytest

import phalanx
from tests.families import FAMILIES
from tests.sampling import sample

KILLS = 20
WORLD = """
import sys
from tests.proof.test_roots import family
result = family(sys.argv[1]).train(run_dir=sys.argv[2], engine="distributed", workers=2, progress=False)
sys.stdout.write(f"root {result.chain}\\n")  # whole, as the other process writes there, too
"""


def family(name, **changes):
    """A family's recipe, with the most replicas that are worth trying."""
    return FAMILIES[name].recipe(FAMILIES[name].replicas[-1], **changes)


def alone(recipe, path):
    """The root of a run in this process."""
    return recipe.train(run_dir=path, engine="inline", progress=False).chain


@pytest.mark.parametrize("name", sample("chains of families", sorted(FAMILIES), 1))
def test_the_root_is_the_same_for_any_number_of_workers(tmp_path, name):
    """Inline and in 2, 3 and 4 workers, with digests of the state at any distance, every family has one root."""
    ways = [{"engine": "inline"}, {"workers": 2, "chain": "every"}, {"workers": 3, "chain": "off"}, {"workers": 4}]
    ways = [way for way in ways if way.get("workers", 1) <= family(name).replicas]
    roots = {family(name).train(run_dir=tmp_path / str(n), progress=False, **way).chain for n, way in enumerate(ways)}
    assert len(roots) == 1
    assert len(roots.pop()) == 64


@pytest.mark.long
@pytest.mark.parametrize("name", sample("chains that are killed", sorted(FAMILIES)[::5], 1))
def test_twenty_kills_and_two_resumes_leave_the_root(tmp_path, name):
    """A family whose workers are killed twenty times, and whose run is resumed twice, has the root of a quiet run."""
    steps = KILLS + 4
    right = alone(family(name, steps=steps), tmp_path / "quiet")
    killed = 0
    for until in (steps // 3, 2 * steps // 3, steps):
        with family(name, steps=until).start(run_dir=tmp_path / "killed", workers=2, progress=False) as run:
            for report in run:
                if killed < KILLS and run.worker_pids:
                    os.kill(run.worker_pids[report.step % 2], signal.SIGKILL)
                    killed += 1
            result = run.result()
    assert killed == KILLS
    assert result.chain == right
    assert alone(family(name, steps=steps, seed=1), tmp_path / "other") != right


@pytest.mark.long
@pytest.mark.parametrize("name", ["conv_norm", "masked_tokens", "transformer"])
def test_two_processes_of_torchrun_have_the_same_root(tmp_path, name):
    """The first process of a world keeps the chain, and its root is that of one process."""
    script = tmp_path / "job.py"
    script.write_text(WORLD)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    words = [*command, name, str(tmp_path / "world")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"root {alone(family(name), tmp_path / 'alone')}" in done.stdout
    assert phalanx.diff(tmp_path / "alone", tmp_path / "world") is None
