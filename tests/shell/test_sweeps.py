"""Job files with a function that takes arguments, and ``phalanx runs``, which lists what came of them."""

import json
import os
import subprocess
import sys

import pytest
import torch

import phalanx
from phalanx.checkpoint.directory import LOG
from phalanx.cli.common import load_recipe
from phalanx.lab.sweeps import rows_of, table
from tests.shell.test_command_line import phalanx_command

JOB = """
import torch, phalanx
x = torch.arange(80.0).reshape(40, 2) / 80
y = torch.arange(40) % 3
def accuracy(output, target):
    return (output.argmax(-1) == target).float().mean()
evaluation = phalanx.Evaluation(accuracy, (x, y))
def recipe(lr=1e-3, seed=0, nesterov=False, kind="sgd", patience=None, sizes=(2, 3)):
    made = phalanx.Recipe(
        lambda: torch.nn.Linear(*sizes), (x, y), torch.nn.functional.cross_entropy, replicas=4, batch_size=8, steps=10,
        seed=seed, optimizer=lambda named: torch.optim.SGD(named, lr=lr, momentum=0.9, nesterov=nesterov))
    if patience is None:
        return made
    return made, evaluation, [phalanx.callbacks.EarlyStopping("accuracy", patience=patience, min_delta=1)]
def alone(steps=2):
    return recipe().replace(steps=steps), phalanx.Evaluation({"error": accuracy}, (x, y))
def nothing():
    return 5
def demanding(lr):
    return recipe(lr)
plain = recipe()
"""


@pytest.fixture
def job(tmp_path):
    """A file with several functions that return a recipe."""
    (tmp_path / "job.py").write_text(JOB)
    return str(tmp_path / "job.py")


def trained(here, folder, run, *arguments):
    done = here("train", "job.py", *arguments, "--run-dir", run, "--quiet", "--workers", "1", cwd=folder)
    return done.stdout.split()[-2:], done.stderr


def test_arguments_are_those_of_the_function(here, job, tmp_path):
    """`lr=0.1 seed=3` trains recipe(lr=0.1, seed=3); others end in other bits, and without any its defaults hold."""
    one, errors = trained(here, tmp_path, "a", "lr=0.1", "seed=3")
    assert not errors
    namespace: dict = {}
    exec(JOB, namespace)
    options = {"engine": "inline", "evaluation": namespace["evaluation"]}
    assert one == ["digest", namespace["recipe"](lr=0.1, seed=3).train(**options).digest]
    assert trained(here, tmp_path, "b", "lr=0.1")[0] != one
    assert trained(here, tmp_path, "c")[0] == ["digest", namespace["recipe"]().train(**options).digest]


def test_what_is_typed(job):
    """Text becomes what the default is; None takes any plain value; evaluation and callbacks may come, too."""
    recipe, evaluation, callbacks = load_recipe(job, ["patience=2", "seed=7", "nesterov=TRUE", "lr=1e-1"])
    assert (recipe.seed, type(callbacks[0]).__name__, type(evaluation).__name__) == (7, "EarlyStopping", "Evaluation")
    recipe, evaluation, callbacks = load_recipe(f"{job}:alone", ["steps=5"])
    assert (recipe.steps, callbacks) == (5, ())
    assert load_recipe(job, {"patience": None})[2] == ()
    assert load_recipe(job, ["patience=none"])[2] == ()


