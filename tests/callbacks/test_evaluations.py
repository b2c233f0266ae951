"""Evaluations as people want them, and predictions: several metrics, whole ones, metric objects, any workers."""

import contextlib
import copy
import functools
import os
import signal

import numpy as np
import pytest
import torch

import phalanx
from tests.callbacks.jobs import HELD_OUT, TARGETS, X, Y, accuracy, evaluation, recipe


def f1(output, target):
    """A number that is no mean over samples."""
    chosen = output.argmax(1)
    return 2 * float(((chosen == 1) & (target == 1)).sum()) / float((chosen == 1).sum() + (target == 1).sum())


class MeanAbsolute:
    """A metric object as torchmetrics has them: sums that are merged."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.count = torch.zeros((), dtype=torch.float64), 0

    def update(self, output, target):
        self.total += output.double().abs().sum()
        self.count += output.numel()

    def merge_state(self, other):
        self.total += other.total
        self.count += other.count

    def compute(self):
        return self.total / self.count


METRICS = {"accuracy": accuracy, "f1": phalanx.whole(f1), "size": MeanAbsolute()}


@pytest.fixture(scope="module")
def values():
    """All metrics by the inline engine, and the outputs."""
    with recipe(epochs=1).start(engine="inline") as run:
        run.finish()
        return run.evaluate(METRICS, (HELD_OUT, TARGETS), batch_size=7), run.predict(HELD_OUT, batch_size=7)


def test_metrics_are_what_they_are_over_all_samples(values):
    """Means, a whole metric and an object equal what one call on all outputs gives."""
    found, outputs = values
    assert found["accuracy"] == pytest.approx(float(accuracy(outputs, TARGETS)))
    assert found["f1"] == f1(outputs, TARGETS)
    assert found["size"] == pytest.approx(float(outputs.double().abs().mean()))
    assert found["f1"] != pytest.approx(np.mean([f1(outputs[n : n + 7], TARGETS[n : n + 7]) for n in range(0, 60, 7)]))


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
def test_metrics_and_predictions_have_the_same_bits_for_any_workers(values, workers):
    """Each chunk is the same wherever it is computed, and all are folded in order."""
    with recipe(epochs=1).start(workers=workers) as run:
        run.finish()
        assert run.evaluate(METRICS, (HELD_OUT, TARGETS), batch_size=7) == values[0]
        assert torch.equal(run.predict((HELD_OUT, TARGETS), batch_size=7), values[1])
        result = run.result()
    assert torch.equal(result.predict(HELD_OUT, batch_size=7), values[1])
    model = copy.deepcopy(result.model).eval()
    with torch.no_grad():
        assert torch.allclose(model(HELD_OUT), values[1])


def test_several_evaluations_have_names_and_periods():
    """A dict names them; each comes as often as it says and after the last step, and reports have all values."""
    reports = []
    due = {"test": evaluation(every_epochs=2), "train": phalanx.Evaluation([accuracy], (X, Y), every_steps=3)}
    result = recipe(epochs=3).train(evaluation=due, callbacks=[reports.append])
    assert [(item.steps, item.name) for item in result.metric_history] == [
        (3, "train/accuracy"), (6, "train/accuracy"), (9, "train/accuracy"), (10, "test/accuracy"),
        (12, "train/accuracy"), (15, "test/accuracy"), (15, "train/accuracy"),
    ]  # fmt: skip
    assert set(reports[-1].metrics) == {"test/accuracy", "train/accuracy"}
    assert reports[-1].metric == reports[-1].metrics["test/accuracy"]
    assert (reports[0].metric, dict(reports[0].metrics)) == (None, {})


def test_predictions_of_single_samples_and_of_trees():
    """Without an axis for samples one is added; a dict keeps what has a row per sample, and drops the rest."""
    single = recipe(batch_size=None, epochs=None, steps=1, forward_fn=lambda model, sample: model[0](sample[0]))
    with single.start() as run:
        assert run.predict((HELD_OUT, TARGETS)).shape == (60, 16)
    tree = {"wide": 1, "loss": 2}
    with recipe(epochs=1).start() as run:
        found = run.predict(
            HELD_OUT, forward_fn=lambda model, x: {"wide": model(x), "pair": (x, x), "loss": x.mean(), "cache": tree}
        )
        assert set(found) == {"wide", "pair"}
        assert torch.equal(found["pair"][1], HELD_OUT)
        with pytest.raises(phalanx.UsageError, match="no row for each; pass forward_fn"):
            run.predict(HELD_OUT, forward_fn=lambda model, x: x.mean())


def test_what_cannot_be_measured_is_refused():
    """Names, the value, and the way out."""
    with recipe(epochs=1).start() as run:
        for metrics, words in (
            ([accuracy, accuracy], "several metrics of one name"),
            ({}, "must be callable"),
            ({"a": 3}, "must be callable"),
            (phalanx.whole(lambda output, target: output), "computed a Tensor of shape"),
        ):
            with pytest.raises(phalanx.UsageError, match=words):
                run.evaluate(metrics, (HELD_OUT, TARGETS))
        with pytest.raises(phalanx.WorkerError, match="ZeroDivisionError in user code while evaluating all samples"):
            run.evaluate(phalanx.whole(lambda output, target: 1 / 0), (HELD_OUT, TARGETS))
    with pytest.raises(phalanx.UsageError, match="several of one name"):
        recipe().train(evaluation=[evaluation(), evaluation()])


@pytest.mark.parametrize("full", [None, True, False])
def test_objects_of_torchmetrics_that_are_not_merged(full):
    """They are refused before training, where there are several batches; a single batch is taken, and so are others."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Count(torchmetrics.Metric):
        full_state_update = full

        def __init__(self):
            super().__init__()
            self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

        def update(self, output, target):
            self.count += len(output)

        def compute(self):
            return self.count

    data = HELD_OUT, TARGETS
    with recipe(epochs=1).start(engine="inline") as run:
        sizes = (60, 59) if full is False else (60,)
        assert {run.evaluate(Count(), data, batch_size=size) for size in sizes} == {60}
    for metric in (Count(), torchmetrics.MetricCollection({"n": Count()}), {"a": accuracy, "n": Count()}):
        refused = pytest.raises(phalanx.UsageError, match="a Count, whose states its library does not merge")
        with contextlib.nullcontext() if full is False else refused:
            phalanx.Evaluation(metric, data, batch_size=59)


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_schedule_goes_by_epochs_or_by_a_metric(tmp_path, workers):
    """StepLR is stepped once an epoch; ReduceLROnPlateau sees the epoch's loss or the metric; also after a resume."""

    def rates(made, **options):
        found = []
        result = made.train(callbacks=[lambda report: found.append(report.lr)], workers=workers, **options)
        return found[::5], result.digest

    by_epoch = {"schedule_every": "epoch", "epochs": 4}
    step_lr = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
    assert rates(recipe(scheduler=step_lr, **by_epoch))[0] == [0.01, 0.005, 0.0025, 0.00125]
    never = phalanx.Evaluation({"never": lambda output, target: 0.0}, (HELD_OUT, TARGETS))
    made = recipe(scheduler=plateau, schedule_on="never", **by_epoch)
    expected = rates(made, evaluation=never)
    assert expected[0] == [0.01, 0.01, 0.005, 0.0025]
    with made.start(run_dir=tmp_path, evaluation=never, workers=2, snapshot_every=1) as run:
        for report in run:
            if report.step == 9:
                break
    assert made.train(run_dir=tmp_path, evaluation=never, workers=workers).digest == expected[1]
    assert rates(recipe(scheduler=plateau, **by_epoch))[1] != expected[1]


