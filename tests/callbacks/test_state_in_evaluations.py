"""What a metric or a model keeps from chunk to chunk of an evaluation is found, in every engine; nothing else is."""

import dataclasses
import functools
import itertools
import queue
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.callbacks import EarlyStopping, SaveBest
from tests.callbacks.jobs import HELD_OUT, TARGETS, X, Y, accuracy

ENGINES = {
    "inline": {"engine": "inline"},
    "two workers": {"workers": 2},
    "as many workers as chunks": {"workers": 4},
    "auto": {"workers": "auto"},
    "lanes": {"devices": ["cpu", "cpu"]},
}
PLATEAU = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="max", patience=0, factor=0.3)


class Running:
    """A mean over all that it was ever called with."""

    def __init__(self):
        self.right = self.seen = 0

    def __call__(self, output, target):
        self.right += int((output.argmax(1) == target).sum())
        self.seen += len(target)
        return self.right / self.seen


class Threshold:
    """Goes by the first outputs that it saw."""

    def __init__(self):
        self.known = {}

    def __call__(self, output, target):
        if "median" not in self.known:
            self.known["median"] = output.median()
        return (output > self.known["median"]).float().mean()


class Cached(nn.Linear):
    """Normalises by the first batch that it was evaluated on."""

    def __init__(self):
        super().__init__(6, 2)
        self.mean = None

    def forward(self, x):
        if self.training:
            return super().forward(x)
        if self.mean is None:
            self.mean = x.mean(0)
        return super().forward(x - self.mean)


class Rows(Cached):
    """Keeps what is the same for any batch, as masks and positions are kept."""

    def forward(self, x):
        if self.mean is None or len(self.mean) < len(x):
            self.mean = torch.arange(len(x)).float()[:, None] * 0
        return nn.Linear.forward(self, x + self.mean[: len(x)])


