"""A run may come from anywhere: what its files name is executed only if the user names it, too, or agrees."""

import contextlib
import hashlib
import io
import itertools
import json
import os
import pathlib
import shlex
import shutil
import sys

import pytest
import torch
from typer.testing import CliRunner

import phalanx
from phalanx.cli.app import app
from phalanx.cli.common import load_recipe
from phalanx.errors import PhalanxError
from phalanx.proof.replay import debugged
from phalanx.surroundings.presence import printable

JOB = """
import torch, phalanx
x = torch.arange(80.0).reshape(40, 2) / 80
y = torch.arange(40) % 3
def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()
def recipe(lr=0.01, name="a"):
    made = phalanx.Recipe(lambda: torch.nn.Linear(2, 3), (x, y), torch.nn.functional.cross_entropy, replicas=4,
                          batch_size=8, steps=4, lr=lr)
    return made, phalanx.Evaluation({"accuracy": accuracy}, (x, y), every_steps=2)
"""
MODULE = "named_by_a_run"
RECORDS = "chain.records.jsonl"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a space and a quote in its name, to work in, with a recipe; commands and files may write to sys."""
    place = tmp_path / "a user's"
    place.mkdir()
    (place / "job.py").write_text(JOB)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return place


@pytest.fixture
def command(here, folder):
    """``command(line)``: what the words of a line come to, there."""
    return lambda line: here(*shlex.split(line), cwd=folder)


@pytest.fixture
def mark(folder, monkeypatch):
    """What appears once the module or file ``MODULE`` is executed."""
    left = folder / "mark"
    (folder / f"{MODULE}.py").write_text(f"import pathlib\npathlib.Path({str(left)!r}).touch()\n{JOB}")
    monkeypatch.syspath_prepend(folder)
    yield left
    sys.modules.pop(MODULE, None)


def rewritten(path, change):
    """The file with each line changed, or all of it where it is one JSON value."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    path.write_text("".join(json.dumps(change(json.loads(line))) + "\n" for line in lines))


def naming(run, origin):
    """The run says that its recipe is there."""
    rewritten(pathlib.Path(run, RECORDS), lambda line: {**line, "origin": origin} if "origin" in line else line)


COMMANDS = ["verify run", "replay run --step 1 --replica 2", "certify run -o 'a paper.json'"]


@pytest.mark.long
@pytest.mark.parametrize("line", COMMANDS)
def test_a_run_is_refused_with_a_command_that_works(command, mark, line):
    """Without a terminal nothing is executed, and the status is 2; the command that is printed does it, or --trust."""
    command("train job.py lr=0.02 --run-dir run --quiet")
    naming("run", f"{MODULE}.py:recipe")
    refused = command(line)
    assert (refused.returncode, refused.stdout, mark.exists()) == (2, "", False)
    assert f"{MODULE}.py:recipe for the recipe; what a run names is executed only if you say so" in refused.stderr
    assert command(refused.stderr.partition(": phalanx ")[2]).returncode == 0
    assert mark.exists()
    mark.unlink()
    assert command(f"{line} --trust").returncode == 0
    assert mark.exists()
    mark.unlink()
    assert command(f"{line}{' --recipe' * ('verify' not in line)} job.py").returncode == 0
    assert not mark.exists()


def test_without_a_file_that_is_there_the_command_has_a_gap(command, folder):
    """A file that is gone, or that a terminal could not show, is for the user to find."""
    command("train job.py --run-dir run --quiet")
    for name in ("gone.py", "odd\x1b[2J.py"):
        naming("run", f"{name}:recipe")
        (folder / "odd\x1b[2J.py").write_text(JOB)
        told = command("verify run --steps 1:2").stderr
        assert told.endswith("say where it is: phalanx verify run --steps 1:2 FILE[:NAME]\n")
        assert f"{printable(name)}:recipe" in told
        assert "\x1b" not in told


