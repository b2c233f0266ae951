"""``phalanx check``: a recipe on one device, on two and on all, and whether the digests are the same."""

import json
import subprocess
import sys

import pytest

import phalanx
from phalanx.frameworks.torch.devices import exchange
from phalanx.proof.check import DIFFERENT, SAME, UNKNOWN, check, circumstances, verdict
from tests import accelerator
from tests.families import FAMILIES

RECIPE = """
import torch, phalanx
x = torch.arange(48.0).reshape(24, 2) / 48
recipe = phalanx.Recipe(lambda: torch.nn.Linear(2, 3), (x, torch.arange(24) % 3), torch.nn.functional.cross_entropy,
                        replicas=4, batch_size=8, epochs=2)
"""


@pytest.mark.long
def test_the_table(tmp_path):
    """From the shell: one device twice, two, all, and what R costs; exit status 0, as JSON too."""
    (tmp_path / "job.py").write_text(RECIPE)
    command = [sys.executable, "-m", "phalanx", "check", "job.py", "--devices", "cpu,cpu,cpu", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == SAME, done.stderr
    told = json.loads(done.stdout)
    compared = [row for row in told["rows"] if row["compared"]]
    assert [row["what"] for row in compared] == ["1 device", "1 device again", "2 devices", "3 devices"]
    assert len({row["digest"] for row in compared}) == 1
    assert told["same"] is True
    assert "torch" in told["circumstances"]


def test_other_digests_are_told(monkeypatch):
    """Parameters that do not reach the other devices make the digests differ: exit status 1."""
    monkeypatch.setattr(exchange.Exchange, "spread", lambda *_: None)
    assert verdict(list(check(FAMILIES["mlp"].recipe(4), ["cpu", "cpu"], 3))) == DIFFERENT


@pytest.mark.accelerator
def test_an_operation_without_a_deterministic_kernel():
    """It is told of, and tried where it is allowed, but nothing is called the same: exit status 2."""
    fake = accelerator.accelerator()
    fake.set_nondeterministic("aten::mm")
    rows = list(check(FAMILIES["mlp"].recipe(4), ["fake:0", "fake:1"], 3))
    assert "deterministic" in rows[0].problem
    assert rows[1].digest is not None
    assert verdict(rows) == UNKNOWN


@pytest.mark.long
@pytest.mark.accelerator
def test_how_fast_devices_exchange_memory():
    """The speed of a copy between the first two devices stands in the table."""
    accelerator.accelerator()
    assert circumstances(["fake"], 4)["devices"] == "fake:0, fake:1, fake:2, fake:3"
    assert circumstances(["fake"], 4)["copy between two"].endswith("GB/s")


def test_wrong_calls():
    """A recipe without data and too few steps are refused by name."""
    with pytest.raises(phalanx.UsageError, match="--steps is 1"):
        list(check(FAMILIES["mlp"].recipe(4), ["cpu"], 1))
    with pytest.raises(phalanx.UsageError, match="data=None"):
        list(check(phalanx.Recipe(FAMILIES["mlp"].make_model, None, FAMILIES["mlp"].loss_fn), ["cpu"], 3))
