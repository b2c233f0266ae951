"""Odd run directories: what cannot be told is said to be so, never "the same", and never with a traceback."""

import contextlib
import dataclasses
import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import phalanx
from phalanx.checkpoint.chain import CHAIN, records_of
from phalanx.cli.app import app
from phalanx.cli.common import load_recipe
from phalanx.proof.instant import Instant
from phalanx.proof.replay import failure_of
from phalanx.proof.verify import certify
from tests.proof.jobs import ran, recipe

SNAPSHOT = "snapshots/step-{:012d}"


@pytest.fixture
def run(tmp_path):
    """The directory of a run of six steps, with snapshots after each two, and its recipe."""
    job = recipe(steps=6)
    return ran(tmp_path / "run", job, snapshot_every=2), job


def cut(folder, steps):
    """Leave the first links of a chain only."""
    lines = (folder / CHAIN).read_text().splitlines(keepends=True)
    (folder / CHAIN).write_text("".join(lines[: steps + 1]))


def test_sides_that_have_nothing_in_common_are_not_the_same(tmp_path, run):
    """A chain by itself and a snapshot, snapshots of two steps, a chain and a file of tensors: an error, no verdict."""
    folder, _ = run
    other = ran(tmp_path / "other", recipe(steps=6, seed=1), snapshot_every=2)
    chain = shutil.copy(folder / CHAIN, tmp_path / "chain.jsonl")
    weights = other / SNAPSHOT.format(6) / "weights.safetensors"
    for one, two in (
        (chain, other / SNAPSHOT.format(6)),
        (folder / SNAPSHOT.format(6), other / SNAPSHOT.format(4)),
        (chain, weights),
        (folder, {"of no run": load_file(weights)["first.bias"]}),
    ):
        for pair in ((one, two), (two, one)):
            with pytest.raises(phalanx.UsageError, match=r"it cannot be told|no tensor in common"):
                phalanx.diff(*pair)


@pytest.mark.long
def test_what_is_in_common_is_still_compared(tmp_path, run):
    """A snapshot with its run, a chain that was cut but has the same snapshots, and a run with a longer one."""
    folder, _ = run
    assert phalanx.diff(folder / SNAPSHOT.format(4), folder / SNAPSHOT.format(4)) is None
    short = ran(tmp_path / "short", recipe(steps=4), snapshot_every=2)
    assert phalanx.diff(folder, short).phase == "end"
    shutil.copytree(folder, tmp_path / "cut")
    cut(tmp_path / "cut", 1)
    assert phalanx.diff(folder, tmp_path / "cut") is None
    shutil.rmtree(tmp_path / "cut" / SNAPSHOT.format(6))
    shutil.rmtree(tmp_path / "cut" / SNAPSHOT.format(4))
    assert phalanx.diff(folder, tmp_path / "cut").phase == "end"


def test_a_chain_that_was_cut_is_not_verified(run):
    """Fewer links than the newest snapshot has steps, or none: status 2; what is left can be asked for."""
    folder, job = run
    for steps in (3, 0):
        cut(folder, steps)
        found = phalanx.verify(job, folder, progress=False)
        assert (found.status, found.steps) == (2, 0)
        assert f"has {steps} steps, and the newest snapshot is of step 6" in found.text
        if steps:
            assert phalanx.verify(job, folder, steps=(0, 3), progress=False).status == 0
    shutil.rmtree(folder / "snapshots")
    records_of(folder / CHAIN).write_text(records_of(folder / CHAIN).read_text().splitlines()[0] + "\n")
    assert "has no steps yet" in phalanx.verify(job, folder, progress=False).text


def test_a_run_without_a_snapshot_after_a_step_is_not_certified(run):
    """Only the snapshot from before the first step is there, as while a run is at work: a certificate of nothing."""
    folder, job = run
    with (
        job.start(run_dir=folder / "new", engine="inline", progress=False),
        pytest.raises(phalanx.UsageError, match="is of step 0, so that there is nothing to certify"),
    ):
        certify(job, folder / "new")


def test_no_steps_are_not_the_same(run):
    """A range without a step is refused, as nothing would be compared."""
    folder, job = run
    with pytest.raises(phalanx.UsageError, match="steps is 3:3"):
        phalanx.verify(job, folder, steps=(3, 3))


def test_a_damaged_snapshot_is_not_passed_over(run):
    """Links are the same, and one snapshot among them cannot be used: status 2, and which."""
    folder, job = run
    weights = folder / SNAPSHOT.format(6) / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    found = phalanx.verify(job, folder, progress=False)
    assert (found.status, found.steps) == (2, 6)
    assert f"{weights} cannot be used" in found.text
    assert phalanx.verify(job, folder, steps=(0, 4), progress=False).status == 0


