"""Callbacks that follow a metric take the value of that metric: of no other data set, run or process."""

import types

import pytest
import torch
from torch.nn import functional as F

import phalanx
from phalanx.callbacks import EarlyStopping, Log, SaveBest
from tests.callbacks.jobs import HELD_OUT, TARGETS, X, Y, accuracy, evaluation, make_model, recipe


def constant(value):
    """A metric that is always the same."""
    return lambda output, target: output.new_tensor(value)


def job(**changes):
    return recipe(**{"replicas": 1, "batch_size": 75, "epochs": 6} | changes)


def several(low=0.25, high=0.99):
    """The metric on held out data in each second epoch, and under a longer name on others in each."""
    held_out = phalanx.Evaluation({"accuracy": constant(low)}, (HELD_OUT, TARGETS), every_epochs=2)
    return [held_out, phalanx.Evaluation({"accuracy": constant(high)}, (X, Y), name="train")]


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)


def test_a_metric_is_that_of_its_own_evaluation():
    """Where it is not due, "accuracy" is not "train/accuracy", which was taken for it: for best, stop and schedule."""
    stop = EarlyStopping("accuracy", patience=3)
    found = job().train(evaluation=several(), callbacks=[SaveBest("accuracy"), stop])
    assert (found.best.value, found.best.steps) == (0.25, 4)
    assert (stop.best_value, found.steps) == (0.25, 12)
    assert stop.stopped_at is None
    scheduled = job(scheduler=plateau, schedule_every="epoch", schedule_on="accuracy")
    rates = {
        high: [item.lr for item in scheduled.start(evaluation=several(high=high), progress=False)]
        for high in (0.1, 0.99)
    }
    assert rates[0.1] == rates[0.99]
    assert len(set(rates[0.1])) == 2  # the value after four epochs improves nothing
    named = SaveBest("train/accuracy")
    job().train(evaluation=several(), callbacks=[named])
    assert named.best.value == pytest.approx(0.99)  # the twin: another name has the other value


@pytest.mark.parametrize("stop", [2, 6])
def test_a_name_means_the_same_after_a_resume(stop, tmp_path):
    """What may return several values has told no name yet. "accuracy" was that of other data until it was due again."""
    due = [
        phalanx.Evaluation({"accuracy": phalanx.whole(constant(0.5))}, (HELD_OUT, TARGETS), every_epochs=2),
        phalanx.Evaluation({"accuracy": phalanx.whole(accuracy)}, (X, Y), name="train"),
    ]
    scheduled = job(scheduler=plateau, schedule_every="epoch", schedule_on="accuracy", epochs=None, steps=12)
    wanted = scheduled.train(evaluation=due, progress=False)
    with scheduled.start(run_dir=tmp_path, evaluation=due, progress=False) as run:
        next(report for report in run if report.step + 1 == stop)
    found = scheduled.train(run_dir=tmp_path, evaluation=due, progress=False)
    assert (found.digest, found.metric_history) == (wanted.digest, wanted.metric_history)
    assert phalanx.verify(scheduled, tmp_path, progress=False).status == 0


def test_a_name_that_no_value_has_is_refused():
    """A dict called "f1" has no value "f1", and what waits for it is not left waiting, nor given "train/f1"."""
    both = [
        phalanx.Evaluation({"f1": phalanx.whole(lambda output, target: {"macro": 0.5})}, (HELD_OUT, TARGETS)),
        phalanx.Evaluation({"f1": accuracy}, (X, Y), name="train"),
    ]
    with pytest.raises(phalanx.UsageError, match="is 'f1', but what is evaluated is train/f1, f1/macro; name one"):
        job().train(evaluation=both, callbacks=[SaveBest("f1", mode="max")], progress=False)


@pytest.mark.long
def test_a_state_of_another_metric_is_not_taken_over(tmp_path):
    """A run that goes on with callbacks for another metric counts anew, and says so; its best was that of the other."""
    both = phalanx.Evaluation({"cost": constant(0.01), "accuracy": accuracy}, (HELD_OUT, TARGETS))
    first = [EarlyStopping("cost", patience=9, mode="min"), SaveBest("cost", mode="min")]
    job(epochs=2).train(run_dir=tmp_path, evaluation=both, callbacks=first, progress=False)
    stop, best = EarlyStopping("accuracy", patience=9), SaveBest("accuracy")
    with pytest.warns(UserWarning, match="begins anew there|may not be that of the snapshot") as warned:
        found = job().train(run_dir=tmp_path, evaluation=both, callbacks=[stop, best], progress=False)
    told = [str(one.message) for one in warned]
    for name in ("EarlyStopping", "SaveBest"):
        assert any(f"the state of {name}('cost'), and this run has {name}('accuracy')" in text for text in told)
    assert (found.best.metric, found.best.steps > 4) == ("accuracy", True)
    assert found.best.weights.keys() == dict(found.model.state_dict()).keys()
    assert stop.best_value == found.best.value


