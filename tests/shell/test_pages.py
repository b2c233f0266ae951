"""``phalanx report`` and ``export``: a run's directory as one page, and as one file of weights."""

import html.parser
import json
import pathlib
import re
import shutil
import sys
import time

import pytest
import torch

import phalanx
from phalanx.callbacks import SaveBest
from phalanx.checkpoint.chain import CHAIN
from phalanx.checkpoint.directory import LOG, events
from phalanx.checkpoint.tensors import read_weights
from phalanx.lab import pages
from phalanx.lab.sweeps import rows_of
from phalanx.lab.tuning import Choice, Rates, Tuned
from phalanx.run import plots
from tests.callbacks.jobs import HELD_OUT, TARGETS, accuracy, evaluation, recipe
from tests.shell.test_proofs import JOB

DOCS = pathlib.Path(__file__).parents[2] / "docs"


class Parser(html.parser.HTMLParser):
    """Collects texts, and what would be loaded from elsewhere."""

    def __init__(self):
        super().__init__()
        self.texts, self.loaded, self.paths = [], [], 0

    def handle_data(self, data):
        self.texts.append(data)

    def handle_starttag(self, tag, attributes):
        self.paths += tag == "path"
        self.loaded += [value for name, value in attributes if name in ("src", "href")]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with evaluations that was broken off once."""
    folder = tmp_path_factory.mktemp("runs") / "a<b"
    with recipe(epochs=2).start(run_dir=folder, evaluation=evaluation(), snapshot_every=3) as run:
        for report in run:
            if report.step == 6:
                break
    recipe(epochs=2).train(run_dir=folder, evaluation=evaluation(), snapshot_every=3)
    return folder


@pytest.mark.long
def test_a_page_shows_the_run_and_loads_nothing(run_dir, tmp_path):
    """Curves of loss and metric, what happened, and the environment; nothing from elsewhere, and names are escaped."""
    pages.report([run_dir, run_dir], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    parser = Parser()
    parser.feed(text)
    assert parser.loaded == []
    assert {"loss", "accuracy", "samples a second", "resume", "snapshot"} <= set(parser.texts)
    assert any("a<b" in shown for shown in parser.texts)
    assert parser.paths > 10
    assert not re.search(r"nan|inf\b", "".join(re.findall(r' d="([^"]*)"', text)))
    assert len(pages.read(run_dir).steps) == 10


@pytest.mark.long
def test_the_terminal_has_the_rows_of_the_page(here, run_dir, tmp_path):
    """A line for each thing that is told, as on the page; the same as JSON; and a run without a log ends in 2."""
    done = here("report", str(run_dir), str(run_dir), cwd=tmp_path)
    told = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert (told["steps"].split(), told["deaths"].split()) == (["10"] * 2, ["0"] * 2)
    parser = Parser()
    parser.feed((tmp_path / "report.html").read_text())
    rows = [row for name, *row in pages.lines([pages.read(run_dir).row()]) if name == "last loss"]
    assert rows[0][0] == told["last loss"].split()[0]
    assert rows[0][0] in parser.texts
    facts = json.loads(here("report", str(run_dir), "--to", "one.html", "--json", cwd=tmp_path).stdout)
    assert [(row["run"], row["steps"]) for row in facts["runs"]] == [("a<b", 10)]
    assert facts["report"] == "one.html"
    assert here("report", str(tmp_path), cwd=tmp_path).returncode == 2


def test_many_runs_have_a_row_each_in_a_terminal(here, run_dir, tmp_path):
    """More than three runs are rows below each other, which fit; the best is marked."""
    done = here("report", *[str(run_dir)] * 4, cwd=tmp_path)
    heading, *rows, last = done.stdout.splitlines()
    assert heading.split()[:2] == ["run", "steps"]
    assert [line.count(" *") for line in rows] == [1, 0, 0, 0]
    assert last.split() == ["report", "report.html"]
    assert "<h1>phalanx: 4 runs</h1>" in (tmp_path / "report.html").read_text()


def test_deaths_are_drawn_where_they_were():
    """Each death is a mark below the curve of its run; a run without one has none; a long curve is thinned."""
    curve = [(step, 1.0 / (1 + step)) for step in range(5000)]
    figure = plots.plot_runs(["a", "b"], [{"loss": curve, "lr": []}, {"loss": curve[:40], "lr": []}], [[7, 9], []])
    (ax,) = figure.axes
    assert [list(line.get_xdata()) for line in ax.lines if line.get_marker() == "|"] == [[7, 9], []]
    drawn = [line for line in ax.lines if line.get_marker() != "|"]
    assert [len(line.get_xdata()) for line in drawn] == [556, 556, 40, 40]  # as measured, and smoothed
    assert [line.get_alpha() for line in drawn] == [0.25, None, 0.25, None]
    assert drawn[1].get_ydata()[0] == pytest.approx(drawn[0].get_ydata()[0])
    assert max(abs(drawn[3].get_ydata())) < 1.01


def test_a_smoothed_curve_does_not_lag():
    """Over points on a line it is that line, but for its end; a thinned point lies amid the steps of which it is."""
    line = [(step, 100.0 - step) for step in range(60)]
    assert plots._smooth(line)[:50] == line[:50]
    assert plots._smooth(line)[-1] == (59, 46.0)  # the mean of the last eleven
    flat = [(step, float(step % 2)) for step in range(60)]
    assert max(abs(value - 0.5) for _, value in plots._smooth(flat)[10:50]) < 0.03
    many = plots._thinned([(step, float(step)) for step in range(3000)])
    assert (len(many), many[0], many[-1]) == (600, (2, 2.0), (2997, 2997.0))


@pytest.mark.parametrize("last", [1.0, 4.0, 1e30])
def test_the_diverged_end_leaves_the_picture(last):
    """However far the loss of a search for a rate goes up at its end, the picture shows where it fell."""
    losses = [2.0, 1.9, 1.5, 1.0, 0.8, 1.2, last]
    low, high = Rates([10.0**at for at in range(7)], losses, 10.0).plot().get_ylim()
    assert (low, high) == pytest.approx((0.8 - 0.24, 2.0 + 0.24))


def shifted(path, seconds):
    """The log's lines with each call of the run later by ``seconds`` than the one before."""
    calls, lines = -1, []
    for line in map(json.loads, (path / LOG).read_text().splitlines()):
        calls += line["event"] in ("start", "resume")
        lines.append({**line, "time": line["time"] + calls * seconds})
    (path / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return calls + 1


def test_what_lay_between_calls_does_not_count(run_dir, tmp_path):
    """A run lasted as long as its calls did, also where it was finished and called again, an hour later."""
    run = shutil.copytree(run_dir, tmp_path / "run")
    before = pages.read(run).row()["seconds"]
    assert before < 100
    assert shifted(run, 3600) == 2
    assert pages.read(run).row()["seconds"] == pytest.approx(before, abs=0.01)
    assert pages.read(run).row()["seconds between steps"] < 100
    recipe(epochs=2).train(run_dir=run, evaluation=evaluation(), snapshot_every=3)
    assert shifted(run, 3600) == 3
    assert pages.read(run).row()["seconds"] == pytest.approx(before, abs=20)


def test_a_call_lasts_from_its_beginning(run_dir, tmp_path):
    """The line by which a run goes on has the time when it did, not that of its first step."""
    run = shutil.copytree(run_dir, tmp_path / "run")
    began = time.time()
    with recipe(epochs=4).start(run_dir=run) as again:
        opened = time.time()
        while time.time() < opened + 0.1:
            pass
        next(again)
    (*_, line) = (event for event in events(run) if event["event"] == "resume")
    assert began - 0.01 < line["time"] < opened + 0.01


def test_lost_processes_are_deaths(run_dir, tmp_path):
    """A process that is lost counts as a worker that dies does, and one that joins as one that takes a place."""
    run = shutil.copytree(run_dir, tmp_path / "run")
    row = pages.read(run).row()
    assert (row["deaths"], row["replacements"]) == (0, 0)
    with open(run / LOG, "a") as log:
        for number, event in enumerate(("death", "replaced", "lost", "joined", "lost", "again")):
            log.write(json.dumps({"event": event, "step": number, "worker": 1, "why": "w"}) + "\n")
    row = pages.read(run).row()
    assert (row["deaths"], row["replacements"]) == (3, 2)


def test_dropped_messages_are_counted(run_dir, tmp_path):
    """The last count of messages from outside that did not fit is a row; without one it is 0."""
    run = shutil.copytree(run_dir, tmp_path / "run")
    assert pages.read(run).row()["dropped messages"] == 0
    with open(run / LOG, "a") as log:
        for why in ("1 malformed", "60 malformed"):
            log.write(json.dumps({"event": "dropped", "step": 1, "worker": -1, "why": why}) + "\n")
    assert pages.read(run).row()["dropped messages"] == "60 malformed"


@pytest.mark.long
def test_arguments_are_rows(here, tmp_path):
    """What a function that returns the recipe was called with is told, in the terminal and on the page."""
    (tmp_path / "job.py").write_text(
        JOB.replace("recipe = ", "def recipe(rate=0.1, steps=6):\n    return ").replace("steps=6)\n", "steps=steps)\n")
    )
    here("train", "job.py", "rate=0.25", "--run-dir", "run", "--workers", "1", "--quiet", cwd=tmp_path)
    lines = here("report", "run", cwd=tmp_path).stdout.splitlines()
    assert ["argument rate", "0.25"] in [re.split("  +", line) for line in lines]
    assert "<tr><td>argument steps</td><td>6</td></tr>" in (tmp_path / "report.html").read_text()
    many = here("report", *["run"] * 4, cwd=tmp_path).stdout.splitlines()
    assert "argument rate" in many[0]


def test_documents_say_what_a_step_takes(tmp_path):
    """A step adds as many bytes to its run's directory as the documents say, in links and lines of the log."""
    recipe(replicas=4, epochs=20).train(run_dir=tmp_path, engine="inline")
    sizes = sum((tmp_path / name).stat().st_size for name in (CHAIN, LOG)) / len(pages.read(tmp_path).steps)
    for document in ("proof", "saving"):
        (told,) = re.findall(r"([0-9]+) bytes", (DOCS / f"{document}.md").read_text())
        assert sizes == pytest.approx(int(told), rel=0.03)


def test_a_page_needs_a_log(tmp_path):
    """Another folder is refused by name."""
    with pytest.raises(phalanx.UsageError, match=r"has no events\.jsonl"):
        pages.report([tmp_path], tmp_path / "a.html")


@pytest.mark.long
def test_the_best_of_many_runs_is_marked(tmp_path):
    """By the first metric whose name says what is better, else by the loss; colours differ, and each run is named."""
    folders = [tmp_path / name for name in ("slow", "fast", "none")]
    for folder, lr in zip(folders, (1e-3, 0.1, 1e-9), strict=True):
        recipe(epochs=2, lr=lr, optimizer=None).train(run_dir=folder, evaluation=evaluation())
    rows = pages.report(folders, tmp_path / "report.html")
    values = [float(row["best"].split()[1]) for row in rows]
    best = values.index(max(values))
    assert ["accuracy" in row["best"] for row in rows] == [True] * 3
    assert [row["best"].endswith(" *") for row in rows] == [number == best for number in range(3)]
    assert f'<tr class="best"><td>{folders[best].name}<' in (tmp_path / "report.html").read_text()
    figure = plots.plot_runs(["run"] * 12, [{"loss": [(0, 1.0)]}] * 12, [[]] * 12)
    styles = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines if line.get_marker() == "."}
    assert len(styles) == 12