def test_a_recipe_that_was_edited_tells_nothing_of_the_run(tmp_path, run):
    """Steps are not computed again with a recipe that neither run had; diff says why, and replay that it is another."""
    folder, job = run
    other = ran(tmp_path / "other", recipe(steps=6, max_norm=0.1), snapshot_every=2)
    edited = dataclasses.replace(job, seed=1)
    found = phalanx.diff(folder, other, recipes=(edited, edited))
    assert (found.step, found.phase) == (1, "loss")
    assert (
        f"the recipe at hand is not the one that {folder} had (seed is 1 here, and 0 there), so nothing" in found.note
    )
    with pytest.warns(UserWarning, match="had another recipe .seed is 1 here"):
        phalanx.replay(edited, folder, step=3, replica=0)


def sharper(output, target):
    return 2.0 * torch.nn.functional.cross_entropy(output, target)


@pytest.mark.long
def test_code_that_reads_differently_is_judged_by_what_it_computes(run):
    """The same loss in other words verifies; another one cannot tell of the run, and replay warns of it."""
    folder, job = run
    same = dataclasses.replace(job, loss_fn=lambda output, target: torch.nn.functional.cross_entropy(output, target))
    assert phalanx.verify(same, folder, progress=False).status == 0
    found = phalanx.verify(dataclasses.replace(job, loss_fn=sharper), folder, progress=False)
    assert found.status == 2
    assert "step 0 differs" in found.text
    assert "the recipe may be another: loss_fn reads differently" in found.text
    with pytest.warns(UserWarning, match="had another recipe .loss_fn reads differently"):
        phalanx.replay(dataclasses.replace(job, loss_fn=sharper), folder, step=3, replica=1)
    assert phalanx.replay(job, folder, step=3, replica=1).loss


class Reads:
    """A loss that reads a factor from a file, where nobody looks for one."""

    def __init__(self, path):
        self.path = path

    def __call__(self, output, target):
        return torch.nn.functional.cross_entropy(output, target) * float(self.path.read_text())


def test_replay_names_a_loss_that_the_run_did_not_have(tmp_path):
    """Where nothing of the recipe reads differently, the chain shows that a replica comes to something else."""
    (tmp_path / "factor").write_text("1.0")
    job = recipe(steps=4, loss_fn=Reads(tmp_path / "factor"))
    folder = ran(tmp_path / "run", job)
    assert phalanx.replay(job, folder, step=3, replica=1).loss
    (tmp_path / "factor").write_text("2.0")
    with pytest.warns(UserWarning, match=r"replica 1 of step 3 comes to the loss .* in the run: this recipe, or"):
        phalanx.replay(job, folder, step=3, replica=1)


ODD = [None, -1, 3.5, 1e400, "x", "", [], {}, True, 10**30, [[]]]


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("place", ["header", "link", "run", "state", "snapshot", "event"])
def test_values_that_nobody_wrote(tmp_path, run, place):
    """Whatever a field holds, every command ends in a sentence of its own: what differs, or what is damaged."""
    folder, job = run
    file, line = {
        "header": (CHAIN, 0), "link": (CHAIN, 2), "run": (records_of(folder / CHAIN).name, 0),
        "state": (records_of(folder / CHAIN).name, 1), "snapshot": (SNAPSHOT.format(4) + "/state.json", 0),
        "event": ("events.jsonl", 1),
    }[place]  # fmt: skip
    right = shutil.copytree(folder, tmp_path / "right")
    lines = (right / file).read_text().splitlines()
    told = json.loads(lines[line])
    spoiled = [{**told, name: value} for name in told for value in ODD] + [[], 3]
    texts = [json.dumps(value) for value in spoiled] + ["[" * 4000, '{"error":' * 1000]
    for text in texts:
        width = len(lines[line])
        changed = [*lines[:line], text.ljust(width), *lines[line + 1 :]]
        (folder / file).write_text("\n".join(changed) + "\n")
        for pair in ((right, folder), (folder, right)):
            _tried(phalanx.diff, *pair, recipes=(None, None))
        _tried(failure_of, folder)
        if text in texts[::11]:
            _tried(phalanx.verify, job, folder, progress=False)


def _tried(function, *arguments, **options):
    """Call it; only errors of the library may come."""
    with contextlib.suppress(phalanx.PhalanxError):
        str(function(*arguments, **options))


JOB = """
import torch, phalanx
x = torch.arange(80.0).reshape(40, 2) / 80
recipe = phalanx.Recipe(lambda: torch.nn.Linear(2, 3), (x, torch.arange(40) % 3), torch.nn.functional.cross_entropy,
                        replicas=4, batch_size=8, steps=6)
"""


