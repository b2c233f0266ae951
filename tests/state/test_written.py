"""Runs that earlier versions wrote: loaded, compared, and gone on with. docs/stability.md promises it.

A folder of ``written`` has the date of the version that wrote it. When a release changes what is written, it adds one:
``python -m tests.state.test_written FOLDER`` writes it. Folders are never changed.
"""

import csv
import json
import pathlib
import shutil
import sys

import pytest
import torch

import phalanx
from phalanx.callbacks import EMA, Log, SaveBest

WRITTEN = sorted((pathlib.Path(__file__).parent / "written").iterdir())


def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def accuracy(output, target):
    return (output.argmax(-1) == target).float().mean()


def recipe(**changes):
    data = torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2
    fields = {"replicas": 2, "batch_size": 4, "steps": 6, "seed": 5, "optimizer": optimizer, "scheduler": scheduler}
    return phalanx.Recipe(model, data, torch.nn.functional.cross_entropy, **fields | changes)


def started(folder, recipe):
    """A run with all that a folder can have."""
    evaluation = phalanx.Evaluation({"accuracy": accuracy}, recipe.data, every_steps=2)
    callbacks = [EMA(0.9), SaveBest("accuracy"), Log("csv")]
    options = {"chain": "every", "snapshot_every": 2, "keep_snapshots": 2, "progress": False}
    return recipe.start(engine="inline", run_dir=folder, evaluation=evaluation, callbacks=callbacks, **options)


@pytest.fixture(params=WRITTEN, ids=[folder.name for folder in WRITTEN])
def written(request, tmp_path):
    """A copy, without what was noted of the next step: another processor computes other bits."""
    folder = tmp_path / "run"
    shutil.copytree(request.param, folder)
    (folder / "next.json").unlink()
    return folder


def test_all_say_the_same(written):
    """Versions that computed the same wrote the same weights, links and log; one other digit is told."""
    assert phalanx.diff(WRITTEN[-1], written) is None
    assert (written / "log.csv").read_text() == (WRITTEN[-1] / "log.csv").read_text()
    ours, theirs = phalanx.load(WRITTEN[-1]).weights, phalanx.load(written).weights
    assert ours.keys() == theirs.keys() == model().state_dict().keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    chain = written / "chain.jsonl"
    lines = chain.read_text().splitlines()
    chain.write_text("\n".join([*lines[:-1], lines[-1].replace("1", "2")]) + "\n")
    with pytest.raises(phalanx.SnapshotError, match="damaged at step 3"):
        phalanx.diff(WRITTEN[-1], written)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the processor or torch may be others
def test_a_run_goes_on(written):
    """From step 4 to its end, with its averages, its best, its log and its chain."""
    before = (written / "chain.jsonl").read_text()
    with started(written, recipe()) as run:
        assert [report.step for report in run] == [4, 5]
    assert [row["step"] for row in csv.DictReader((written / "log.csv").open())] == list("012345")
    assert (written / "chain.jsonl").read_text().startswith(before)
    assert len((written / "chain.jsonl").read_text().splitlines()) == len(before.splitlines()) + 2
    assert json.loads((written / "events.jsonl").read_text().splitlines()[-1])["event"] == "end"


@pytest.mark.parametrize("changes", [{"lr": 0.5}, {"loss_over": "batch"}, {"seed": 6}], ids=str)
def test_another_recipe_is_refused(written, changes):
    """What a recipe did not have yet counts as its default, and any other value is another recipe."""
    with pytest.raises(phalanx.UsageError, match=next(iter(changes))):
        started(written, recipe(**changes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with started(pathlib.Path(sys.argv[1]), recipe()) as run:
        for report in run:
            if report.step == 3:
                break
        run.result()
