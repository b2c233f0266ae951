"""Callbacks: hooks and their order, state that is in snapshots, and those that phalanx has."""

import csv
import dataclasses
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import phalanx
from phalanx import callbacks
from tests.callbacks.jobs import EPOCHS, HELD_OUT, TARGETS, X, accuracy, evaluation, left, make_model, recipe
from tests.callbacks.jobs import callbacks as job


class Witness:
    """Notes which hooks are called, and counts steps in its state."""

    def __init__(self):
        self.seen, self.counted = [], 0

    def begin(self, run):
        self.seen.append(("begin", run.steps))

    def step(self, report):
        self.counted += 1
        self.seen.append(("step", report.step, report.metric))

    def evaluated(self, values):
        self.seen.append(("evaluated", sorted(values)))

    def end(self, result):
        self.seen.append(("end", result.steps))

    def state(self):
        return {"counted": self.counted, "array": np.arange(self.counted), "tensor": torch.full((2,), self.counted)}

    def load(self, state):
        self.counted = state["counted"]
        self.seen.append(("load", self.counted, state["array"].tolist(), state["tensor"].tolist()))


def test_hooks_come_in_one_order():
    """begin, then step, evaluated and the functions with the value, and end with a whole result."""
    witness = Witness()
    seen = witness.seen
    recipe(epochs=1).train(callbacks=[witness, lambda report: seen.append((report.step, report.metric is not None))],
                           evaluation=evaluation())  # fmt: skip
    expected = [("begin", 0)]
    for step in range(5):
        expected += [("step", step, None), *([("evaluated", ["accuracy"])] if step == 4 else []), (step, step == 4)]
    assert seen == [*expected, ("end", 5)]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_state_of_a_callback_is_that_of_the_snapshot(tmp_path, workers):
    """A run that goes on loads what the callback had when the snapshot was made, before begin; tensors come back."""
    options = {"run_dir": tmp_path, "snapshot_every": 2, "workers": workers}
    with recipe(epochs=1).start(callbacks=[Witness()], **options) as run:
        next(run)
        next(run)
    witness = Witness()
    result = recipe(epochs=1).train(callbacks=[witness], **options)
    assert witness.seen[:3] == [("load", 2, [0, 1], [2.0, 2.0]), ("begin", 2), ("step", 2, None)]
    assert (witness.counted, result.resumed_from) == (5, 2)


@pytest.mark.long
@pytest.mark.parametrize("others", [(), [print]], ids=["none", "another"])
def test_a_state_that_nobody_takes_is_told_of(tmp_path, others):
    """Callbacks that are gone when a run goes on are named in one warning, at the caller's line, and then forgotten."""
    with recipe(epochs=1).start(callbacks=[Witness(), callbacks.EMA(0.9)], run_dir=tmp_path) as run:
        next(run)
    with pytest.warns(UserWarning, match=r"step 1 .* of Witness, EMA.*callbacks=\[Witness, EMA\] again") as caught:
        first = recipe(epochs=1).train(run_dir=tmp_path, callbacks=others)
    assert [item.filename for item in caught] == [__file__]
    again = recipe(epochs=1).train(run_dir=tmp_path, callbacks=others)
    assert first.digest == again.digest == recipe(epochs=1).train().digest


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_with_all_of_them_is_the_same_for_any_workers_and_after_a_resume(tmp_path, workers):
    """Stop, best files, averages, evaluations and the log are equal, whole, on workers, or killed and resumed."""
    whole, other = tmp_path / "whole", tmp_path / "other"
    due = evaluation()
    expected = left(recipe().train(run_dir=whole, callbacks=job(), evaluation=due, engine="inline"), whole)
    assert expected[0] < EPOCHS * 5, "it stopped early"
    with recipe().start(run_dir=other, callbacks=job(), evaluation=due, snapshot_every=4, workers=3) as run:
        for report in run:
            if report.step == 16:
                break
    result = recipe().train(run_dir=other, callbacks=job(), evaluation=due, snapshot_every=4, workers=workers)
    assert left(result, other) == expected
    again = recipe().train(run_dir=other, callbacks=job(), evaluation=due, snapshot_every=4)
    assert (again.steps, again.digest) == expected[:2], "a run that had stopped stays so"