def test_the_best_is_that_of_save_best(tmp_path):
    """Where a run has SaveBest, its metric and mode decide, also those that no name tells, on the page and in lists."""

    def spread(output, target):
        return output.abs().mean()

    asked = {"evaluation": phalanx.Evaluation([accuracy, spread], (HELD_OUT, TARGETS))}
    asked |= {"callbacks": [SaveBest("spread", mode="max")]}
    for name, lr in (("slow", 1e-3), ("fast", 0.1)):
        best = recipe(epochs=2, lr=lr).train(run_dir=tmp_path / name, **asked).best
        row = rows_of(tmp_path)[0 if name == "fast" else -1]["best"]
        assert (row["name"], row["value"], row["steps"]) == ("spread", best.value, best.steps)
    assert [row["best_of_all"] for row in rows_of(tmp_path)] == [True, False]
    rows = pages.report([tmp_path / "fast", tmp_path / "slow"], tmp_path / "report.html")
    assert [row["best"].endswith(" *") for row in rows] == [True, False]


def test_a_run_without_the_metric_does_not_hide_it():
    """Where one run evaluated nothing, the others are compared by their metric, in the page as in the list of runs."""
    none, worse, better = (pages.History(name) for name in ("none", "worse", "better"))
    for history, loss, metrics in ((none, 0.1, {}), (worse, 1.0, {"accuracy": 0.5}), (better, 2.0, {"accuracy": 0.7})):
        history.steps = {0: {"loss": loss, "samples": 1, "metrics": metrics}}
    assert pages.best_of([none, worse, better]) == 2
    assert "<td>last accuracy</td>" in pages.page([none, worse, better])
    odd = [
        pages.History(name, {0: {"loss": loss, "samples": 1, "metrics": {"odd": 1.0}}})
        for name, loss in (("a", 2.0), ("b", 1.0))
    ]
    assert pages.best_of(odd) == 1
    steps = {0: {"samples": 8, "metrics": {}}, 1: {"samples": 8, "metrics": {"samples": 0.5, "accuracy": "nan"}}}
    mixed = pages.History("mixed", steps, saved_by=("accuracy", "auto"))
    assert (mixed.curves["samples"], mixed.best()) == ([(1, 0.5)], {})  # not the log's own samples, nor another's best