class Sums:
    """A metric object as torchmetrics has them."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right, self.seen = torch.tensor(0), 0

    def update(self, output, target):
        self.right += (output.argmax(1) == target).sum()
        self.seen += len(target)

    def merge_state(self, other):
        self.right, self.seen = self.right + other.right, self.seen + other.seen

    def compute(self):
        return self.right / self.seen


class Late(Sums):
    """One that is not put back to where it began."""

    calls = iter(range(1000))

    def update(self, output, target):
        super().update(output, target)
        self.seen += next(self.calls)


def linear():
    return nn.Linear(6, 2)


def noisy(output, target):
    """Random, but keyed."""
    return (output.argmax(1) == target).float().mean() + torch.rand(())


def nothing(output, target):
    """A mean of nothing."""
    return torch.tensor(float("nan"))


def job(make_model, metric, epochs=2, callbacks=(), batch_size=16, decides=True, **options):
    changes = {"scheduler": PLATEAU, "schedule_every": "epoch", "schedule_on": "acc"} if decides else {}
    recipe = phalanx.Recipe(
        make_model, (X, Y), F.cross_entropy, replicas=4, batch_size=50, epochs=epochs, lr=0.1, **changes
    )
    evaluation = phalanx.Evaluation({"acc": metric, "other": accuracy}, (HELD_OUT, TARGETS), batch_size=batch_size)
    return recipe.train(evaluation=evaluation, callbacks=callbacks, progress=False, **options)


KEEPING = {
    "a running mean": (linear, Running),
    "a threshold of the first chunk": (linear, Threshold),
    "a model with a cache": (Cached, lambda: accuracy),
    "a metric object that counts its calls": (linear, Late),
}
HONEST = {
    "a function": (linear, lambda: accuracy),
    "keyed noise": (linear, lambda: noisy),
    "NaN": (linear, lambda: nothing),
    "a metric object": (linear, Sums),
    "a function of all samples": (linear, lambda: phalanx.whole(lambda output, target: accuracy(output, target))),
    "a model that caches constants": (Rows, lambda: accuracy),
    "batch norm and dropout": (
        lambda: nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2), nn.Dropout()),
        lambda: accuracy,
    ),
}


@pytest.mark.long
@pytest.mark.cases(6)
@pytest.mark.parametrize(("engine", "kind"), list(itertools.product(ENGINES, KEEPING)))
def test_what_decides_is_refused(engine, kind):
    """A metric by which the schedule goes ends the run at its first evaluation in every engine, with the ways out."""
    make_model, metric = KEEPING[kind]
    with pytest.raises(phalanx.StateError, match=r"metric 'acc' of samples \[.*phalanx\.whole.*merge_state") as found:
        job(make_model, metric(), **ENGINES[engine])
    assert found.value.result.steps == 3
    assert list(found.value.samples) == list(range(16))


@pytest.mark.long
@pytest.mark.cases(6)
@pytest.mark.parametrize(("engine", "kind"), list(itertools.product(ENGINES, HONEST)))
def test_honest_code_has_one_answer_without_a_word(engine, kind):
    """What keeps nothing that matters is neither refused nor warned of; digest and values are the same everywhere."""
    make_model, metric = HONEST[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, other = job(make_model, metric(), **ENGINES[engine]), job(make_model, metric(), engine="inline")
    assert one.digest == other.digest
    assert [repr(item.value) for item in one.metric_history] == [repr(item.value) for item in other.metric_history]


@pytest.mark.parametrize("batch_size", [60, 256])
def test_a_single_chunk_is_enough(batch_size):
    """With one chunk, too, the state of a metric and of a model is found."""
    for make_model, metric in ((linear, Running()), (Cached, accuracy)):
        with pytest.raises(phalanx.StateError):
            job(make_model, metric, batch_size=batch_size, engine="inline")


@pytest.mark.parametrize("waits", [lambda: EarlyStopping("acc", mode="max"), lambda: SaveBest("acc", mode="max")])
def test_callbacks_that_wait_for_a_metric_go_by_it(waits):
    """EarlyStopping and SaveBest decide as a schedule does."""
    with pytest.raises(phalanx.StateError, match="metric 'acc'"):
        job(linear, Running(), callbacks=[waits()], decides=False, engine="inline")


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_decides_nothing_is_warned_of_once(engine):
    """Nobody goes by the metric, or nondeterministic is "allow": one warning, and the run goes on."""
    for options in ({"decides": False}, {"nondeterministic": "allow"}):
        with pytest.warns(UserWarning, match="metric 'acc' of samples") as told:
            assert job(linear, Running(), epochs=3, **options, **ENGINES[engine]).steps == 9
        assert len(told) == 1


class Several(Late):
    """An object that computes several values."""

    def compute(self):
        return {"acc": super().compute(), "other": 1.0}


def test_a_value_of_an_object_decides():
    """What an object computes has a name only afterwards: it is refused, too, if the run goes by such a value."""
    recipe = phalanx.Recipe(linear, (X, Y), F.cross_entropy, replicas=4, batch_size=50, epochs=2)
    evaluation = phalanx.Evaluation([Several(), accuracy], (HELD_OUT, TARGETS), batch_size=16)
    for name in ("acc", "Several/acc"):
        with pytest.raises(phalanx.StateError, match="metric 'Several'"):
            recipe.train(evaluation=evaluation, callbacks=[EarlyStopping(name, mode="max")], engine="inline")
    with pytest.warns(UserWarning, match="metric 'Several'"):
        recipe.train(evaluation=evaluation, callbacks=[EarlyStopping("accuracy")], engine="inline")


def test_another_evaluation_decides_nothing():
    """A metric of one name in two evaluations: the run goes by one of them, and the other is a warning."""
    recipe = phalanx.Recipe(linear, (X, Y), F.cross_entropy, replicas=4, batch_size=50, epochs=2)
    both = {
        "test": phalanx.Evaluation({"acc": accuracy}, (HELD_OUT, TARGETS), batch_size=16),
        "train": phalanx.Evaluation({"acc": Running()}, (X, Y), batch_size=16),
    }
    with pytest.warns(UserWarning, match="metric 'acc' of samples"):
        recipe.train(evaluation=both, callbacks=[EarlyStopping("test/acc", mode="max")], engine="inline")
    with pytest.raises(phalanx.StateError, match="metric 'acc'"):
        recipe.train(evaluation=both, callbacks=[EarlyStopping("train/acc", mode="max")], engine="inline")


def test_a_metric_that_was_warned_of_decides():
    """Evaluated by hand it was a warning. Where the run goes by it, it ends the run all the same."""
    recipe = phalanx.Recipe(linear, (X, Y), F.cross_entropy, replicas=4, batch_size=50, epochs=2)
    metric = Running()
    evaluation = phalanx.Evaluation({"acc": metric}, (HELD_OUT, TARGETS), batch_size=16)
    with recipe.start(evaluation=evaluation, callbacks=[EarlyStopping("acc")], engine="inline") as run:
        with pytest.warns(UserWarning, match="metric 'acc'"):
            run.evaluate({"acc": metric}, (HELD_OUT, TARGETS), batch_size=16)
        with pytest.raises(phalanx.StateError, match="metric 'acc'"):
            run.finish()


def test_evaluations_by_hand_are_watched():
    """run.evaluate and run.predict warn, and say what was seen; a second call does not measure twice.

    What a metric appends to a list is as if each chunk had been measured once.
    """
    calls, ticks = [], iter(range(1000))

    def counted(output, target):
        next(ticks)  # which nobody puts back
        calls.append(len(target))
        return 0.0

    with phalanx.Recipe(Cached, (X, Y), F.cross_entropy, replicas=2, batch_size=50, epochs=1).start() as run:
        with pytest.warns(UserWarning, match="metric 'outputs' of samples .*in between: mean"):
            run.predict(HELD_OUT, batch_size=20)
        with pytest.warns(UserWarning, match="metric 'metric' of samples .*: right, seen"):
            run.evaluate({"metric": Running()}, (HELD_OUT, TARGETS), batch_size=20)
        for expected in (7, 3):
            calls.clear()
            before = next(ticks)
            run.evaluate(counted, (HELD_OUT, TARGETS), batch_size=20)
            assert (len(calls), next(ticks) - before - 1) == (3, expected)


def test_a_metric_of_all_samples_is_called_once():
    """phalanx.whole collects a chunk twice, and calls its function once."""
    calls = []
    job(linear, phalanx.whole(lambda output, target: calls.append(len(target)) or 0.0), epochs=1, engine="inline")
    assert calls == [60]


def test_what_is_kept_is_put_back():
    """A cache and a counter are afterwards as an evaluation that is not watched leaves them."""
    left = []
    for watched in (None, False):
        metric = Threshold()
        with phalanx.Recipe(Cached, (X, Y), F.cross_entropy, replicas=2, batch_size=50, epochs=1).start(
            engine="inline"
        ) as run:
            run._engine.options = dataclasses.replace(run._engine.options, allow=watched)  # planted
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.evaluate({"acc": metric}, (HELD_OUT, TARGETS), batch_size=20)
            left.append((run.model.mean, metric.known["median"]))
    assert torch.equal(left[0][0], left[1][0])
    assert torch.equal(left[0][0], HELD_OUT[:20].mean(0))
    assert not torch.equal(left[0][0], HELD_OUT[20:40].mean(0))
    assert torch.equal(left[0][1], left[1][1])


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_evaluation_after_a_resume_is_watched(tmp_path, engine):
    """A run that goes on finds what an earlier one, which was told to allow it, did not mind."""
    with pytest.warns(UserWarning, match="metric 'acc'"):
        job(linear, Running(), nondeterministic="allow", run_dir=tmp_path, epochs=2, engine="inline")
    with pytest.raises(phalanx.StateError, match="metric 'acc'"):
        job(linear, Running(), run_dir=tmp_path, epochs=3, resume="anyway", **ENGINES[engine])


def test_a_queue_that_a_thread_drains_stays_whole():
    """Objects of libraries are not put back: a thread may be using them."""
    rows, seen = queue.Queue(), []

    def drain():
        while (row := rows.get()) is not None:
            seen.append(row)
            rows.task_done()

    def logged(output, target):
        rows.put(len(target))
        return 0.0

    thread = threading.Thread(target=drain)
    thread.start()
    with phalanx.Recipe(lambda: nn.Linear(6, 2), (X, Y), F.cross_entropy, replicas=2, epochs=1).start() as run:
        run.evaluate(logged, (HELD_OUT, TARGETS), batch_size=20)
    rows.join()
    rows.put(None)
    thread.join()
    assert len(seen) == 5
    assert rows.unfinished_tasks == 1
