"""Logs through the libraries themselves, read back as their users would; each is skipped where it is not installed."""

import os
import pathlib
import struct
import subprocess
import sys

import pytest
import torch

import phalanx
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
    """Where wandb and mlflow write: an empty folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
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


def test_mlflow_has_each_step_once_in_one_run(resumed):
    """One run, finished, with every loss and evaluation at its step, not twice after a resume."""
    mlflow = pytest.importorskip("mlflow")
    result = resumed("mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    losses, evaluated = (client.get_metric_history(run.info.run_id, name) for name in ("loss", "accuracy"))
    assert run.info.status == "FINISHED"
    assert [(item.step, item.value) for item in losses] == list(enumerate(result.loss_history))
    assert [(item.step, item.value) for item in evaluated] == [
        (item.steps - 1, item.value) for item in result.metric_history
    ]


def test_an_open_run_of_mlflow_is_written_to(tmp_path, monkeypatch):
    """Within ``with mlflow.start_run():`` the log goes there, and the run stays open; where= is refused then."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    with mlflow.start_run() as run:
        result = recipe(epochs=1).train(callbacks=[Log("mlflow")])
        assert mlflow.active_run().info.run_id == run.info.run_id
        with pytest.raises(phalanx.UsageError, match="was given where, but a run of mlflow is open"):
            recipe(epochs=1).train(callbacks=[Log("mlflow", "elsewhere")])
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [item.value for item in history] == result.loss_history


def rows_of_wandb(file):
    """What an offline file of wandb holds: the id, and (step, loss) of each row. Its records are those of LevelDB."""
    import json

    from wandb.proto import wandb_internal_pb2

    content, position, piece, rows, run_id = file.read_bytes(), 7, b"", [], None
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        piece += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record, piece = wandb_internal_pb2.Record.FromString(piece), b""
            run_id = record.run.run_id or run_id
            if record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                rows.append((items["_step"], items["loss"]))
    return run_id, rows


def test_wandb_goes_on_in_the_same_run(services):
    """Both parts wrote to one run, by its id; together they have every step, once."""
    pytest.importorskip("wandb")
    with recipe(epochs=3).start(run_dir="a", callbacks=[Log("wandb")], evaluation=evaluation()) as run:
        for report in run:
            if report.step == 11:
                break
    result = recipe(epochs=3).train(run_dir="a", callbacks=[Log("wandb")], evaluation=evaluation())
    files = sorted(services.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    (one, before), (other, after) = map(rows_of_wandb, files)
    assert one == other
    assert before + after == list(enumerate(result.loss_history))


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
