"""The command line as a user meets it: in a process of its own."""

import contextlib
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest

import phalanx
from phalanx.errors import UsageError
from tests.state.runs import ROOT

RECIPE = """
import torch, phalanx
random = torch.Generator().manual_seed(0)
x, y = torch.randn(64, 4, generator=random), torch.randn(64, 1, generator=random)
def error(output, target):
    return (output - target).abs().mean()
recipe = phalanx.Recipe(lambda: torch.nn.Linear(4, 1), (x, y), torch.nn.functional.mse_loss, replicas=4, epochs=3)
other = phalanx.Recipe(lambda: torch.nn.Linear(4, 1), (x, y), torch.nn.functional.mse_loss, replicas=2, steps=2)
evaluation = phalanx.Evaluation(error, (x, y))
"""
LOUD = """
import itertools, torch
calls = itertools.count()
def loud(output, target):
    if next(calls) == 20:
        print("ready", flush=True)
    return torch.nn.functional.mse_loss(output, target)
"""


def phalanx_command(*arguments, cwd, **options):
    command = [sys.executable, "-m", "phalanx", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500, check=False, **options)


@pytest.fixture
def recipe_file(tmp_path):
    """A file that defines two recipes and an evaluation."""
    (tmp_path / "job.py").write_text(RECIPE)
    return tmp_path / "job.py"


@pytest.mark.long
def test_train_prints_what_the_library_gives(recipe_file):
    """`phalanx train FILE` ends in the digest of `recipe.train()`, shows the metric, and exits with 0."""
    done = phalanx_command("train", "job.py", "--quiet", cwd=recipe_file.parent)
    assert done.returncode == 0, done.stderr
    namespace: dict = {}
    exec(RECIPE, namespace)
    expected = namespace["recipe"].train(evaluation=namespace["evaluation"])
    assert done.stdout.splitlines()[-1].split() == ["digest", expected.digest]
    assert "error" in done.stdout
    assert done.stderr == ""


def test_a_name_picks_another_recipe(here, recipe_file):
    """`FILE:NAME` trains that recipe: two steps of two replicas, in JSON for machines."""
    done = here("train", "job.py:other", "--quiet", "--json", cwd=recipe_file.parent)
    facts = json.loads(done.stdout)
    assert (facts["steps"], facts["replicas"], len(facts["digest"])) == (2, 2, 64)


