"""What callbacks leave in a run_dir: never through links, their owner's alone, and a full disk stops nothing."""

import csv
import dataclasses
import errno
import os
import stat
import threading

import pytest
import torch

import phalanx
from phalanx.callbacks import Log, SaveBest
from phalanx.callbacks.best import Best
from phalanx.checkpoint import files
from tests.callbacks.jobs import evaluation, recipe
from tests.state.runs import bytes_of, killed

EVERYWHERE = pytest.mark.parametrize(
    "options", [{"engine": "inline"}, {"engine": "processes", "workers": 2}, {"workers": "auto"}],
    ids=["inline", "2 workers", "auto"],
)  # fmt: skip


def both():
    """What writes files of its own."""
    return [Log("csv"), SaveBest("accuracy")]


def train(run_dir, callbacks=None, epochs=2, **options):
    """Two epochs, each of which is evaluated."""
    callbacks = both() if callbacks is None else callbacks
    return recipe(epochs=epochs).train(run_dir=run_dir, callbacks=callbacks, evaluation=evaluation(), **options)


def contents(folder):
    """All files of a folder with their bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.cases(2)
@EVERYWHERE
@pytest.mark.parametrize("name", [".log.csv.new", "log.csv"])
def test_a_link_in_the_place_of_the_log(tmp_path, name, options):
    """What a link leads to stays as it was; the log is a file of the run's own."""
    precious = tmp_path / "precious"
    precious.write_text("step\n0\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(precious)
    result = train(tmp_path / "run", **options)
    assert precious.read_text() == "step\n0\n"
    log = tmp_path / "run" / "log.csv"
    assert not log.is_symlink()
    assert len(log.read_text().splitlines()) == result.steps + 1


@pytest.mark.long
@EVERYWHERE
def test_a_link_in_the_place_of_the_best(tmp_path, options):
    """A link to the best weights of another run is refused by name, and those are all there."""
    train(tmp_path / "other", engine="inline")
    before = contents(tmp_path / "other" / "best")
    assert before
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best").symlink_to(tmp_path / "other" / "best")
    with pytest.raises(phalanx.UsageError, match=r"SaveBest could not write: .*symbolic link: .*best'; mend that"):
        train(tmp_path / "run", **options)
    assert contents(tmp_path / "other" / "best") == before


def test_a_link_that_comes_later(tmp_path):
    """A log that became a link is not read when the run goes on: a warning says so, and its target stays."""
    train(tmp_path / "run", engine="inline")
    (tmp_path / "run" / "log.csv").rename(tmp_path / "precious")
    (tmp_path / "run" / "log.csv").symlink_to(tmp_path / "precious")
    before = (tmp_path / "precious").read_bytes()
    with pytest.warns(UserWarning, match=r"Log could not write: .*symbolic link: .*log.csv'; the run goes on"):
        train(tmp_path / "run", epochs=3, engine="inline")
    assert (tmp_path / "precious").read_bytes() == before


def test_a_run_dir_that_is_a_link(tmp_path):
    """Twin: the run's directory itself may be a link, so that what is refused above is refused for its place."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    result = train(tmp_path / "link", engine="inline")
    assert (tmp_path / "run" / "log.csv").is_file()
    assert contents(tmp_path / "run" / "best").keys() == {result.best.path.name}


@pytest.mark.long
@EVERYWHERE
def test_only_the_owner_may_read(tmp_path, options):
    """Files that callbacks make are 0600, and their folders 0700, whatever the umask."""
    before = os.umask(0)
    try:
        train(tmp_path / "run", **options)
    finally:
        os.umask(before)
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} is {mode:o}"


def test_tensorboard_too(tmp_path):
    """Its folder is the run's own, and a link in its place is refused."""
    pytest.importorskip("tensorboard")
    train(tmp_path / "run", [Log("tensorboard")], engine="inline")
    assert stat.S_IMODE((tmp_path / "run" / "tensorboard").stat().st_mode) == 0o700
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tensorboard").symlink_to(tmp_path)
    with pytest.raises(phalanx.UsageError, match="Log could not write"):
        train(tmp_path / "other", [Log("tensorboard")], engine="inline")


@pytest.fixture
def full(monkeypatch):
    """A disk that has no room for files in these folders; a list of them, to be filled."""
    places, write = [], files.write

    def failing(path, fill):
        if path.parent.name in places:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, fill)

    monkeypatch.setattr(files, "write", failing)
    return places


