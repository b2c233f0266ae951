"""What losses and metrics are called with: functions of an evaluation, labels, types of outputs, and errors."""

import collections
import contextlib
import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
import phalanx.step
from phalanx.callbacks import EarlyStopping, SaveBest
from tests.callbacks.jobs import HELD_OUT, TARGETS, X, Y, accuracy, make_model, recipe

HOT = F.one_hot(TARGETS, 2).float()
Named = collections.namedtuple("Named", "loss logits")


class Output(collections.OrderedDict):
    """As outputs of Hugging Face are: entries are attributes, and it is made of keyword arguments."""

    def __post_init__(self):
        for item in dataclasses.fields(self):
            if getattr(self, item.name) is not None:
                self[item.name] = getattr(self, item.name)


@dataclasses.dataclass
class Logits(Output):
    """Both are optional."""

    loss: object = None
    logits: object = None


class Classifier(nn.Module):
    """Takes a dict, and returns loss and logits."""

    def __init__(self, kind=Logits):
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 2), kind

    def forward(self, x, labels):
        logits = self.linear(x)
        return self.kind(F.cross_entropy(logits, labels), logits)


def classifier(kind=Logits, **changes):
    given = {"replicas": 3, "batch_size": 32, "epochs": 1, "lr": 1e-2}
    options = {"loss_fn": loss_of_logits, "data": {"x": X, "labels": Y}} | given | changes
    return phalanx.Recipe(functools.partial(Classifier, kind), **options)


def job(**changes):
    given = {"make_model": make_model, "data": (X, Y), "loss_fn": F.cross_entropy, "replicas": 3, "lr": 1e-2}
    return phalanx.Recipe(**(given | {"epochs": 1} | changes))


def loss_of_logits(output, target):
    return F.cross_entropy(output.logits, target)


def accuracy_of_logits(output, target):
    return accuracy(output.logits, target)


def flipped(samples):
    x, y = torch.utils.data.default_collate(samples)
    return -x, y


def noisy(generator, samples):
    x, y = torch.utils.data.default_collate(samples)
    return x + torch.randn(x.shape) + torch.from_numpy(generator.standard_normal(x.shape)).float(), y