def test_a_run_in_a_directory_says_where_it_went_on(here, recipe_file):
    """The same command again goes on from the snapshot and says so; when all is done it says that, and the digest."""
    command = ("train", "job.py:other", "--quiet", "--run-dir", "run", "--snapshot-every", "1")
    whole = here(*command, cwd=recipe_file.parent)
    again = here(*command, cwd=recipe_file.parent)
    longer = recipe_file.read_text().replace("steps=2", "steps=2 + 3")  # another size: Python's cache goes by that
    recipe_file.write_text(longer)
    further = json.loads(here(*command, "--json", cwd=recipe_file.parent).stdout)
    assert "resumed" not in whole.stdout
    assert "nothing was left to do" in again.stdout
    assert whole.stdout.splitlines()[-1] == again.stdout.splitlines()[-1]
    assert (further["resumed_from_step"], further["steps"]) == (2, 5)
    events = [json.loads(line) for line in (recipe_file.parent / "run" / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events if event["event"] != "snapshot"]
    assert kinds == ["start", "step", "step", "end", "resume", "end", "resume", "step", "step", "step", "end"]


@pytest.mark.long
def test_resume_readers_and_audit_are_those_of_train(here, recipe_file):
    """--resume no refuses a run that is there, anyway goes on with another recipe; audits keep the digest."""
    folder, command = recipe_file.parent, ("train", "job.py:other", "--quiet", "--run-dir")
    plain = here(*command, "run", cwd=folder).stdout.splitlines()[-1]
    watched = ("--workers", "2", "--readers", "0", "--audit", "1", "--resume", "yes")
    assert here(*command, "another", *watched, cwd=folder).stdout.splitlines()[-1] == plain
    refused = here(*command, "run", "--resume", "no", cwd=folder)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "resume is False" in refused.stderr
    recipe_file.write_text(recipe_file.read_text().replace("replicas=2, steps=2", "replicas=2, steps=3, lr=0.5"))
    refused = here(*command, "run", cwd=folder)
    assert (refused.returncode, "another recipe" in refused.stderr) == (2, True)
    assert "resume='anyway' (--resume anyway)" in refused.stderr
    with pytest.warns(UserWarning, match="another recipe"):
        further = json.loads(here(*command, "run", "--resume", "anyway", "--json", cwd=folder).stdout)
    assert (further["resumed_from_step"], further["steps"]) == (2, 3)


def test_a_run_that_was_stopped_early_is_told_of(here, recipe_file):
    """The summary names step and callback, and when nothing is done the second time, why: not that all is done."""
    stop = "callbacks = [phalanx.callbacks.EarlyStopping('error', patience=1, min_delta=100)]\n"
    recipe_file.write_text(RECIPE.replace("import torch, phalanx", "import torch, phalanx, phalanx.callbacks") + stop)
    command = ("train", "job.py", "--quiet", "--run-dir", "run")
    first, again = here(*command, cwd=recipe_file.parent), here(*command, cwd=recipe_file.parent)
    said = "at step 4 of 6 by EarlyStopping('error', patience=1)"
    assert [line.split(maxsplit=1)[1] for line in first.stdout.splitlines() if line.startswith("stopped ")] == [said]
    assert "nothing was left to do" not in first.stdout
    assert again.stdout.splitlines()[0] == "phalanx: this was done before; nothing was left to do"
    assert said in again.stdout
    assert json.loads(here(*command, "--json", cwd=recipe_file.parent).stdout)["stopped_early"] == said


def test_the_best_value_is_told_of(here, recipe_file):
    """What SaveBest kept is a row of the summary: metric, value and step, as print(result) has it."""
    keep = "callbacks = [phalanx.callbacks.SaveBest('error')]\n"
    recipe_file.write_text(RECIPE.replace("import torch, phalanx", "import torch, phalanx, phalanx.callbacks") + keep)
    done = here("train", "job.py", "--quiet", cwd=recipe_file.parent)
    namespace: dict = {}
    exec(recipe_file.read_text(), namespace)
    given = {name: namespace[name] for name in ("evaluation", "callbacks")}
    (best,) = [line for line in str(namespace["recipe"].train(**given)).splitlines() if line.startswith("best")]
    assert best.split()[1] == "error"
    assert best.split() in [line.split() for line in done.stdout.splitlines()]


def test_an_argument_written_as_an_option_gets_a_hint(here, recipe_file):
    """`--lr 0.1` is no option: the message says how arguments of a recipe are written."""
    done = here("train", "job.py", "--lr", "0.1", cwd=recipe_file.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert "written without dashes, as in lr=0.1" in " ".join(done.stderr.split())


@pytest.mark.long
def test_a_run_of_limited_time_says_by_its_status_that_it_goes_on(here, recipe_file):
    """75 until all steps are done, if there is a directory to go on from; without one the run is over."""
    command = ("train", "job.py", "--quiet", "--max-seconds", "1e-9")
    kept = [here(*command, "--run-dir", "run", cwd=recipe_file.parent).returncode for _ in range(7)]
    assert kept[0] == 75
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 0
    assert here(*command, cwd=recipe_file.parent).returncode == 0


def test_a_file_has_no_arguments_of_the_command(here, tmp_path):
    """A file that parses arguments gets its defaults; one that ends itself is refused in a sentence."""
    parsed = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', {})\nparser.parse_args()\n"
    )
    (tmp_path / "job.py").write_text(parsed.format("default=1") + RECIPE)
    assert here("train", "job.py", "--quiet", cwd=tmp_path).returncode == 0
    (tmp_path / "job.py").write_text(parsed.format("required=True") + RECIPE)
    done = here("train", "job.py", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "job.py ended itself with SystemExit(2) while it was loaded" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["ring", "ordered", "naive"])
def test_explain_shows_an_algorithm(here, tmp_path, name):
    """Every round in words, and how much travels; an unknown name is refused."""
    pytest.importorskip("phalanx.collectives")
    done = here("explain", name, "--participants", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "round 1 of" in done.stdout
    assert "times the data" in done.stdout
    wrong = here("explain", "star", cwd=tmp_path)
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
    assert "ring" in wrong.stderr


@pytest.mark.long
def test_train_draws_lines_and_a_picture(recipe_file):
    """Where there is no terminal, lines go to stderr; the picture goes where --plot says."""
    done = phalanx_command("train", "job.py", "--plot", "sub/loss.png", cwd=recipe_file.parent)
    assert "step 6/6" in done.stderr.splitlines()[-1]
    assert "\r" not in done.stderr
    assert (recipe_file.parent / "sub/loss.png").read_bytes().startswith(b"\x89PNG")
    assert "sub/loss.png" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nowhere.py"], ["FILE", "nowhere.py"]),
        (["train", "job.py:nothing"], ["nothing", "Recipe"]),
        (["train", "job.py", "--workers", "99"], ["workers", "99"]),
        (["train", "job.py", "--workers", "some"], ["workers", "some"]),
        (["train", "job.py", "--readers", "some"], ["readers", "some", "auto"]),
        (["train", "job.py", "--audit", "2"], ["audit", "2", "from 0 to 1"]),
        (["train", "job.py", "--audit", "often"], ["audit", "often", "from 0 to 1"]),
        (["train", "job.py", "--resume", "maybe"], ["--resume", "maybe", "yes", "no", "anyway"]),
        (["train", "job.py", "--resume", "no"], ["resume", "no run_dir"]),
        (["train", "job.py", "--plot", "loss.foo"], ["--plot", "loss.foo", ".png"]),
        (["demo", "mnist"], ["mnist", "digits"]),
    ],
)
def test_wrong_calls_end_in_one_sentence(here, recipe_file, arguments, words):
    """Exit code 2, nothing on stdout, one line on stderr that names the value: no traceback."""
    done = here(*arguments, cwd=recipe_file.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words)


