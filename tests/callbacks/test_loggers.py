"""Logs through the libraries themselves, read back as their users would; each is skipped where it is not installed."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from phalanx.callbacks import Log
from tests.callbacks.jobs import HELD_OUT, TARGETS, accuracy, evaluation, recipe

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
KILLED = """
import os, signal, sys
import phalanx
from phalanx.callbacks import Log
from tests.callbacks.jobs import evaluation, recipe

def kill(report):
    if report.step == 11:
        os.kill(os.getpid(), signal.SIGKILL)

recipe(epochs=3).train(
    run_dir="a", callbacks=[Log(sys.argv[1]), kill], evaluation=evaluation(), snapshot_every=4, workers=2
)
"""


@pytest.fixture
def services(tmp_path, monkeypatch):
    """Where TensorBoard writes: an empty folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path


@pytest.fixture
def resumed(services):
    """Trains with a log, is killed after a snapshot, and goes on; the result."""

    def train(kind):
        done = subprocess.run([sys.executable, "-c", KILLED, kind], cwd=services, check=False)
        assert done.returncode == -9
        result = recipe(epochs=3).train(run_dir="a", callbacks=[Log(kind)], evaluation=evaluation(), snapshot_every=4)
        assert result.resumed_from < 11, "some steps were logged, and done again"
        return result

    return train


def in_single(values):
    """As TensorBoard keeps them."""
    return torch.tensor(values, dtype=torch.float32).tolist()


def test_tensorboard_shows_each_step_once(resumed):
    """What TensorBoard reads has every loss and evaluation at its step, though some were written twice."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = resumed("tensorboard")
    shown = EventAccumulator("a/tensorboard")
    shown.Reload()
    assert set(shown.Tags()["scalars"]) == {"epoch", "loss", "grad_norm", "lr", "samples", "accuracy"}
    losses, evaluated = shown.Scalars("loss"), shown.Scalars("accuracy")
    assert [event.step for event in losses] == list(range(15))
    assert [event.value for event in losses] == in_single(result.loss_history)
    assert [event.step for event in evaluated] == [4, 9, 14]
    assert [event.value for event in evaluated] == in_single([item.value for item in result.metric_history])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_metrics_of_torchmetrics_are_what_they_are_on_all_outputs(workers):
    """F1, AUROC, kappa and a collection, folded over chunks, equal one update with everything, for any workers."""
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = {
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=2, average="macro"),
        "auroc": torchmetrics.AUROC(task="multiclass", num_classes=2),
        "kappa": torchmetrics.CohenKappa(task="multiclass", num_classes=2),
        "two": torchmetrics.MetricCollection(
            {kind: torchmetrics.Accuracy(task="multiclass", num_classes=2, average=kind) for kind in ("micro", "macro")}
        ),
    }
    with recipe(epochs=2).start(workers=workers) as run:
        run.finish()
        found, outputs = run.evaluate(metrics, (HELD_OUT, TARGETS), batch_size=7), run.predict(HELD_OUT)
    for name in ("f1", "auroc", "kappa"):
        fresh = metrics[name].clone()
        fresh.update(outputs, TARGETS)
        assert found[name] == float(fresh.compute()), name
    assert found["two/micro"] == pytest.approx(float(accuracy(outputs, TARGETS)))
    assert found["two/macro"] != found["two/micro"]