@pytest.mark.long
def test_what_cannot_be_written_is_said_in_a_sentence(tmp_path, monkeypatch):
    """A certificate and a picture go where they can be written, or the option is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "file").write_text("")
    for folder, seed in (("a", 0), ("b", 1)):
        dataclasses.replace(load_recipe("job.py")[0], seed=seed).train(run_dir=folder, engine="inline", progress=False)
    for option, words in (
        ("--out", ["certify", "a", "--recipe", "job.py", "--out", "file/c.json"]),
        ("--plot", ["train", "job.py", "--quiet", "--plot", "file/x.png"]),
    ):
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, (phalanx.UsageError, SystemExit)), words
        assert f"{option} is " in f"{done.exception} {done.output}"


@pytest.mark.long
def test_a_file_in_a_folder_with_a_colon(tmp_path):
    """The name of a recipe is what follows the last colon, if it can be a name."""
    folder = tmp_path / "at 12:30"
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    assert load_recipe(str(folder / "job.py"))[0].replicas == 4
    assert load_recipe(f"{folder / 'job.py'}:recipe")[0].replicas == 4
    with pytest.raises(phalanx.UsageError, match=r"no recipe named .other.; .* or try FILE:recipe"):
        load_recipe(f"{folder / 'job.py'}:other")


@dataclasses.dataclass
class Freezing:
    """Freezes parameters after a step."""

    after: int
    names: tuple = ("first.*",)
    run: object = None

    def begin(self, run):
        self.run = run

    def step(self, report):
        if report.step == self.after:
            self.run.freeze(*self.names)


@pytest.mark.long
def test_what_was_frozen_is_named(tmp_path):
    """Where runs differ in what was frozen, diff says so; where they froze the same, or after the end, it does not."""
    job, folders = recipe(steps=6), {}
    for name, callbacks in {
        "plain": (), "frozen": [Freezing(2)], "again": [Freezing(2)], "later": [Freezing(3)], "last": [Freezing(5)]
    }.items():  # fmt: skip
        folders[name] = tmp_path / name
        job.train(run_dir=folders[name], callbacks=callbacks, progress=False, engine="inline")
    told = {name: phalanx.diff(folders["frozen"], folders[name]) for name in folders}
    assert told["again"] is None
    assert told["plain"].step == told["later"].step == 3
    assert "before step 3: first.bias, first.weight frozen in" in str(told["plain"]).replace(
        "first.weight, first.bias", "first.bias, first.weight"
    )
    assert "nothing frozen or thawed in" in told["plain"].fields["trained"]
    assert told["later"].fields["trained"].startswith("before step 3: ")
    assert phalanx.diff(folders["plain"], folders["last"]) is None


@pytest.mark.filterwarnings("ignore:going on with another recipe")
def test_a_run_that_went_on_with_another_recipe(tmp_path):
    """Its optimizer has kept the old rate, with which the new recipe was "the same" and was certified."""
    old, new = (
        recipe(steps=steps, optimizer=functools.partial(torch.optim.SGD, lr=lr)) for steps, lr in ((2, 0.5), (4, 0.25))
    )
    folder = ran(tmp_path / "run", old)
    assert phalanx.verify(old, folder).status == 0
    ran(folder, new, resume="anyway")
    for steps in (None, (2, 4)):
        found = phalanx.verify(new, folder, steps=steps)
        assert found.status == 2
        assert "by resume='anyway', after another: optimizer" in found.text
    assert certify(new, folder)[1] == {}


class Beside:
    """Evaluates by hand what has the same name, and does not count."""

    def begin(self, run):
        self.run = run

    def evaluated(self, values):
        self.run.evaluate({"val_loss": lambda output, target: output.new_tensor(-float(self.run.steps))}, recipe().data)


def test_a_schedule_that_goes_by_a_metric(tmp_path, monkeypatch):
    """Its steps are done again with the values that the run had. They were left out, and an honest run differed."""
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)
    changes = {"scheduler": plateau, "schedule_every": "epoch", "schedule_on": "val_loss"}
    job = recipe(steps=None, epochs=4, **changes)
    due = phalanx.Evaluation({"val_loss": lambda output, target: output.new_tensor(1.0)}, job.data)
    folder = ran(tmp_path / "run", job, evaluation=due, snapshot_every=7, callbacks=[Beside()])
    found = phalanx.verify(job, folder)
    assert (found.status, found.steps) == (0, 20), found
    seldom = dataclasses.replace(due, every_epochs=2)
    other = ran(tmp_path / "other", job.replace(epochs=5), evaluation=seldom, snapshot_every=25)
    assert phalanx.verify(job.replace(epochs=5), other).status == 0
    shutil.rmtree(other / SNAPSHOT.format(25))  # as after a kill: what was evaluated since step 0 is in no snapshot
    assert phalanx.verify(job.replace(epochs=5), other).status == 0
    with pytest.raises(phalanx.UsageError, match="so that no certificate has it"):
        certify(job, folder)
    noted = records_of(other / CHAIN)
    noted.write_text("".join(line for line in noted.read_text().splitlines(True) if '"schedule"' not in line))
    assert phalanx.verify(job.replace(epochs=5), other, steps=(0, 4)).status == 0
    with pytest.raises(phalanx.UsageError, match="goes by 'val_loss', and no chain says its value after step 5"):
        phalanx.verify(job.replace(epochs=5), other)  # as of a run of before: it does not "differ"
    monkeypatch.setattr(Instant, "_follow", lambda *_: None)  # planted
    assert "lr is" in str(phalanx.verify(job, folder))