@pytest.mark.long
def test_an_exception_in_user_code_is_shown_with_its_traceback(tmp_path):
    """Exit code 1; the user's own line is in the traceback, then one sentence with step and replica."""
    broken = RECIPE.replace("torch.nn.functional.mse_loss", "lambda output, target: 1 / 0")
    (tmp_path / "job.py").write_text(broken)
    done = phalanx_command("train", "job.py", "--quiet", cwd=tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "job.py" in done.stderr
    assert "step 0, replica 0" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_control_c_says_where_it_stopped(tmp_path):
    """Exit code 130; the digest printed is that of a whole step."""
    endless = RECIPE.replace("epochs=3", "steps=10**7").replace(
        "torch.nn.functional.mse_loss, replicas=4", "loud, replicas=4"
    )
    (tmp_path / "job.py").write_text(LOUD + endless)
    command = [sys.executable, "-m", "phalanx", "train", "job.py", "--quiet"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    words = errors.replace(",", "").split()
    steps, digest = int(words[words.index("steps") - 1]), words[-1]
    namespace: dict = {}
    exec(RECIPE.replace("epochs=3", f"steps={steps}"), namespace)
    assert namespace["recipe"].train().digest == digest


@pytest.mark.campaign
def test_the_demo_reaches_its_accuracy(tmp_path):
    """It ends with an accuracy worth showing, a digest, and a picture whose path is printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = phalanx_command("demo", "digits", "--quiet", "--json", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["metrics"]["accuracy"] >= 0.97
    assert len(facts["digest"]) == 64
    assert (tmp_path / facts["picture"]).stat().st_size > 10_000


def test_version_and_help(here):
    """`phalanx --version` prints the version; help lists the commands and the exit codes."""
    assert here("--version", cwd=".").stdout == f"phalanx {phalanx.__version__}\n"
    text = here("--help", cwd=".").stdout
    assert all(word in text for word in ("train", "demo", "Exit codes", "130"))
    assert "handwritten digits" in here("demo", "--help", cwd=".").stdout


@pytest.mark.campaign
@pytest.mark.parametrize(
    "column",
    ["plain 1 thread", "DDP W=2", "R=2", "W=2"],
)
def test_the_benchmark_measures_a_column(column):
    """benchmarks/step.py gives seconds a step for a model, for the plain loop, for DDP and for phalanx."""
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "step.py"
    command = [sys.executable, script, "--model", "tiny", "--column", column, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert 0 < json.loads(done.stdout.splitlines()[-1])["seconds"] < 1


STEP = {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (STEP, True),
        (STEP | {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "4"}, True),  # without RANK
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, False),  # a batch script, or a shell of salloc
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, False),  # a shell of srun --pty keeps SLURM_NTASKS with --preserve-env
        (STEP | {"WORLD_SIZE": "1"}, False),
        (STEP | {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, False),
    ],
)
def test_tasks_of_srun_that_do_not_know_each_other(monkeypatch, given, refused):
    """Each would train alone, into one run_dir: refused in a step of several tasks that nothing makes a world of."""
    from phalanx.cli import app

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="srun has started 4 tasks") if refused else contextlib.nullcontext():
        app._refuse_unconnected_tasks()


def test_the_line_for_slurm(here, recipe_file, monkeypatch, tmp_path):
    """It is that of docs/hosts.md, and what it has bash run sets rank, size and address from what a step knows."""
    from phalanx.cli.app import SRUN

    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = here("train", "job.py:other", cwd=recipe_file.parent)
    assert done.returncode == 2
    assert SRUN in done.stderr
    page = (ROOT / "docs" / "hosts.md").read_text()
    shown = page[page.index(SRUN.partition(" bash")[0]) :].partition("```")[0]
    assert " ".join(shown.split()) == SRUN
    for name, text in {"scontrol": "echo host7; echo host8", "phalanx": "env; echo $@"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    bash = shlex.split(shown)[3:]
    ran = subprocess.run(
        bash, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True, check=True
    )
    lines = ran.stdout.splitlines()
    assert {"MASTER_ADDR=host7", "MASTER_PORT=29500", "RANK=1", "WORLD_SIZE=4"} <= set(lines)
    assert lines[-1] == "train job.py --run-dir /shared/runs/a"