def test_schedules_that_cannot_be_are_refused():
    """What is missing is named."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    for changes, words in (
        ({"schedule_every": "epoch"}, "there is no scheduler"),
        ({"scheduler": plateau, "schedule_every": "year"}, "schedule_every is 'year'"),
        ({"scheduler": plateau, "schedule_on": "accuracy"}, "add schedule_every='epoch'"),
    ):
        with pytest.raises(phalanx.UsageError, match=words):
            recipe(**changes)
    made = recipe(scheduler=plateau, schedule_every="epoch", schedule_on="f1")
    with pytest.raises(phalanx.UsageError, match="nothing is evaluated"):
        made.train()
    with pytest.raises(phalanx.UsageError, match="schedule_on is 'f1', but what is evaluated is accuracy"):
        made.train(evaluation=evaluation())


@pytest.mark.long
def test_what_is_so_anyway_may_be_said():
    """Arguments that say what holds where nothing is said change nothing, without a scheduler, too."""
    said = recipe(micro_batches=1, schedule_every="step", modes="train", phases=None)
    assert said.train(engine="inline").digest == recipe().train(engine="inline").digest


def test_epochs_that_were_taken_for_steps_are_warned_of():
    """A schedule that is through within the first epoch is pointed at; saying which is meant silences it."""
    step_lr = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    with pytest.warns(UserWarning, match=r"StepLR with step_size=1, which counts steps.*schedule_every='epoch'"):
        recipe(scheduler=step_lr, epochs=3).start().close()
    recipe(scheduler=step_lr, epochs=3, schedule_every="step").start().close()
    recipe(scheduler=step_lr, epochs=None, steps=3).start().close()


class Killer:
    """Kills a worker between an evaluation and the schedule that it is for, and after the step."""

    def begin(self, run):
        self.run, self.killed = run, 0

    def evaluated(self, values):
        self.kill(0)

    def step(self, report):
        if report.step in (5, 10):
            self.kill(1)

    def kill(self, worker):
        os.kill(self.run.worker_pids[worker], signal.SIGKILL)
        self.killed += 1


def dying_once(output, target, path=None):
    """A metric that ends its worker the first time."""
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


@pytest.mark.long
def test_workers_that_fall_around_an_evaluation_change_nothing(tmp_path):
    """A metric that kills its worker is measured again; what a schedule was told is not lost with who was told."""
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="max", factor=0.5, patience=0)
    made = recipe(scheduler=plateau, schedule_every="epoch", schedule_on="never", epochs=4)
    path = tmp_path / "died"
    path.touch()
    due = phalanx.Evaluation({"never": functools.partial(dying_once, path=path)}, (HELD_OUT, TARGETS), batch_size=8)
    expected = made.train(engine="inline", evaluation=due)
    path.unlink()
    killer = Killer()
    result = made.train(workers=2, evaluation=due, callbacks=[killer])
    assert result.digest == expected.digest
    assert killer.killed == 6
    assert sum(incident.kind == "death" for incident in result.incidents) >= 6


def bootstrap(output, target):
    """The lower end of an interval, from samples that are drawn anew."""
    right = (output.argmax(1) == target).double()
    drawn = [float(right[np.random.randint(0, len(right), len(right))].mean()) for _ in range(20)]
    return min(drawn) + float(torch.rand(())) / 1000


@pytest.mark.long
def test_what_a_whole_metric_draws_is_keyed():
    """A function under ``whole`` draws the same in every engine, whatever the caller's generators are; they stay."""

    def seen(number, **options):
        np.random.seed(number)
        torch.manual_seed(number)
        before = np.random.get_state()[1].tolist()
        result = recipe().train(evaluation=phalanx.Evaluation(phalanx.whole(bootstrap), (HELD_OUT, TARGETS)), **options)
        assert np.random.get_state()[1].tolist() == before
        return [item.value for item in result.metric_history]

    expected = seen(0, engine="inline")
    assert seen(1, engine="inline") == seen(2, workers=2) == expected
    assert len(set(expected)) > 1, "the state moves, so that the values do"