def test_a_page_has_the_recipe_and_the_clock(run_dir, tmp_path):
    """One row for each field, with the rates that were used, the time of start and end, and how long it took."""
    (row,) = pages.report([run_dir], tmp_path / "report.html")
    parser = Parser()
    parser.feed((tmp_path / "report.html").read_text())
    texts = parser.texts
    assert texts[texts.index("replicas") + 1] == str(recipe().replicas)
    assert "{" not in "".join(texts[texts.index("replicas") :]).replace("{}", "")
    assert row["started"] < row["ended"] or row["lasted"].endswith(" s")
    assert [pages.lasting(seconds) for seconds in (4.24, 200, 7500)] == ["4.2 s", "3 min 20 s", "2 h 5 min"]


def test_an_export_has_the_weights_of_the_newest_snapshot(here, run_dir, tmp_path):
    """One safetensors file, equal to what phalanx.load reads."""
    done = here("export", str(run_dir), "--to", "m.safetensors", cwd=tmp_path)
    assert done.stdout == "10 steps  m.safetensors\n"
    weights = read_weights(pathlib.Path(tmp_path / "m.safetensors"))
    assert all(torch.equal(weights[name], value) for name, value in phalanx.load(run_dir).weights.items())


@pytest.fixture
def without_matplotlib(monkeypatch):
    """A machine on which matplotlib is not installed."""
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)