FUNCTIONS = {
    "forward_fn": {"forward_fn": lambda model, batch: model(-batch[0])},
    "target_fn": {"target_fn": lambda batch: 1 - batch[1]},
    "collate_fn": {"collate_fn": flipped},
    "noise": {"collate_fn": functools.partial(noisy, np.random.default_rng(0))},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_an_evaluation(name, tmp_path):
    """They stand in for the recipe's in this evaluation alone, with the same bits for any workers, and resumed."""
    due = {"own": phalanx.Evaluation({"size": size}, (HELD_OUT, TARGETS), batch_size=7, **FUNCTIONS[name])}
    due["plain"] = phalanx.Evaluation({"size": size}, (HELD_OUT, TARGETS), batch_size=7)
    whole = recipe(epochs=2).train(engine="inline", evaluation=due)
    values = {item.name: item.value for item in whole.metric_history}
    assert values["own/size"] != values["plain/size"]
    recipe(epochs=1).train(run_dir=tmp_path, engine="inline", evaluation=due)
    for options in ({"workers": 2}, {"run_dir": tmp_path, "engine": "inline"}):
        other = recipe(epochs=2).train(evaluation=due, **options)
        assert (other.digest, other.metric_history) == (whole.digest, whole.metric_history)
    bare = recipe(epochs=2).train(engine="inline", evaluation={"plain": due["plain"]})
    assert bare.metric_history == [item for item in whole.metric_history if item.name == "plain/size"]
    assert bare.digest == whole.digest


def test_noise_of_an_evaluation_is_keyed(monkeypatch):
    """A generator that a collate_fn owns has the chunk's key; negative twin: left to itself it goes on."""
    with recipe().start(engine="inline") as run:
        measured = functools.partial(run.evaluate, size, (HELD_OUT, TARGETS), 7, **FUNCTIONS["noise"])
        assert measured() == measured()
        monkeypatch.setattr(phalanx.step.generators, "kept", lambda owned=None: contextlib.nullcontext())
        monkeypatch.setattr(phalanx.step.generators, "reseed", lambda owned, key: None)
        assert measured() != measured()


def size(output, target):
    return (output[:, 0] * (1 + target)).double().mean()


def test_run_evaluate_takes_them():
    """As ``Evaluation`` does; what is no function, or does not go with single samples, is refused."""
    with recipe(epochs=1).start(engine="inline") as run:
        plain, hot = (HELD_OUT, TARGETS), (HELD_OUT, HOT)
        assert run.evaluate(accuracy, hot, target_fn=lambda batch: batch[1].argmax(1)) == run.evaluate(accuracy, plain)
        with pytest.raises(phalanx.UsageError, match="collate_fn of an evaluation is 3"):
            run.evaluate(accuracy, plain, collate_fn=3)
    single = recipe(batch_size=None, epochs=None, steps=1, forward_fn=lambda model, sample: model[0](sample[0]))
    with pytest.raises(phalanx.UsageError, match="batch_size is None"):
        single.train(evaluation=phalanx.Evaluation(accuracy, (HELD_OUT, TARGETS), collate_fn=flipped))


@pytest.mark.long
@pytest.mark.parametrize("kind", [Logits, Named])
def test_losses_metrics_and_whole_see_one_form(kind):
    """Labels of a dict are the target, and an output keeps its type; the same bits for any workers."""
    metrics = {"mean": accuracy_of_logits, "whole": phalanx.whole(accuracy_of_logits)}
    due = phalanx.Evaluation(metrics, {"x": HELD_OUT, "labels": TARGETS}, batch_size=7)
    found = [classifier(kind).train(workers=workers, evaluation=due) for workers in (1, 2)]
    assert (
        found[0].digest == found[1].digest == classifier(kind, target_fn=lambda batch: batch["labels"]).train().digest
    )
    assert found[0].metric_history == found[1].metric_history
    assert found[0].metric_history[0].value == pytest.approx(found[0].metric_history[1].value)
    outputs = found[0].predict({"x": HELD_OUT, "labels": TARGETS}, batch_size=7)
    assert type(outputs) is kind
    assert (outputs.loss, outputs.logits.shape) == (None, (60, 2))
    assert classifier(kind, target_fn=lambda batch: 1 - batch["labels"]).train().digest != found[0].digest


def doubled(model, batch):
    return 2 * F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.long
def test_a_loss_that_takes_the_model(tmp_path):
    """``loss_fn(model, batch)`` ends in the bits of the same loss of output and target; metrics are as always."""
    due = phalanx.Evaluation(accuracy, (HELD_OUT, TARGETS))
    plain = job(epochs=2, loss_fn=lambda output, target: 2 * F.cross_entropy(output, target))
    expected = plain.train(engine="inline", evaluation=due)
    made = functools.partial(job, loss_fn=doubled, loss_takes="model")
    made(epochs=1).train(run_dir=tmp_path, engine="inline", evaluation=due)
    for options in ({"engine": "inline"}, {"workers": 2}, {"run_dir": tmp_path}):
        other = made(epochs=2).train(evaluation=due, **options)
        assert (other.digest, other.metric_history) == (expected.digest, expected.metric_history)
    assert job(epochs=2).train(engine="inline").digest != expected.digest
    for changes, words in (
        ({"loss_fn": doubled}, "loss_takes is 'output'"),
        ({"loss_takes": "model", "loss_fn": None}, "there is no loss_fn"),
        ({"loss_takes": "batch"}, "loss_takes is 'batch'"),
    ):
        with pytest.raises(phalanx.UsageError, match=words):
            job(**changes)


TOLD = {
    "a loss of an object": (
        lambda: classifier(loss_fn=nn.CrossEntropyLoss()),
        r"was Logits\(loss float32\[\], logits float32\[11, 2\]\)",
    ),
    "shapes": (
        lambda: job(make_model=lambda: nn.Linear(6, 3), loss_fn=F.binary_cross_entropy_with_logits),
        r"output was float32\[11, 3\], target was int64\[11\].*loss_takes",
    ),
    "a mixed forward": (
        lambda: recipe(forward_fn=lambda model, batch: (model(batch[0]), batch[1])),
        r"output was tuple\(float32\[11, 2\], int64\[11\]\).*cookbook.md has Mixup",
    ),
    "an input of another width": (
        lambda: job(make_model=lambda: nn.Linear(7, 2)),
        r"the batch was tuple\(float32\[11, 6\], int64\[11\]\); phalanx calls model\(x\)",
    ),
    "a forward_fn": (
        lambda: job(forward_fn=lambda model, batch: model(batch)),
        r"the batch was tuple\(float32\[11, 6\], int64\[11\]\)\)$",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "workers"), [("shapes", 2), *((name, 1) for name in TOLD)])
def test_an_error_tells_output_and_target(name, workers):
    """So does one in a metric, with what changes them."""
    make, words = TOLD[name]
    with pytest.raises(phalanx.WorkerError, match=words):
        make().train(workers=workers)


@pytest.mark.parametrize("metric", [accuracy, phalanx.whole(accuracy)], ids=["mean", "whole"])
def test_an_error_of_a_metric_tells_them(metric):
    """Types, dtypes and shapes, and what changes them."""
    for made, data, words in (
        (classifier(), {"x": HELD_OUT, "labels": TARGETS}, r"output was Logits\(.*logits float32\[60, 2\].*target_fn="),
        (recipe(), (HELD_OUT, F.one_hot(TARGETS, 3).float()), r"target was float32\[60, 3\]"),
    ):
        with made.start(engine="inline") as run, pytest.raises(phalanx.WorkerError, match=words):
            run.evaluate(metric, data)


def test_a_dict_without_a_loss_is_told():
    """The keys that it has are named."""
    with pytest.raises(phalanx.UsageError, match=r"loss_fn returned dict\(ce float32\[\]\), which has no 'loss'"):
        job(loss_fn=lambda output, target: {"ce": F.cross_entropy(output, target)}).train(engine="inline")


class Several:
    """A metric object that computes several values."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.total = self.count = 0

    def update(self, output, target):
        self.total, self.count = self.total + accuracy(output, target) * len(target), self.count + len(target)

    def merge_state(self, other):
        self.total, self.count = self.total + other.total, self.count + other.count

    def compute(self):
        return {"acc": self.total / self.count, "f1": 0.5}


def evaluations(**metrics):
    return {name: phalanx.Evaluation(metric, (HELD_OUT, TARGETS)) for name, metric in metrics.items()}


def test_a_short_name_is_understood():
    """The last part of a name will do where only one ends so, in callbacks and schedules."""

    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)

    by = {"scheduler": plateau, "schedule_every": "epoch", "epochs": 3}
    ends = []
    for short in (True, False):
        name = "f1" if short else "test/Several/f1"
        made = recipe(schedule_on=name, **by)
        watch = [SaveBest(name), EarlyStopping("acc" if short else "test/Several/acc", patience=2)]
        ends.append(made.train(engine="inline", evaluation=evaluations(test=Several()), callbacks=watch))
    assert ends[0].digest == ends[1].digest != recipe(epochs=3).train(engine="inline").digest
    assert (ends[0].best.value, ends[0].best.steps) == (0.5, 5) == (ends[1].best.value, ends[1].best.steps)


@pytest.mark.parametrize(
    ("metric", "metrics", "steps", "words"),
    [
        ("accurracy", {"test": accuracy}, 0, "what is evaluated is test/accuracy; name one"),
        ("accuracy", {"test": accuracy, "train": accuracy}, 0, "may be test/accuracy or train/accuracy"),
        ("precision", {"test": Several()}, 5, "what is evaluated is test/Several/acc, test/Several/f1"),
        ("acc", {"test": Several(), "train": Several()}, 5, "may be test/Several/acc or train/Several/acc"),
    ],
)
def test_a_name_that_is_not_there_is_refused(metric, metrics, steps, words):
    """Before the first step where names are known, else once each evaluation was made."""
    reports = []
    with pytest.raises(phalanx.UsageError, match=words):
        recipe(epochs=3).train(
            engine="inline", evaluation=evaluations(**metrics), callbacks=[reports.append, SaveBest(metric)]
        )
    assert len(reports) <= steps