@pytest.mark.long
def test_diff_compares_what_needs_no_code(command, mark):
    """It says what was left out, and the command that computes it: with the file of both, or --trust for two."""
    command("train job.py --run-dir a --quiet")
    command("train job.py lr=0.02 --run-dir b --quiet")
    shutil.copytree("a", "same")
    for run in ("a", "b", "same"):
        naming(run, f"{MODULE}.py:recipe")
    same = command("diff a same --trust")
    assert (same.stdout, same.stderr, mark.exists()) == ("the same\n", "", False)  # no code is needed
    short = command("diff a b")
    assert (short.returncode, mark.exists()) == (1, False)
    assert "a and b differ first in step 0: update" in short.stdout
    assert "phalanx: no step was computed again: a names /" in short.stderr
    line = short.stderr.partition(": phalanx ")[2]
    assert line.startswith("diff --recipe ")
    whole = command(line)
    assert (whole.returncode, whole.stderr, mark.exists()) == (1, "", True)
    assert "no recipe is at hand" in short.stdout
    assert "no recipe is at hand" not in whole.stdout
    naming("b", "job.py:recipe")
    line = command("diff a b").stderr.partition(": phalanx ")[2]
    assert line == "diff --trust a b\n"
    mark.unlink()
    assert command(line).stdout == whole.stdout
    assert mark.exists()
    mark.unlink()
    assert command("diff a b --recipe job.py").stdout == whole.stdout
    assert not mark.exists()


@pytest.mark.long
def test_at_a_terminal_it_is_asked(command, folder, monkeypatch):
    """The question shows path, owner and whether the hash is the recorded one; only yes executes the file."""
    command("train job.py --run-dir run --quiet")
    command("train job.py lr=0.02 --run-dir other --quiet")
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor in (0, 2))

    def asked(line, answer):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        return command(line)

    for answer, status in (("n\n", 2), ("\n", 2), ("", 2), ("y\n", 0), ("YES\n", 0)):
        done = asked("verify run --steps 1:2", answer)
        assert done.returncode == status
        facts = f"{folder}/job.py:recipe for the recipe. It belongs to {folder.owner()}, and its hash is the recorded"
        assert facts in done.stderr
        assert done.stdout.startswith("the same") == (status == 0)
    with (folder / "job.py").open("a") as file:
        file.write("# edited\n")
    monkeypatch.setattr(pathlib.Path, "owner", lambda path: {}[path])  # an owner without a name
    done = asked("replay run --step 1", "yes\n")
    assert (done.returncode, f"uid {os.getuid()}, and its hash is NOT the recorded one" in done.stderr) == (0, True)
    told = asked("diff run other --json", "y\n")
    assert (told.stderr.count("NOT the recorded one"), told.stderr.count("Execute it?")) == (2, 1)
    assert "no recipe is at hand" not in json.loads(told.stdout)["text"]
    assert asked("diff run other", "n\n").stdout.endswith("nothing was computed again\n")
    assert "Execute it?" not in asked("verify run job.py --steps 1:2", "").stderr


def test_the_hash_of_the_file_is_recorded(command, folder):
    """The chain's record has the hash of the file that it names, and none where it names none."""
    command("train job.py --run-dir run --quiet")
    load_recipe("job.py")[0].train(run_dir="other", progress=False)
    phalanx.Recipe(
        lambda: torch.nn.Linear(2, 3), (torch.ones(8, 2), torch.ones(8, 3)), torch.nn.functional.mse_loss, steps=1,
        replicas=2, batch_size=4,
    ).train(run_dir="nameless", progress=False)  # fmt: skip
    wanted = hashlib.sha256((folder / "job.py").read_bytes()).hexdigest()
    for run, source in (("run", wanted), ("other", wanted), ("nameless", None)):
        first = json.loads(pathlib.Path(run, RECORDS).read_text().splitlines()[0])
        assert (first["source"], first["origin"] is None) == (source, source is None)