@pytest.mark.long
def test_a_driver_that_is_killed_leaves_a_job_that_goes_on(tmp_path):
    """After SIGKILL of the caller's process between two snapshots, the same call ends as if nothing had been."""
    script = (
        "import os, signal, sys, phalanx\nfrom tests.callbacks.jobs import *\n"
        "def kill(report):\n    if report.step == 14: os.kill(os.getpid(), signal.SIGKILL)\n"
        "recipe().train(run_dir=sys.argv[1], callbacks=[*callbacks(), kill], evaluation=evaluation(), snapshot_every=4,"
        " workers=2)\n"
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    root = str(pathlib.Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", script, str(killed)], cwd=root, env=os.environ, check=False)
    assert done.returncode == -9
    expected = left(recipe().train(run_dir=whole, callbacks=job(), evaluation=evaluation()), whole)
    result = recipe().train(run_dir=killed, callbacks=job(), evaluation=evaluation(), snapshot_every=4, workers=2)
    assert result.resumed_from in (0, 4, 8, 12)  # the newest that was whole on the disk
    assert left(result, killed) == expected


@pytest.mark.long
def test_without_its_state_a_resumed_run_would_stop_elsewhere(tmp_path):
    """Negative twin: the same, but the counts of EarlyStopping are lost on the way."""

    class Forgetful(callbacks.EarlyStopping):
        def load(self, state):
            pass

    def train(kind, folder, steps=None):
        with recipe().start(run_dir=folder, callbacks=[kind("accuracy", patience=2)], evaluation=evaluation()) as run:
            for report in run:
                if report.step + 1 == steps:
                    return None
            return run.steps

    whole = train(callbacks.EarlyStopping, tmp_path / "a")
    for kind, stopped in ((callbacks.EarlyStopping, True), (Forgetful, False)):
        folder = tmp_path / kind.__name__
        train(kind, folder, whole - 1)
        assert (train(kind, folder) == whole) is stopped


def test_averages_are_those_of_averaged_model():
    """With one replica, EMA has the bits of torch's AveragedModel in a plain loop, after each step."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    one = recipe(replicas=1, epochs=2)
    result = one.train(callbacks=[callbacks.EMA(0.9)])
    with one.start() as run:
        model = None
        for _ in run:
            if model is None:
                model = AveragedModel(run.result().model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            model.update_parameters(run.model)
    for name, value in model.module.named_parameters():
        assert torch.equal(value, result.averaged[name])
    assert result.digest == one.train().digest, "averages are no part of the digest"
    assert not torch.equal(result.averaged["0.weight"], result.params["0.weight"])


@pytest.mark.parametrize("workers", [1, 2])
def test_evaluations_and_predictions_use_averages(workers):
    """With EMA, they are those of a model with the averaged weights; the run's own weights stay what they are."""
    with recipe(epochs=2).start(callbacks=[callbacks.EMA(0.9)], workers=workers) as run:
        for _ in run:
            pass
        before = run.result().digest
        value, shown = run.evaluate(accuracy, (HELD_OUT, TARGETS)), run.predict(HELD_OUT)
        result = run.result()
    assert result.digest == before
    model = make_model()
    model.load_state_dict(result.model.state_dict() | result.averaged)
    model.eval()
    with torch.no_grad():
        assert torch.equal(shown, model(HELD_OUT))
    assert value == pytest.approx(float(accuracy(shown, TARGETS)))
    assert torch.equal(result.predict(HELD_OUT), shown)


def test_best_weights_are_in_memory_without_a_directory():
    """SaveBest keeps copies: they are the weights of that step, though training went on."""
    result = recipe(epochs=6).train(callbacks=[callbacks.SaveBest("accuracy")], evaluation=evaluation())
    best = result.best
    assert best.value == max(item.value for item in result.metric_history)
    assert best.path is None
    model = make_model()
    model.load_state_dict(best.weights)
    after = recipe(epochs=None, steps=best.steps).train()
    assert torch.equal(model[0].weight, after.params["0.weight"])


def test_a_log_has_a_line_for_each_step(tmp_path):
    """Columns are there for all that was evaluated; a value stands in the line of its step."""
    result = recipe(epochs=2).train(callbacks=[callbacks.Log("csv", tmp_path / "a.csv")], evaluation=evaluation())
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(10))
    assert [float(row["loss"]) for row in rows] == result.loss_history
    assert [row["accuracy"] for row in rows if row["accuracy"]] == [repr(item.value) for item in result.metric_history]


def test_tensorboard_gets_scalars(tmp_path, monkeypatch):
    """Each value becomes a scalar at its step; after a resume, later steps are purged."""
    told = []

    class SummaryWriter:
        def __init__(self, folder, purge_step=None):
            told.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def flush(self):
            pass

        close = flush

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = callbacks.Log("tensorboard", tmp_path / "logs")
    with recipe(epochs=1).start(run_dir=tmp_path / "run", callbacks=[log], evaluation=evaluation()) as run:
        next(run)
    result = recipe(epochs=1).train(run_dir=tmp_path / "run", callbacks=[log], evaluation=evaluation())
    assert [item[1] for item in told if item[0] == str(tmp_path / "logs")] == [None, 1]
    losses = {step: value for name, value, step in (item for item in told if len(item) == 3) if name == "loss"}
    assert [losses[step] for step in range(5)] == result.loss_history
    assert ("accuracy", result.metric_history[-1].value, 4) in told


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_can_be_stopped(workers):
    """stop() ends iterating after the step that is being done, in a callback as in a loop; result() is that state."""

    class Stop:
        def begin(self, run):
            self.run = run

        def step(self, report):
            if report.step == 2:
                self.run.stop()

    result = recipe().train(callbacks=[Stop()], workers=workers)
    assert (result.steps, result.digest) == (3, recipe(epochs=None, steps=3).train().digest)


@pytest.mark.long
def test_a_result_says_that_its_run_was_stopped(tmp_path):
    """Where and by whom, again when it is asked for again; a run that went to its end was not, whoever stopped it."""
    stopping = {"evaluation": evaluation(), "run_dir": tmp_path}
    first = recipe().train(callbacks=[callbacks.EarlyStopping("accuracy", patience=2)], **stopping)
    said = f"at step {first.steps} of {EPOCHS * 5} by EarlyStopping('accuracy', patience=2)"
    again = recipe().train(callbacks=[callbacks.EarlyStopping("accuracy", patience=2)], **stopping)
    assert first.steps < EPOCHS * 5
    assert (first.stopped_early, again.stopped_early, again.resumed_from) == (said, said, first.steps)
    with pytest.warns(UserWarning, match="EarlyStopping.patience is 9 here, and 2 there"):
        other = recipe().train(callbacks=[callbacks.EarlyStopping("accuracy", 9, 0.1)], **stopping)
    assert (other.digest, other.stopped_early) == (first.digest, said)
    with pytest.warns(UserWarning, match="the state of EarlyStopping"):
        whole = recipe().train(**stopping)
    assert (whole.steps, whole.stopped_early) == (EPOCHS * 5, None)
    with recipe().start() as run:
        next(run)
        run.stop()
        assert (run.stopped, run.result().stopped_early) == (True, f"at step 1 of {EPOCHS * 5} by run.stop()")
        run.step()
        assert list(run) == []
    with recipe(epochs=None, steps=1).start() as run:
        next(run)
        run.stop()
        assert run.result().stopped_early is None


def test_an_epoch_that_does_not_come_is_told_of():
    """Where Thaw waits for an epoch after the last one a warning says so; in the last one it thaws."""
    with pytest.warns(UserWarning, match="Thaw has epoch=2, but the last epoch of this run is 1, counted from 0"):
        recipe(epochs=2).train(callbacks=[callbacks.Thaw("0", epoch=2)])
    recipe(epochs=2).train(callbacks=[callbacks.Thaw("0", epoch=1)])


WRONG = [
    (lambda: callbacks.EarlyStopping("happiness"), "metric is 'happiness'.*mode='max' or 'min'"),
    (lambda: callbacks.EarlyStopping("loss", patience=0), "patience is 0"),
    (lambda: callbacks.EarlyStopping("loss", mode="up"), "mode is 'up'"),
    (lambda: callbacks.SaveBest("accuracy", keep=0), "keep is 0"),
    (lambda: callbacks.EMA(1.0), "decay is 1.0"),
    (lambda: callbacks.Log("notebook"), "to is 'notebook'"),
    (lambda: callbacks.Log("csv", color=3), "takes no color"),
    (lambda: recipe().train(callbacks=[callbacks.EMA]), r"the class EMA; pass an instance"),
    (lambda: recipe().train(callbacks=["EMA"]), "callbacks is \\['EMA'\\]"),
    (lambda: recipe().train(callbacks=[types.SimpleNamespace(state=dict)]), "only one of state"),
    (
        lambda: recipe().train(callbacks=[callbacks.EarlyStopping("f1")], evaluation=evaluation()),
        "metric of EarlyStopping is 'f1', but what is evaluated is accuracy",
    ),
    (
        lambda: recipe().train(
            callbacks=[callbacks.SaveBest("accuracy", mode=mode) for mode in ("min", "max")],
            evaluation=evaluation(),
            run_dir="/proc/never",
        ),
        r"SaveBest\('accuracy'\) twice, which would write the same files in run_dir; leave one out",
    ),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words[:20] for _, words in WRONG])