PLOTS = [
    lambda result: result.plot(),
    lambda result: Tuned(1, 1, 1, (Choice(1, 1, 1, 0.1, 10.0, 1.0, 0),), "").plot(),
    lambda result: Rates([0.1], [1.0], 0.1).plot(),
    lambda result: svg_of(result),
]


def svg_of(result):
    """The picture of a page."""
    return plots.svg(plots.plot_runs(["a"], [{"loss": [(0, 1.0)]}], [[]]))


@pytest.mark.parametrize("number", range(len(PLOTS)))
def test_every_picture_needs_matplotlib(without_matplotlib, number):
    """Where it is not installed, whatever draws says in a sentence how to install it."""
    with pytest.raises(phalanx.UsageError, match=r"plot needs matplotlib; install it: pip install 'phalanx\[plot\]'"):
        PLOTS[number](recipe(epochs=1).train())


@pytest.mark.parametrize("number", range(len(PLOTS)))
def test_every_picture_is_drawn_with_it(number):
    """Twin: with matplotlib the same calls draw."""
    assert PLOTS[number](recipe(epochs=1).train())


@pytest.mark.long
def test_commands_without_matplotlib(here, run_dir, tmp_path, without_matplotlib):
    """A report and --plot are refused in words, before anything is written or trained; certify draws nothing."""
    refused = here("report", str(run_dir), cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "matplotlib" in refused.stderr
    (tmp_path / "job.py").write_text(JOB)
    for words in (("train", "job.py", "--plot", "a.png"), ("demo", "digits")):
        refused = here(*words, cwd=tmp_path)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "--plot" in refused.stderr
        assert "matplotlib is missing" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]
    assert here("train", "job.py", "--run-dir", "run", "--quiet", cwd=tmp_path).returncode == 0
    assert here("certify", "run", "--recipe", "job.py", cwd=tmp_path).stdout.startswith("chain ")