def test_the_debugger_reads_no_settings_of_a_folder(tmp_path, monkeypatch, capsys):
    """A .pdbrc in the working directory or at home is not read, neither at a line nor after an error."""

    def user_code():
        raise ValueError("its error")

    def failing():
        try:
            user_code()
        except ValueError as error:
            raise PhalanxError("it failed") from error

    (tmp_path / ".pdbrc").write_text("p 'the file ' + 'was read'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO("p 'a ' + 'line'\nc\np 'its ' + 'end'\nq\n"))
    with pytest.raises(PhalanxError, match="it failed"):
        debugged(failing, [user_code.__code__])
    told = capsys.readouterr().out
    assert "'a line'" in told  # stopped at the line
    assert "'its end'" in told  # and after the error
    assert "the file was read" not in told


# All files of a run that have text of any kind in them, with the fields of theirs.
FIELDS = [
    *((RECORDS, name) for name in ("origin", "arguments", "source", "environment", "recipe", "leaves")),
    *(("events.jsonl", name) for name in ("event", "why", "phase", "batch", "metrics")),
    *(("chain.jsonl", name) for name in ("link", "samples")),
    *(("next.json", name) for name in ("link", "replica")),
    *(("state.json", name) for name in ("environment", "facts", "recipe", "hashes", "metrics")),
    *(("paper.json", name) for name in ("origin", "arguments", "environment", "recipe", "device", "chain")),
    ("weights.safetensors", ""), ("training.safetensors", ""),
]  # fmt: skip
LINES = [
    "diff run other", "diff other run --ops", "verify run", "verify paper.json --trust", "replay run --step 1",
    "replay run --failure", "certify run", "export run", "runs .", "report run",
    "diff run other --recipe job.py", "verify run job.py", "verify paper.json job.py", "certify run --recipe job.py",
    "replay run --step 3 --recipe job.py", "replay run --failure --recipe job.py", "train job.py --run-dir run",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs, the first with a failure in its log, and a certificate."""
    place = tmp_path_factory.mktemp("trained")
    (place / "job.py").write_text(JOB)
    job, evaluation, _ = load_recipe(str(place / "job.py"), ["name=b"])
    for name, one in (("run", job), ("other", load_recipe(str(place / "job.py"), ["lr=0.02"])[0])):
        one.train(run_dir=place / name, evaluation=evaluation, snapshot_every=2, progress=False)
    with (place / "run" / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"event": "error", "step": 2, "replica": 1, "why": "", "phase": "", "batch": None}) + "\n"
        )
    words = ["certify", str(place / "run"), "--recipe", str(place / "job.py"), "-o", str(place / "paper.json")]
    assert CliRunner().invoke(app, words).exit_code == 0
    return place


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of all that is odd in such a run
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize(("file", "field"), FIELDS)
def test_no_string_of_a_run_is_imported_or_executed(trained, folder, mark, file, field, first):
    """Whatever field of whatever file names a module, a class or a file: no command and no function executes it."""
    words = [MODULE, f"{MODULE}.recipe", f"{folder}/{MODULE}.py:recipe"]
    for name in ("run", "other", "paper.json"):
        (shutil.copytree if os.path.isdir(trained / name) else shutil.copy)(trained / name, name)
    plant(file, field, itertools.cycle(words[first:] + words[:first]))
    for line in LINES:
        CliRunner().invoke(app, shlex.split(line))
        assert not mark.exists(), line
    job, evaluation, _ = load_recipe("job.py")
    for call in FUNCTIONS:
        with contextlib.suppress(PhalanxError):
            call(job, evaluation)
        assert not mark.exists()


FUNCTIONS = [
    lambda job, evaluation: phalanx.load("run"),
    lambda job, evaluation: phalanx.diff("run", "other"),
    lambda job, evaluation: phalanx.diff("run", "other", recipes=(job, job), operations=True),
    lambda job, evaluation: phalanx.verify(job, "run", progress=False),
    lambda job, evaluation: phalanx.replay(job, "run", progress=False),
    lambda job, evaluation: job.train(warm_start="run", progress=False),
    lambda job, evaluation: job.train(run_dir="run", resume="anyway", evaluation=evaluation, progress=False),
]


def test_the_strings_would_be_noticed(trained, folder, mark):
    """Twin: the same file, executed after the user agreed, leaves its mark."""
    shutil.copytree(trained / "run", "run")
    naming("run", f"{MODULE}.py:recipe")
    CliRunner().invoke(app, ["replay", "run", "--step", "1", "--trust"])
    assert mark.exists()


def plant(file, field, words):
    """Put words in place of the strings in a field; checksums of files are right again."""
    for path in [pathlib.Path(file)] if file == "paper.json" else pathlib.Path("run").rglob(file):
        if path.suffix == ".safetensors":
            data = path.read_bytes()
            end = 8 + int.from_bytes(data[:8], "little")
            header = json.dumps({next(words): known for known in json.loads(data[8:end]).values()}).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
        else:
            rewritten(path, lambda line: planted_in(line, field, words) if field in line or file != RECORDS else line)
        if path.name == "state.json":
            seal = path.with_name("manifest.json")
            rewritten(
                seal, lambda facts, path=path: {**facts, path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
            )


def planted_in(line, field, words):
    return {**line, field: planted(line.get(field), words)}


def planted(value, words):
    """The value with words for its strings; one word for an empty value."""
    if isinstance(value, dict) and value:
        return {name: planted(item, words) for name, item in value.items()}
    if isinstance(value, list) and value:
        return [planted(item, words) for item in value]
    return value if isinstance(value, (bool, int, float)) else next(words)
