"""What others wrote into a run's directory, or named: it reaches no terminal as it is, and ends no list of runs."""

import json
import os
import re
import shutil
import sys
import warnings
from types import SimpleNamespace

import pytest

import phalanx
from phalanx.checkpoint.chain import CHAIN, records_of
from phalanx.checkpoint.directory import LOG, events
from phalanx.lab import pages
from phalanx.lab.sweeps import rows_of
from phalanx.run import plots
from phalanx.run.observers import ProgressBar
from phalanx.seams.records import Evaluated, Progress, Seen, StepReport
from phalanx.surroundings.presence import printable, say
from tests.callbacks.jobs import evaluation, recipe
from tests.shell.test_command_line import phalanx_command

NASTY = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31m\r\x85\x7f\u202e\ud800"  # wipes, colours, begins the line again, turns it around
)
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x1b[31m\r\x85\x7f\u202e\ud800"
DEPTH = "[" * 100_000
ODD = [10**400, 1e308, -1e308, 5e-324, float("inf"), "x", [1], {}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with two runs of ten steps."""
    folder = tmp_path_factory.mktemp("runs")
    recipe(epochs=2).train(run_dir=folder / "a", evaluation=evaluation(), engine="inline")
    shutil.copytree(folder / "a", folder / "b")
    return folder


@pytest.fixture
def runs(whole, tmp_path):
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "runs")


def step_of(runs, **changed):
    """The last step's line as the next step's, with some fields changed; those that are ... are left out."""
    line = next(event for event in events(runs / "a", newest_first=True) if event["event"] == "step")
    return {name: value for name, value in {**line, "step": 10, **changed}.items() if value is not ...}


FORGED = {
    "no JSON": "x",
    "a list": [1],
    "deep": DEPTH,
    "no event": {"step": 3, "time": 1},
    "an event that is a list": {"event": [1], "step": 3},
    "a start without a step": {"event": "start"},
    "a death at a text": {"event": "death", "step": "x", "worker": 0, "why": "w"},
    "an end of a text": {"event": "end", "step": 10, "total": "x"},
    "a snapshot that took a list": {"event": "snapshot", "step": 4, "seconds": [1]},
    "a step that is a list": {"step": [1]},
    "a step of many digits": {"step": 10**400},
    "a step far away": {"step": 1 << 40},
    "a time that is a text": {"time": "x"},
    "a time after all calendars": {"time": 1e300},
    "samples that are a text": {"samples": "x"},
    "no samples": {"samples": ...},
    "seconds that are a list": {"seconds": [1]},
    "metrics that are a list": {"metrics": [1]},
    "losses that are a text": {"losses": "loss"},
}


@pytest.mark.parametrize("case", FORGED)
def test_a_line_that_is_no_event_is_skipped(runs, case):
    """The list of runs, and all that a page has, are what they are without the line; other runs are there."""
    before = rows_of(runs), pages.read(runs / "a")
    line = FORGED[case]
    if isinstance(line, dict) and "event" not in line and case != "no event":
        line = step_of(runs, **line)
    with open(runs / "a" / LOG, "a") as log:
        log.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    assert (rows_of(runs), pages.read(runs / "a")) == before


def test_a_line_that_is_an_event_counts(runs):
    """Twin: the same line with nothing wrong in it is the eleventh step, and one with a null is as one without."""
    for number, changed in ((10, {}), (11, {"metrics": None, "step": 11})):
        with open(runs / "a" / LOG, "a") as log:
            log.write(json.dumps(step_of(runs, **changed)) + "\n")
        assert [row["steps"] for row in rows_of(runs)] == [number + 1, 10]


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(ODD)))
def test_odd_values_are_not_drawn(runs, tmp_path, number):
    """A loss or metric of any value leaves a page and a list."""
    value = ODD[number]
    with open(runs / "a" / LOG, "a") as log:
        log.write(json.dumps(step_of(runs, loss=value, grad_norm=value, metrics={"accuracy": value})) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (row,) = pages.report([runs / "a"], tmp_path / "page.html")
    assert (row["steps"], len(rows_of(runs))) == (11, 2)


@pytest.mark.long
def test_text_of_others_has_no_escapes(here, runs):
    """Names of metrics, of runs and causes are shown with escapes spelled, in tables, pages and pictures."""
    (runs / "b").rename(runs / f"{NASTY[:-1]}b")
    forged = [step_of(runs, metrics={f"{NASTY}acc\n": 0.5, r"$\frac{": 0.1, "$x$": 1.0})]
    forged += [{"event": "error", "error": f"Wo{NASTY}e"}]
    with open(runs / "a" / LOG, "a") as log:
        log.write("".join(json.dumps(line) + "\n" for line in forged))
    listed = here("runs", ".", cwd=runs)
    reported = here("report", "a", cwd=runs)
    page = (runs / "report.html").read_text()
    for text in (listed.stdout + listed.stderr, reported.stdout + reported.stderr, page):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)
        assert f"{SHOWN}acc\\n" in text
    assert f"{SHOWN[:-6]}b" in listed.stdout
    assert f"failed: Wo{SHOWN}e" in listed.stdout
    assert r"$\frac{" in page
    assert len(listed.stdout.splitlines()) == 3


def test_what_is_printable():
    """Twin: letters of all scripts, signs and pictures are shown as they are, and a line's end is none in a name."""
    assert printable("loss 0.5, Größe, 損失, ∑ 🙂 \\x1b") == "loss 0.5, Größe, 損失, ∑ 🙂 \\x1b"
    assert printable(NASTY + "\n\t") == SHOWN + r"\n\t"


JOB = """
import torch, phalanx
x = torch.arange(80.0).reshape(40, 2) / 80
def nasty(output, target):
    return output.sum()
def recipe(fails=False):
    def loss(output, target):
        if fails:
            raise ValueError("first\\x1b[2J\\nsecond\\r")
        return torch.nn.functional.cross_entropy(output, target)
    return phalanx.Recipe(lambda: torch.nn.Linear(2, 3), (x, torch.arange(40) % 3), loss, replicas=2, batch_size=8,
                          steps=2)
evaluation = phalanx.Evaluation({"\\x1b[2Jacc": nasty}, (x, torch.arange(40) % 3))
"""


def test_errors_and_progress_have_no_escapes(here, tmp_path):
    """What an error says keeps its lines; progress has a metric's name spelled, and so has the result."""
    (tmp_path / "job.py").write_text(JOB)
    failed = here("train", "job.py", "fails=true", "--workers", "1", "--quiet", cwd=tmp_path)
    assert failed.returncode == 1
    assert "\x1b" not in failed.stderr
    assert "ValueError: first\\x1b[2J\nsecond\\r" in failed.stderr
    done = here("train", "job.py", "--workers", "1", cwd=tmp_path)
    assert "\x1b" not in done.stdout + done.stderr
    assert r", \x1b[2Jacc " in done.stderr
    assert r"\x1b[2Jacc" in done.stdout


def test_a_line_on_stderr_stays_one(capsys):
    """What is said in between cannot begin another line."""
    say("a\n\x1b[2Jb")
    assert capsys.readouterr().err == "phalanx: a\\n\\x1b[2Jb\n"


def damaged(folder):
    """Make a run of whose records a warning tells."""
    recipe(epochs=1).train(run_dir=folder, engine="inline")
    records = records_of(folder / CHAIN)
    records.unlink()
    records.symlink_to(os.devnull)


@pytest.mark.long
def test_a_warning_in_the_shell_is_one_line(tmp_path):
    """What no line of the user's called for is a sentence, without the line of the script that started phalanx."""
    damaged(tmp_path / "a")
    done = phalanx_command("runs", ".", cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith("phalanx: a/chain.records.jsonl cannot be used")


def test_a_warning_of_ones_own_has_its_line(here, tmp_path, monkeypatch):
    """Twin: a warning at a line of a file is as Python shows it, though without escapes."""
    here("runs", ".", cwd=tmp_path)
    script = str(tmp_path / "phalanx")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
    assert warnings.formatwarning("a\x1bb", UserWarning, script, 3) == "phalanx: a\\x1bb\n"
    (tmp_path / "job.py").write_text("first\nsecond\n")
    shown = warnings.formatwarning("a\x1bb", UserWarning, str(tmp_path / "job.py"), 2)
    assert shown == f"{tmp_path / 'job.py'}:2: UserWarning: a\\x1bb\n  second\n"


def test_a_picture_of_odd_names():
    """What looks like a formula is text in a chart."""
    names = [r"$\frac{$", "a\x1bb", "\ud800"]
    figure = plots.plot_runs(names, [{f"{name}x": [(0, 1.0)]} for name in names], [[]] * 3)
    drawn = plots.svg(figure)
    assert all(shown in drawn for shown in (r"$\frac{$x", r"a\x1bbx", r"\ud800x"))


def test_a_reader_has_types(runs):
    """Whatever one line says, readers get dicts whose step is a number, but for errors."""
    with open(runs / "a" / LOG, "a") as log:
        log.write('{"event": "error", "step": null, "error": "E"}\n{"event": "error", "step": "x"}\n')
    *before, last = events(runs / "a")
    assert all(isinstance(event["step"], int) for event in before)
    assert last == {"event": "error", "error": "E"}
    with pytest.raises(phalanx.UsageError, match=r"has no events\.jsonl"):
        list(events(runs))


def test_a_bar_has_no_escapes(capsys):
    """The name of a metric beside a progress bar is spelled, too."""
    bar = ProgressBar(1, 0.0)
    seen = Seen(Progress(), evaluated=[Evaluated(1, 0.5, "\x1b[2Jacc")])
    bar.begin(SimpleNamespace(progress=seen.progress, seen=seen, workers=1), SimpleNamespace(run_dir=None))
    bar.step(StepReport(step=0, loss=1.0, grad_norm=0.0, lr=0.1, seconds=1.0, epoch=0, samples=1))
    shown = capsys.readouterr().err
    assert "\x1b[2J" not in shown
    assert r"\x1b[2Jacc=0.5" in shown
