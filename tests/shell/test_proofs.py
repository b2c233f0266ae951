"""``phalanx diff``, ``verify``, ``certify``, ``replay`` from the shell: what they print, and exit status 0, 1 or 2."""

import json

JOB = """
import torch, phalanx
x = torch.arange(80.0).reshape(40, 2) / 80
recipe = phalanx.Recipe(lambda: torch.nn.Linear(2, 3), (x, torch.arange(40) % 3), torch.nn.functional.cross_entropy,
                        replicas=4, batch_size=8, steps=6)
"""


def test_the_way_through(tmp_path, here):
    """Two runs are the same; a third is not, in words and JSON; what is not there could not be told."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "other.py").write_text(JOB.replace("steps=6", "steps=6, seed=1"))
    for file, run, workers in (("job.py", "a", "1"), ("job.py", "b", "2"), ("other.py", "c", "1")):
        done = here("train", file, "--run-dir", run, "--workers", workers, "--quiet", cwd=tmp_path)
        assert "chain  " in done.stdout
    assert here("diff", "a", "b", cwd=tmp_path).stdout == "the same\n"
    done = here("diff", "a", "c", "--trust", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("seed is 0 in a, and 1 in c\na and c differ first in step 0: state")
    told = json.loads(here("diff", "a", "c", "--json", cwd=tmp_path).stdout)
    assert (told["same"], told["step"], told["replica"], told["phase"]) == (False, 0, 0, "state")
    assert json.loads(here("diff", "a", "b", "--json", cwd=tmp_path).stdout) == {"same": True}
    missing = here("diff", "a", "nothing", cwd=tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "does not exist" in missing.stderr


def test_a_run_is_verified_and_certified(tmp_path, here):
    """Verified and certified, 0; changed, 1; with another recipe, or one that is not there any more, 2."""
    (tmp_path / "job.py").write_text(JOB)
    here("train", "job.py", "--run-dir", "run", "--quiet", cwd=tmp_path)
    assert here("verify", "run", "job.py", "--steps", "2:5", cwd=tmp_path).stdout.startswith("the same: 3 steps")
    assert here("certify", "run", "--recipe", "job.py", "-o", "paper.json", cwd=tmp_path).returncode == 0
    assert here("verify", "paper.json", "job.py", cwd=tmp_path).returncode == 0
    nameless = here("verify", "paper.json", "--trust", cwd=tmp_path)
    assert (nameless.returncode, nameless.stdout) == (2, "")
    assert "paper.json names no file for the recipe; say where it is: phalanx verify" in nameless.stderr
    chain = tmp_path / "run" / "chain.jsonl"
    chain.write_text(chain.read_text().replace('"lr": 0.001', '"lr": 0.002', 1))
    done = here("verify", "run", "job.py", "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["status"]) == (1, 1)
    assert here("verify", "run", "job.py", "--steps", "five", cwd=tmp_path).returncode == 2
    (tmp_path / "job.py").write_text(JOB.replace("steps=6", "steps=6, seed=1"))
    done = here("verify", "run", "job.py", cwd=tmp_path)
    assert (done.returncode, done.stdout.split(":")[0]) == (2, "it cannot be checked")
    (tmp_path / "job.py").unlink()
    for words in ((), ("--trust",)):
        gone = here("replay", "run", "--step", "1", *words, cwd=tmp_path)
        assert (gone.returncode, "job.py" in gone.stderr, "FILE" in gone.stderr) == (2, True, True)