def test_wrong_callbacks_are_refused(call, words):
    """The argument, its value, and the way out are named."""
    with pytest.raises(phalanx.UsageError, match=words):
        call()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_log_has_the_loss_of_each_phase(tmp_path, workers):
    """A phase has columns of its own by its name, empty in the steps in which it is not done."""
    phases = [
        phalanx.Phase(torch.nn.functional.cross_entropy, parameters="0", name="critic"),
        phalanx.Phase(torch.nn.functional.cross_entropy, parameters="4", name="actor", every=2),
    ]
    said = {"replicas": 2, "batch_size": 30, "steps": 4, "phases": phases}
    made = phalanx.Recipe(make_model, (X, X[:, 0].gt(0).long()), **said)
    result = made.train(callbacks=[callbacks.Log("csv")], run_dir=tmp_path, workers=workers)
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss/critic"]) for row in rows] == result.phase_history["critic"] == result.loss_history
    assert [float(row["loss/actor"]) for row in rows[::2]] == result.phase_history["actor"]
    assert [row["loss/actor"] for row in rows[1::2]] == ["", ""]
    assert {"grad_norm/actor", "lr/critic"} <= set(rows[0])


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    """Log says what to install."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(phalanx.UsageError, match="pip install tensorboard"):
        recipe().train(callbacks=[callbacks.Log("tensorboard", tmp_path)])


def test_the_data_of_the_job_is_what_it_says():
    """Negative twin of all of the above: with another seed, nothing is the same."""
    assert recipe(epochs=1).train().digest != recipe(epochs=1, seed=1).train().digest
    assert len(X) == 150


MADE = [callbacks.EarlyStopping("accuracy"), callbacks.SaveBest("loss")]


@pytest.mark.parametrize("made", MADE, ids=lambda made: type(made).__name__)
def test_who_waits_for_a_metric_that_nobody_evaluates(made):
    """Early stopping and best weights without an evaluation are refused before the first step."""
    with pytest.raises(phalanx.UsageError, match=f"{type(made).__name__}.*but nothing is evaluated"):
        recipe().train(engine="inline", callbacks=[made])
    with pytest.raises(phalanx.UsageError, match=f"{type(made).__name__}.*data is None.*call run.evaluate"):
        dataclasses.replace(recipe(epochs=1), data=None, epochs=None).start(engine="inline", callbacks=[made])