@pytest.mark.long
@EVERYWHERE
def test_a_full_disk(tmp_path, full, options):
    """Weights that cannot be written are told of, and with on_snapshot_error="continue" the run goes on as it would."""
    wanted = recipe(epochs=2).train(engine="inline").digest
    full.append("best")
    with pytest.warns(UserWarning, match=r"SaveBest could not write: .*No space left.*; the run goes on"):
        result = train(tmp_path, **options)
    assert result.digest == wanted
    assert result.best is None
    assert not contents(tmp_path / "best")


@EVERYWHERE
def test_a_full_disk_that_stops(tmp_path, full, options):
    """Twin: with on_snapshot_error="stop" it ends the run, with the state in the error."""
    full.append("best")
    with pytest.raises(phalanx.SnapshotError, match=r"SaveBest could not write: .*No space left") as caught:
        train(tmp_path, on_snapshot_error="stop", **options)
    assert caught.value.result.steps == 5


class Careless:
    """Somebody's own callback that cannot write either."""

    def evaluated(self, values):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_somebody_elses_callback_raises(tmp_path):
    """Twin: an OSError of a callback that is not phalanx's own ends the run, as it is."""
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path, [Careless()], engine="inline")


def test_a_full_disk_and_the_log(tmp_path, full):
    """A metric for which there is no room gets no column; the lines of all steps are there, and the run goes on."""

    class Fill:
        def step(self, report):
            if report.step == 3:
                full.append(tmp_path.name)

    with pytest.warns(UserWarning, match=r"log.csv' gets no columns accuracy: .*the run goes on"):
        train(tmp_path, [Log("csv"), Fill()], engine="inline", snapshot_every=100)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["step", *map(str, range(10))]
    assert "accuracy" not in lines[0]


def test_lines_that_were_lost(tmp_path):
    """A log that lacks lines of earlier steps is gone on with by step numbers: no step is there twice."""
    train(tmp_path, [Log("csv")], engine="inline")
    log = tmp_path / "log.csv"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([lines[0], *lines[4:]]) + "\n")
    recipe(epochs=3).train(run_dir=tmp_path, callbacks=[Log("csv")], evaluation=evaluation(), engine="inline")
    assert [line.partition(",")[0] for line in log.read_text().splitlines()] == ["step", *map(str, range(3, 15))]


def test_drafts_that_a_kill_left(tmp_path):
    """Drafts in the folder of the best weights are cleared away when a run begins there."""
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / ".tmp-1").write_bytes(b"half")
    (tmp_path / "best" / "mine").write_text("mine")
    result = train(tmp_path, [SaveBest("accuracy")], engine="inline")
    assert contents(tmp_path / "best").keys() == {"mine", result.best.path.name}


def doubled(output, target):
    """Another loss than the recipe's."""
    return 2 * torch.nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize("steps", [0, 4])
def test_a_refused_run_changes_no_file(tmp_path, steps):
    """A run whose first step is another leaves log and best weights as they were; the right one writes them again."""
    options = {"engine": "inline", "snapshot_every": 2, "keep_snapshots": 9, "evaluation": evaluation()}
    result = recipe(epochs=2).train(run_dir=tmp_path, callbacks=both(), **options)
    killed(tmp_path, steps)
    kept = bytes_of(tmp_path)
    with pytest.raises(phalanx.UsageError, match=f"step {steps} comes to another"):
        dataclasses.replace(recipe(epochs=2), loss_fn=doubled).train(run_dir=tmp_path, callbacks=both(), **options)
    assert bytes_of(tmp_path) == kept
    again = recipe(epochs=2).train(run_dir=tmp_path, callbacks=both(), **options)
    assert (again.resumed_from, again.digest) == (steps, result.digest)
    now = bytes_of(tmp_path)
    assert now["log.csv"] == kept["log.csv"]
    assert {name for name in now if name.startswith("best")} == {name for name in kept if name.startswith("best")}
    assert now != kept