class Present:
    """A run as callbacks see it in one of several processes."""

    def __init__(self, folder):
        self.kept_in, self.run_dir, self.resumed_from, self.steps, self.averaged = folder, None, None, 0, None
        self.metric_names = {"accuracy"}
        self.model = torch.nn.Linear(2, 2)
        self.params = dict(self.model.named_parameters())


def test_who_keeps_the_run_later_writes_the_best(tmp_path):
    """Over hosts another process keeps the run once the first has fallen. It wrote no weights from then on."""
    best, run = SaveBest("accuracy"), Present(tmp_path)
    best.begin(run)
    run.steps = 3
    best.evaluated({"accuracy": 0.5})
    assert not best.best.path.exists()
    run.steps, run.run_dir = 6, tmp_path
    best.evaluated({"accuracy": 0.75})
    assert best.best.weights["weight"].equal(run.model.weight)


def test_who_keeps_the_run_later_leaves_the_log(tmp_path):
    """A log that another process has begun goes on; it was emptied."""
    first, later = Log("csv"), Log("csv")
    phalanx_run = job(epochs=3).start(run_dir=tmp_path, callbacks=[first], progress=False)
    with phalanx_run as run:
        run.finish()
    rows = (tmp_path / "log.csv").read_text().splitlines()
    assert len(rows) == 7
    later.begin(types.SimpleNamespace(run_dir=tmp_path, resumed_from=None, steps=6))
    assert (tmp_path / "log.csv").read_text().splitlines() == rows


def test_metrics_in_metrics_have_one_name(tmp_path):
    """A dict of dicts, as scikit-learn's report is, gives names with slashes, and the run goes on; it could not."""
    nested = phalanx.whole(lambda output, target: {"macro": {"f1": 0.5, "all": {"n": 60}}, "accuracy": 0.25})
    due = phalanx.Evaluation({"told": nested}, (HELD_OUT, TARGETS))
    found = [job(epochs=epochs).train(run_dir=tmp_path, evaluation=due, progress=False) for epochs in (1, 2)]
    assert found[1].metrics == {"told/macro/f1": 0.5, "told/macro/all/n": 60.0, "told/accuracy": 0.25}
    assert found[1].resumed_from == 2
    assert "'told/macro/all/n': 60" in repr(found[1])


def test_a_call_that_is_never_made_is_told():
    """An object with hooks is called by those, and not as a function."""

    class Show:
        def begin(self, run):
            pass

        def __call__(self, report):
            raise AssertionError

    with pytest.warns(UserWarning, match="a Show with hooks, so its __call__ is never called; call that step"):
        job(epochs=1).train(callbacks=[Show()], evaluation=evaluation(), progress=False)


def test_lines_after_epochs_of_a_stream(capsys):
    """A stream has epochs, too, after which a line is printed; there was one at the end only."""
    stream = phalanx.Stream(lambda: zip(X, Y, strict=True), epoch_size=150)
    phalanx.Recipe(make_model, stream, F.cross_entropy, batch_size=75, epochs=3).train(workers=1, progress=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "epoch " in line]
    assert [line.partition("epoch ")[2][:3] for line in lines] == ["1/3", "2/3", "3/3"]


@pytest.mark.long
def test_objects_of_torchmetrics_ask_no_group():
    """In a group of the user's own each process has seen all samples; a sum was gathered from all of them again."""
    torchmetrics = pytest.importorskip("torchmetrics")
    asked = []

    class Asking(torchmetrics.Metric):
        def __init__(self):
            super().__init__(distributed_available_fn=lambda: True)
            self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, output, target):
            self.total += target.sum()

        def compute(self):
            return self.total

        def _sync_dist(self, *given, **named):
            asked.append(1)

    for metric in (Asking(), torchmetrics.MetricCollection({"sum": Asking()})):
        found = job(epochs=1).train(evaluation=phalanx.Evaluation(metric, (HELD_OUT, TARGETS)), progress=False)
        assert list(found.metrics.values()) == [float(TARGETS.sum())]
    assert asked == []
    alone = Asking()
    alone.update(HELD_OUT, TARGETS)
    alone.compute()
    assert asked == [1]  # the twin: by itself it asks
