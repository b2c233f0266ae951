"""The scripts of benchmarks/gpu, small and on the CPU: they run, notice what is wrong, and go on where they were."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
PARTS = {
    "bits": {"plain", "runs", "folded", "nccl", "spread", "world", "compiled"},
    "speed": {"mlp", "resnet50", "gpt2", "idle", "extras"},
    "cores": {"tiny", "gpt", "resnet18, torchvision", "BERT, transformers"},
    "probe": {"machine", "norm", "attention", "refused", "copies", "launches"},
}
CASES = """
import os, sys, time
sys.path.insert(0, {folder!r})
import common
from common import Case, Outcome

def fails():
    raise ValueError("on purpose")

rows = common.Rows("cases", again=False, wrong=False)
if sys.argv[2:]:
    sys.exit(common.run(rows, [Case("a", "dies", lambda: os._exit(9)), Case("a", "goes on", lambda: common.SAME)], 1.0))
hangs = Case("a", "hangs", lambda: time.sleep(300), 1.0)
cases = Case("a", "fails", fails), hangs, Case("a", "goes on", lambda: common.SAME)
sys.exit(common.finish(rows, common.run(rows, cases, float(sys.argv[1])), "the table"))
"""


def called(out, script, *arguments, **variables):
    """Exit status, and what was printed."""
    environment = {**os.environ, "CAMPAIGN_DEVICE": "cpu", "OUT": str(out), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr


def rows(out, name):
    """The rows that a script has written."""
    return [json.loads(line) for line in (out / f"{name}-cpu-small.jsonl").read_text().splitlines()][1:]


@pytest.mark.longest
@pytest.mark.parametrize("name", PARTS)
def test_a_script_runs_small(tmp_path, name):
    """It ends well with rows of every part, and a second call makes none of them again."""
    script = FOLDER / f"{name}.py"
    status, told = called(tmp_path, script)
    assert status == 0, told
    found = rows(tmp_path, name)
    assert {row["part"] for row in found} == PARTS[name]
    assert not {row["verdict"] for row in found} & {"failed", "different"}
    assert called(tmp_path, script)[0] == 0
    assert rows(tmp_path, name) == found


def test_workers_that_share_a_device_exchange_over_gloo(tmp_path):
    """What is planted for them has the name that the exchange looks up: it is taken only on a machine with one GPU."""
    script = tmp_path / "planted.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\nimport loops\n"
        "from phalanx.engines.devices import transport\n"
        "transport.BACKENDS.default_device_backend_map[loops.common.DEVICE.type] = 'nccl'\n"
        "assert loops.OverGloo(lambda: 3)() == 3\n"
        "print(transport.BACKENDS.default_device_backend_map[loops.common.DEVICE.type])"
    )
    assert called(tmp_path, script, CAMPAIGN_DEVICE="cuda:0") == (0, "gloo\n")


@pytest.mark.longest
def test_other_gradients_are_noticed(tmp_path):
    """Gradients of another sign make every comparison "different"; done again without them, all is the same."""
    script = FOLDER / "bits.py"
    assert called(tmp_path, script, "plain", CAMPAIGN_FAULT="1")[0] == 1
    assert {row["verdict"] for row in rows(tmp_path, "bits")} == {"different"}
    assert called(tmp_path, script, "plain")[0] == 1  # rows that are there stay
    assert called(tmp_path, script, "plain", "--wrong")[0] == 0
    assert {row["verdict"] for row in rows(tmp_path, "bits")} == {"same"}


@pytest.mark.long
def test_a_case_that_fails_or_hangs_is_a_row(tmp_path):
    """The cases after it are tried, those that are left for a later call too, and the exit status says so."""
    script = tmp_path / "cases.py"
    script.write_text(CASES.format(folder=str(FOLDER)))
    assert called(tmp_path, script, "0")[0] == 2
    assert rows(tmp_path, "cases") == []
    assert called(tmp_path, script, "1")[0] == 1
    found = {row["case"]: (row["verdict"], row["note"]) for row in rows(tmp_path, "cases")}
    assert found["fails"] == ("failed", "ValueError: on purpose (cases.py:8)")
    assert found["hangs"] == ("failed", "not done after 1 s")
    assert found["goes on"] == ("same", "")


@pytest.mark.long
def test_a_case_in_which_processes_die_is_left_out(tmp_path):
    """It is tried twice, as the first process may have been out of time; then it is a row, and the next is tried."""
    script = tmp_path / "cases.py"
    script.write_text(CASES.format(folder=str(FOLDER)))
    assert [called(tmp_path, script, "1", "dies")[0] for _ in range(3)] == [9, 9, 0]
    assert [(row["case"], row["verdict"]) for row in rows(tmp_path, "cases")] == [
        ("dies", "failed"),
        ("goes on", "same"),
    ]


@pytest.mark.long
def test_rows_of_another_machine_are_put_aside(tmp_path):
    """They are neither taken up nor lost, and a line that was cut is no row."""
    script, file = tmp_path / "cases.py", tmp_path / "cases-cpu-small.jsonl"
    script.write_text(CASES.format(folder=str(FOLDER)))
    assert called(tmp_path, script, "1")[0] == 1
    facts, *lines = file.read_text().splitlines()
    file.write_text("\n".join([facts, *lines[:2], lines[2][:20]]))
    assert called(tmp_path, script, "0")[0] == 1  # both rows are of what failed
    assert len(rows(tmp_path, "cases")) == 2
    file.write_text("\n".join([json.dumps({"torch": "1.0"}), *lines]))
    assert called(tmp_path, script, "0")[0] == 2
    assert rows(tmp_path, "cases") == []
    assert len(list(tmp_path.glob("cases-cpu-small.*.jsonl"))) == 1


@pytest.mark.long
def test_small_runs_are_not_saved(tmp_path):
    """What a run on the CPU measured is not put among the results."""
    target = tmp_path / "gpu.md"
    status, told = called(tmp_path, FOLDER / "probe.py", "machine", "--save", str(target))
    assert status == 1
    assert "nothing is saved" in told
    assert not target.exists()