def test_two_kinds_of_best_in_one_directory(tmp_path):
    """Each of two SaveBest keeps its own files, though they are best after other steps, also after a resume."""

    def rising(output, target):
        return output.std().detach()

    x = torch.linspace(-1, 1, 64)[:, None]
    recipe = phalanx.Recipe(lambda: torch.nn.Linear(1, 1), (x, 3 * x), torch.nn.functional.mse_loss, epochs=4, lr=0.1)
    metrics = phalanx.Evaluation({"accuracy": rising, "error": rising}, (x, x))
    for more in (recipe, dataclasses.replace(recipe, epochs=6)):
        kept = SaveBest("accuracy"), SaveBest("error")
        more.train(run_dir=tmp_path, callbacks=kept, evaluation=metrics)
        assert [one.best.steps for one in kept] == [2 * more.epochs, 2]
        assert all(one.best.weights.keys() == {"weight", "bias"} for one in kept)
    assert len(list((tmp_path / "best").iterdir())) == 2


def test_a_metric_named_as_the_loss(tmp_path):
    """In the log and the printed result "loss" stays that of training; the metric is "evaluation/loss"."""
    x = torch.linspace(-1, 1, 64)[:, None]
    recipe = phalanx.Recipe(lambda: torch.nn.Linear(1, 1), (x, 3 * x), torch.nn.functional.mse_loss, epochs=1)
    far = phalanx.Evaluation({"loss": lambda output, target: (output - target).abs().mean() + 100}, (x, x))
    result = recipe.train(run_dir=tmp_path, callbacks=[Log("csv")], evaluation=far)
    last = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))[-1]
    assert float(last["loss"]) == result.loss
    assert float(last["evaluation/loss"]) == result.metric_history[-1].value > 100
    assert f"loss             {result.loss:.6g}" in str(result)


def test_best_weights_that_another_process_is_still_writing(tmp_path):
    """A process that is done before the first one has written the file waits for it."""
    recipe(epochs=1).train(evaluation=evaluation(), callbacks=[SaveBest("accuracy")], run_dir=tmp_path)
    (path,) = (tmp_path / "best").glob("*.safetensors")
    wanted = path.read_bytes()
    aside = path.rename(tmp_path / "aside")
    later = threading.Timer(0.3, aside.rename, [path])
    later.start()
    weights = Best("accuracy", 1.0, 5, path).weights
    later.join()
    assert list(weights)
    assert path.read_bytes() == wanted


class Full:
    """Cannot write. Nothing is inherited."""

    def step(self, report):
        raise OSError(errno.ENOSPC, "No space left on device")


class MayFail(Full):
    """The same, and says that it may."""

    may_fail = True


def test_a_callback_of_ones_own_may_fail_if_it_says_so():
    """A full disk is then a warning in each step; else it ends the run."""
    with pytest.warns(UserWarning, match=r"MayFail could not write: .*No space left.*; the run goes on"):
        wanted = recipe(epochs=1).train(callbacks=[MayFail()])
    assert wanted.steps
    with pytest.raises(OSError, match="No space left"):
        recipe(epochs=1).train(callbacks=[Full()])


@pytest.mark.parametrize("where", ["notes.txt", None])
def test_a_log_replaces_no_file_but_a_log(tmp_path, monkeypatch, where):
    """A file that is no log is left as it is, and the run refused; an earlier log is replaced."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / (where or "log.csv")
    path.write_text("what,I,wrote\nall,of,it\n")
    with pytest.raises(phalanx.UsageError, match=f"{path.name}' is no log of a run, .*move it away"):
        recipe(epochs=1).train(callbacks=[Log("csv", where)], progress=False)
    assert path.read_text() == "what,I,wrote\nall,of,it\n"
    path.unlink()
    for _ in range(2):
        steps = recipe(epochs=1).train(callbacks=[Log("csv", where)], progress=False).steps
    assert len(path.read_text().splitlines()) == steps + 1