WRONG = {
    ("recipe", "lr=fast"): r"lr is 'fast', which is no float; its arguments are lr=0.001 \(float\), seed=0 \(int\)",
    ("recipe", "seed=1.5"): "seed is '1.5', which is no int",
    ("recipe", "nesterov=2"): "nesterov is '2', which is no bool: write true or false",
    ("recipe", "nesterov=none"): "nesterov is 'none', which is no bool",
    ("recipe", "sizes=3"): "sizes is '3', which is no tuple",
    ("recipe", "rate=1"): r"rate is no argument of .*job.py:recipe; its arguments are lr=0.001",
    ("recipe", "lr"): "'lr' is no argument of a recipe; give name=value",
    ("plain", "lr=1"): "has no function plain, and only such a one takes arguments",
    ("nothing", ""): r"nothing returned int; it must return a phalanx.Recipe, or \(recipe, evaluation\)",
    ("nothing", "lr=1"): "it has no arguments",
    ("demanding", ""): "has the argument lr without a default",
    ("accuracy", ""): "has the argument output without a default",
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(job, case):
    """A wrong name or type is refused, and the message lists the arguments."""
    name, argument = case
    with pytest.raises(phalanx.UsageError, match=WRONG[case]):
        load_recipe(f"{job}:{name}", [argument] if argument else ())


def test_an_argument_that_is_given_twice(job):
    """It is refused by name, even with the same value; the last one does not win in silence."""
    for twice in (["lr=1", "lr=2"], ["lr=1", "seed=3", "lr=1"]):
        with pytest.raises(phalanx.UsageError, match="lr is given 2 times; give it once"):
            load_recipe(job, twice)


def test_a_run_knows_its_arguments(here, job, tmp_path):
    """verify, certify and replay call the function as the run did; a resume with other arguments is refused."""
    trained(here, tmp_path, "run", "lr=0.1", "seed=3")
    for done in (here("verify", "run", "--trust", cwd=tmp_path), here("verify", "run", "job.py", cwd=tmp_path)):
        assert done.stdout.startswith("the same: 10 steps")
    assert "seed is 0 here, and 3 there" in trained(here, tmp_path, "run", "lr=0.1")[1]
    assert here("verify", "run", "job.py", cwd=tmp_path).returncode == 0  # as before the refusal
    assert here("replay", "run", "--recipe", "job.py", "--step", "1", cwd=tmp_path).returncode == 0
    assert here("certify", "run", "--recipe", "job.py", "-o", "paper.json", cwd=tmp_path).returncode == 0
    assert here("verify", "paper.json", "job.py", cwd=tmp_path).returncode == 0
    claim = json.loads((tmp_path / "paper.json").read_text())
    (tmp_path / "paper.json").write_text(json.dumps({**claim, "arguments": None}))
    assert here("verify", "paper.json", "job.py", cwd=tmp_path).returncode == 1


@pytest.mark.long
def test_a_run_that_a_script_began_or_goes_on_with(here, job, tmp_path):
    """The arguments that the shell noted stay; of a run that nobody noted them for, verify takes them."""
    trained(here, tmp_path, "run", "lr=0.1", "seed=3", "--max-seconds", "0.001")
    script = "from job import recipe\nfor run in 'run', 'other': recipe(0.1, 3).train(run_dir=run, engine='inline')"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    assert here("verify", "run", "job.py", cwd=tmp_path).returncode == 0
    assert here("verify", "other", "job.py", cwd=tmp_path).returncode == 2
    assert here("verify", "other", "job.py", "lr=0.1", "seed=3", cwd=tmp_path).returncode == 0
    assert "lr is given 2 times" in here("verify", "other", "job.py", "lr=0.1", "lr=0.2", cwd=tmp_path).stderr
    script = "from job import recipe; recipe(0.5).train(run_dir='run', engine='inline', resume='anyway')"
    subprocess.run([sys.executable, "-c", script.replace("0.5)", "0.5).replace(steps=12)")], cwd=tmp_path, check=True)
    (row,) = json.loads(here("runs", "run", "--json", cwd=tmp_path).stdout)
    assert row["arguments"] == {}  # it is another recipe


@pytest.mark.long
def test_check_takes_arguments(here, job, tmp_path):
    """The new process of check has the arguments, too."""
    done = here("check", "job.py", "lr=0.1", "--steps", "2", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["same"]
    assert len({row["digest"] for row in told["rows"]}) == 1
    wanted = [load_recipe(job, given)[0].replace(steps=2).train(engine="inline").digest for given in (["lr=0.1"], ())]
    assert wanted[0] == told["rows"][0]["digest"] != wanted[1]


def test_runs_are_listed(here, job, tmp_path):
    """A row for each run, with its arguments, values and state; the best by the metric has a star."""
    for run, *arguments in (("runs/a", "lr=0.01"), ("runs/b", "lr=1.0", "seed=3"), ("runs/c", "patience=1")):
        trained(here, tmp_path, run, *arguments)
    rows = json.loads(here("runs", "runs", "--json", cwd=tmp_path).stdout)
    assert [row["run"] for row in rows] == ["a", "b", "c"]
    assert [row["arguments"]["lr"] for row in rows] == [0.01, 1.0, 0.001]
    assert [row["steps"] for row in rows] == [10, 10, 10]
    assert next(table([{**rows[0], "arguments": {"steps": 5, "lr": 1}}]))[:3] == ["run", "argument steps", "lr"]
    assert {row["state"] for row in rows} == {"finished"}
    values = [row["best"]["value"] for row in rows]
    assert [row["best_of_all"] for row in rows].index(True) == values.index(max(values))
    lines = here("runs", "runs", cwd=tmp_path).stdout.splitlines()
    assert lines[0].split()[:3] == ["run", "lr", "seed"]
    assert [" *" in line for line in lines[1:]] == [row["best_of_all"] for row in rows]
    (alone,) = rows_of(tmp_path / "runs" / "a")
    assert (alone["run"], alone["best_of_all"], alone["metrics"]) == (".", True, rows[0]["metrics"])
    others = [row["run"] for row in rows if not row["best_of_all"]]
    some = rows_of(tmp_path / "runs", others)  # of a sweep beside other runs
    assert ([row["run"] for row in some], sum(row["best_of_all"] for row in some)) == (others, 1)
    assert "there is no run" in here("runs", ".", cwd=tmp_path).stderr


@pytest.mark.long
def test_values_that_are_paths(here, job, tmp_path):
    """A folder has % in place of a slash; the same command goes on there, and arguments are as they were given."""
    line = ("train", "job.py", "kind=sets/a,sets/b", "--jobs", "2", "--run-dir", "runs", "--json")
    for _ in range(2):
        rows = json.loads(here(*line, cwd=tmp_path).stdout)
        kinds = {row["run"]: row["arguments"]["kind"] for row in rows}
        assert kinds == {"kind=sets%a": "sets/a", "kind=sets%b": "sets/b"}
    assert sorted(os.listdir(tmp_path / "runs")) == list(kinds)


@pytest.mark.long
def test_a_run_that_ended_in_nan_says_so(tmp_path):
    """The last values are shown, not the last finite ones; the best is one that was. JSON has a text for NaN."""
    x, y = torch.randn(16, 4), torch.zeros(16, dtype=torch.long)

    def loss(output, target):
        return output.sum() * (1.0 if phalanx.current_step() < 2 else float("nan"))

    job = phalanx.Recipe(lambda: torch.nn.Linear(4, 2), (x, y), loss, batch_size=8, epochs=2, on_nonfinite="ignore")
    due = phalanx.Evaluation({"val_loss": lambda output, target: output.sum()}, (x, y))
    job.train(workers=1, run_dir=tmp_path / "runs" / "a", evaluation=due, progress=False)
    (row,) = rows_of(tmp_path / "runs")
    assert [str(row["loss"]), str(row["metrics"]["val_loss"])] == ["nan", "nan"]
    assert row["best"]["steps"] == 2
    done = phalanx_command("runs", "runs", "--json", cwd=tmp_path)
    assert json.loads(done.stdout, parse_constant=pytest.fail)[0]["loss"] == "nan"


def test_states_of_runs(job, tmp_path):
    """Running while somebody has the lock; else as the log says; without metrics the best is that of the loss."""
    recipe = load_recipe(job)[0]

    def state():
        (row,) = rows_of(tmp_path / "runs")
        return row["state"]

    options = {"run_dir": tmp_path / "runs" / "a", "engine": "inline"}
    with recipe.start(**options) as run:
        assert state() == "running"
        next(run)
        assert state() == "running"
    assert state() == "interrupted"
    (tmp_path / "runs" / "a" / "lock").unlink()
    assert state() == "interrupted"
    assert not (tmp_path / "runs" / "a" / "lock").exists(), "looking writes nothing"

    with recipe.start(**options) as run:
        run.stop("me")
        run.finish()
    assert state() == "stopped early by me"
    recipe.train(**options)
    assert state() == "finished"
    (row,) = rows_of(tmp_path / "runs")
    assert (row["best"]["name"], row["metrics"], row["arguments"]["seed"]) == ("loss", {}, 0)
    with open(tmp_path / "runs" / "a" / LOG, "a") as log:
        log.write(json.dumps({"event": "resume", "step": 10}) + "\n")
        log.write(json.dumps({"event": "error", "error": "WorkerError"}) + "\n")
    assert state() == "failed: WorkerError"
    os.remove(tmp_path / "runs" / "a" / LOG)
    with pytest.raises(phalanx.UsageError, match="there is no run"):
        rows_of(tmp_path / "runs")
