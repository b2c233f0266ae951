"""``phalanx check``: a recipe on one device, on two and on all, and whether the digests are the same."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest
import torch

import phalanx
from phalanx.lab.check import DIFFERENT, SAME, UNKNOWN, check, circumstances, verdict
from phalanx.lab.timing import measured
from phalanx.proof.verify import certify, check_certificate, verify
from tests import accelerator
from tests.devices.planting import Planted
from tests.devices.test_wrong_sums import in_order_of_arrival
from tests.families import FAMILIES, terms

RECIPE = """
import torch, phalanx
x = torch.arange(48.0).reshape(24, 2) / 48
recipe = phalanx.Recipe(lambda: torch.nn.Linear(2, 3), (x, torch.arange(24) % 3), torch.nn.functional.cross_entropy,
                        replicas=4, batch_size=8, epochs=2)
"""


@pytest.mark.long
def test_the_table(tmp_path):
    """From the shell: one device twice, two and all; exit status 0, as JSON too."""
    (tmp_path / "job.py").write_text(RECIPE)
    command = [sys.executable, "-m", "phalanx", "check", "job.py", "--devices", "cpu,cpu,cpu", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == SAME, done.stderr
    told = json.loads(done.stdout)
    again = [f"done{again} in this process" for again in ("", " again")]
    assert [row["what"] for row in told["rows"]] == [*again, "done on 2 devices", "done on 3 devices"]
    assert len({row["digest"] for row in told["rows"]}) == 1
    assert told["same"] is True
    assert "torch" in told["circumstances"]
    assert "all-to-all and all-gather" in told["circumstances"]["a bucket of 25 MB"]
    assert told["circumstances"]["6 pairs of devices"] == "in host memory"


def test_other_digests_are_told():
    """Sums in another order between devices make the digests differ: exit status 1."""
    job = terms(6)
    job = dataclasses.replace(job, make_model=Planted(job.make_model, in_order_of_arrival))
    rows = list(check(job, None, ["cpu", "cpu"], 3))
    assert [row.same for row in rows] == [True, True, False]
    assert "done in this process and done on 2 devices differ first in step " in rows[-1].told
    assert verdict(rows) == DIFFERENT


def nondeterministic(patch):
    """No fault: an operation says that it has no deterministic kernel."""
    torch.fake.set_nondeterministic("aten::mm")


@pytest.mark.accelerator
def test_an_operation_without_a_deterministic_kernel():
    """It is told of, and nothing is called the same: exit status 2."""
    fake = accelerator.accelerator()
    fake.set_nondeterministic("aten::mm")
    job = FAMILIES["mlp"].recipe(4)
    job = dataclasses.replace(job, make_model=Planted(job.make_model, nondeterministic))
    rows = list(check(job, None, ["fake:0", "fake:1"], 3))
    *asked, free = rows
    assert len(asked) == 3
    assert all("deterministic" in row.told and row.digest is None for row in asked)
    assert (free.digest, free.same) == ("not compared", True)
    assert free.seconds > 0
    assert verdict(rows) == UNKNOWN


@pytest.mark.long
@pytest.mark.accelerator
def test_the_exchange_is_timed():
    """By a process for each device, through the collectives that its package registered; what fails is told."""
    accelerator.accelerator()
    found = measured(["fake:0", "fake:1"])
    assert found["2 pairs of devices"] == "bytes arrived"
    assert "all-reduce" in found["a bucket of 25 MB"]
    assert "no device 9" in measured(["fake:0", "fake:9"])["exchange"]


@pytest.mark.long
@pytest.mark.accelerator
def test_devices_are_named():
    """A kind alone stands in the table as the devices that are meant."""
    accelerator.accelerator()
    assert circumstances(["fake"], 4)["devices"] == "fake:0, fake:1, fake:2, fake:3"
    assert "devices" not in circumstances([], 4)


@pytest.mark.long
def test_what_raises_is_not_called_the_same(tmp_path):
    """A loss that raises, and a new process that ends with an error: it could not be told, in words."""

    def broken(output, target):
        raise ArithmeticError("no such loss")

    job = FAMILIES["mlp"].recipe(1)
    rows = list(check(dataclasses.replace(job, loss_fn=broken), str(tmp_path / "nowhere.py"), steps=2))
    assert [row.same for row in rows] == [None] * 3
    assert "WorkerError: no such loss" in rows[0].told
    assert "nowhere.py" in rows[2].told
    assert verdict(rows) == UNKNOWN
    assert [row.same for row in check(job, str(tmp_path / "nowhere.py"), steps=2)] == [True, True, None]


class OtherThere:
    """A loss that comes to other bits on an accelerator, by construction."""

    def __call__(self, output, target):
        loss = torch.nn.functional.cross_entropy(output, target)
        return loss * 2 if output.device.type != "cpu" else loss


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.accelerator
@pytest.mark.parametrize("count", [1, 2])
def test_runs_are_computed_again_where_they_were(tmp_path, count):
    """Verify, certify and diff use devices of the kind that a run used; a certificate names it."""
    accelerator.accelerator()
    recipe = FAMILIES["mlp"].recipe(4, loss_fn=OtherThere())
    named = [f"fake:{number}" for number in range(count)]
    run = tmp_path / "run"
    result = recipe.train(devices=named, run_dir=run, snapshot_every=2)
    assert recipe.train(run_dir=tmp_path / "host").digest != result.digest
    assert verify(recipe, run, progress=False).status == SAME
    assert verify(recipe, run, workers=2, progress=False).status == SAME
    verified, facts = certify(recipe, run)
    assert (verified.status, facts["device"]) == (SAME, "fake")
    (tmp_path / "certificate").write_text(json.dumps(facts))
    assert check_certificate(tmp_path / "certificate", recipe).status == SAME
    (tmp_path / "other").write_text(json.dumps({**facts, "device": "cpu"}))
    assert check_certificate(tmp_path / "other", recipe).status == DIFFERENT
    shutil.copytree(run, tmp_path / "copy")
    assert phalanx.diff(run, tmp_path / "copy", recipes=(recipe, recipe), operations=True) is None


def test_wrong_calls():
    """A recipe without data and too few steps are refused by name."""
    with pytest.raises(phalanx.UsageError, match="--steps is 0"):
        list(check(FAMILIES["mlp"].recipe(4), None, ["cpu"], 0))
    with pytest.raises(phalanx.UsageError, match="data=None"):
        list(check(phalanx.Recipe(FAMILIES["mlp"].make_model, None, FAMILIES["mlp"].loss_fn), None, ["cpu"], 3))
