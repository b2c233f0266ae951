"""A run that was interrupted goes on to the same bits: killed anywhere, with other workers, or as a longer run."""

import collections
import contextlib
import functools
import importlib.util
import itertools
import json
import linecache
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.checkpoint import snapshot
from phalanx.frameworks.torch.optimizer import Update
from tests.engines.deaths import hunted
from tests.families import (
    ADAMW,
    DATA,
    FAMILIES,
    FEATURES,
    IMAGES,
    OPTIMIZERS,
    SCHEDULERS,
    SGD,
    Elsewhere,
    conv_norm,
    mlp,
    muon_and_adamw,
    token_count,
)
from tests.sampling import sample
from tests.state.runs import (
    assert_same,
    contents,
    drivers,
    engine_of,
    folder_of,
    norm_recipe,
    sealed,
    steps_in,
)

STEPS = 30
PAIRS = list(itertools.product([1, 2, 3], repeat=2))  # workers before and after
SPREAD = random.Random(2).sample(PAIRS * 2 + PAIRS[:3] * 4, STEPS)  # a driver that starts workers takes its time


@pytest.fixture(scope="module")
def wanted():
    """What the run would have been."""
    return norm_recipe(STEPS).train(engine="inline")


@pytest.fixture(scope="module")
def drive():
    """See ``drivers``."""
    with drivers() as function:
        yield function


@pytest.mark.long
@pytest.mark.parametrize("step", [*sample("killed drivers", range(STEPS - 1), 3), STEPS - 1])
def test_the_driver_is_killed_after_every_step(tmp_path, wanted, drive, step):
    """SIGKILL after step k, in the midst of saving or just after it; the run ends as if nothing had been."""
    settled = bool(step % 2)
    before, after = SPREAD[step]
    assert drive(step, before, tmp_path, settled=settled) == -signal.SIGKILL
    found = phalanx.load(tmp_path).step
    assert found in ([step + 1] if settled else [max(0, step - 1), step])
    seen = []
    result = norm_recipe(STEPS).train(
        run_dir=tmp_path, callbacks=[lambda report: seen.append(report.step)], **engine_of(after)
    )
    assert seen == list(range(found, STEPS))
    assert_same(result, wanted)


def forget_buffers(monkeypatch):
    from phalanx.frameworks.torch import adapter

    original = adapter.adopt

    def adopt(model, updates, state):
        before = [value.clone() for value in model.buffers()]
        original(model, updates, state)
        for value, kept in zip(model.buffers(), before, strict=True):
            value.copy_(kept)

    monkeypatch.setattr(adapter, "adopt", adopt)


def forget_schedule(monkeypatch):
    monkeypatch.setattr(Update, "take_options", lambda update, options: None)


def forget_moments(monkeypatch):
    from phalanx.frameworks.torch import adapter

    original = adapter.adopt

    def adopt(model, updates, state):
        original(model, updates, state)
        for optimizer in updates.optimizers:
            optimizer.state.clear()

    monkeypatch.setattr(adapter, "adopt", adopt)


def forget_weights(monkeypatch):
    from phalanx.frameworks.torch import adapter

    original = adapter.adopt

    def adopt(model, updates, state):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        original(model, updates, state)
        model.load_state_dict(before)

    monkeypatch.setattr(adapter, "adopt", adopt)


@pytest.mark.long
@pytest.mark.usefixtures("computed_once")
@pytest.mark.parametrize("fault", [forget_buffers, forget_schedule, forget_moments, forget_weights])
def test_what_is_not_put_back_shows_in_the_digest(tmp_path, monkeypatch, fault):
    """The tests here can fail: without buffers, schedule, moments or weights, the digest differs."""
    norm_recipe(3).train(run_dir=tmp_path, engine="inline")
    (tmp_path / "next.json").unlink()  # which would show some of them before a step is done
    fault(monkeypatch)
    result = norm_recipe(6).train(run_dir=tmp_path, engine="inline")
    assert result.digest != norm_recipe(6).train(engine="inline").digest


def assert_snapshots_are_right(run_dir, steps):
    """Weights, buffers, losses and what optimizers keep are those of a run of so many steps."""
    with norm_recipe(steps).start(engine="inline") as run:
        for step in range(steps + 1):
            if step:
                next(run)
            if step not in steps_in(run_dir):
                continue
            run.save(run_dir / "alone" / str(step))
            found, alone = (
                contents(snapshot.read(place)) for place in (folder_of(run_dir, step), run_dir / "alone" / str(step))
            )
            assert found == alone, step


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_snapshot_is_the_state_of_its_step(tmp_path, workers):
    """While the run goes on, each snapshot is copied: it is that of a run of so many steps, bit for bit."""
    norm_recipe(12).train(run_dir=tmp_path, snapshot_every=1, keep_snapshots=99, **engine_of(workers))
    assert steps_in(tmp_path) == list(range(13))
    assert_snapshots_are_right(tmp_path, 12)


@pytest.mark.long
def test_snapshots_while_workers_die(tmp_path):
    """Workers are ended every few steps, and replaced, while snapshots are written: all of them are right."""
    rng = random.Random(1)
    options = {"run_dir": tmp_path, "snapshot_every": 3, "keep_snapshots": 99, "workers": 3, "engine": "processes"}
    with norm_recipe(90).start(**options) as run:
        next(run)
        with hunted(run, lambda: rng.uniform(0.2, 0.5)) as ended:
            run.finish()
        result = run.result()
    assert ended
    assert steps_in(tmp_path) == list(range(0, 91, 3))
    assert_same(result, norm_recipe(90).train(engine="inline"))
    assert_snapshots_are_right(tmp_path, 90)


def halved(tmp_path, give, first=3, steps=5):
    """Train for some steps, go on to the end, and compare with a run in one go."""
    give(steps=first).train(run_dir=tmp_path, engine="inline")
    assert phalanx.load(tmp_path).step == first
    result = give(steps=steps).train(run_dir=tmp_path, engine="inline")
    assert_same(result, give(steps=steps).train(engine="inline"))
    return result


@pytest.mark.parametrize("name", sample("resumed families", FAMILIES, 5))
def test_every_family(tmp_path, name):
    """Weights and buffers of every kind and dtype come back as they were."""
    family = FAMILIES[name]
    halved(tmp_path, functools.partial(family.recipe, family.replicas[0]), first=2, steps=4)


@pytest.mark.parametrize("name", sample("resumed optimizers", [*OPTIMIZERS, "muon_and_adamw"], 4))
def test_every_optimizer(tmp_path, name):
    """The state of torch's optimizers comes back as it was, and of several at once."""
    optimizer = OPTIMIZERS.get(name, muon_and_adamw)
    halved(tmp_path, functools.partial(FAMILIES["mlp"].recipe, 3, optimizer=optimizer))


@pytest.mark.parametrize("name", sample("resumed schedulers", SCHEDULERS, 4))
def test_every_scheduler(tmp_path, name):
    """Schedules go on where they were, ReduceLROnPlateau and nested ones too."""
    halved(tmp_path, functools.partial(FAMILIES["mlp"].recipe, 3, scheduler=SCHEDULERS[name]))


def test_a_schedule_of_a_rate_that_is_a_tensor(tmp_path):
    """Rates in tensors are scheduled on."""
    give = functools.partial(
        FAMILIES["mlp"].recipe, 3, optimizer=OPTIMIZERS["adam_tensor_lr"], scheduler=SCHEDULERS["exponential"]
    )
    halved(tmp_path, give)


@pytest.mark.long
@pytest.mark.parametrize("name", sample("resumed data", DATA, 4))
def test_every_kind_of_data(tmp_path, name):
    """Sample order and random draws depend on the step alone, so nothing of them has to be kept."""
    halved(tmp_path, lambda steps: FAMILIES["mlp"].recipe(3, steps=steps, **DATA[name]))


def test_milestones_stay_numbers(tmp_path):
    """MultiStepLR counts its milestones by integers, which JSON alone would turn into text."""
    give = functools.partial(FAMILIES["mlp"].recipe, 3, scheduler=SCHEDULERS["multi_step"])
    give(steps=2).train(run_dir=tmp_path, engine="inline")
    with give(steps=5).start(run_dir=tmp_path, engine="inline") as run:
        milestones = run._engine._framework._updates._schedules._schedulers[0].milestones
        assert milestones == collections.Counter([1, 3, 4])
        assert type(milestones) is collections.Counter
        assert all(type(key) is int for key in milestones)


def test_a_skipped_first_step(tmp_path):
    """A run whose first step was skipped goes on without torch's warning about the order of its calls."""
    x, y = FEATURES[0].clone(), FEATURES[1]
    x[0] = torch.nan
    data = {"data": (x, y), "shuffle": False, "on_nonfinite": "skip", "scheduler": SCHEDULERS["step"]}
    halved(tmp_path, lambda steps: FAMILIES["mlp"].recipe(3, steps=steps, **data), first=1)


def test_losses_that_are_not_finite(tmp_path):
    """NaN and infinite losses are kept as they were."""
    x, y = FEATURES[0].clone(), FEATURES[1]
    x[0] = torch.nan
    give = functools.partial(FAMILIES["mlp"].recipe, 3, data=(x, y), shuffle=False, on_nonfinite="ignore")
    give(steps=2).train(run_dir=tmp_path, engine="inline")
    result = give(steps=4).train(run_dir=tmp_path, engine="inline")
    alone = give(steps=4).train(engine="inline")
    assert (repr(result.loss_history), result.digest) == (repr(alone.loss_history), alone.digest)


def test_from_engine_to_engine(tmp_path, wanted):
    """One directory, each part of the run in another engine."""
    parts = [{"engine": "inline"}, {"engine": "processes", "workers": 2}, {}, {"engine": "processes", "workers": 3}]
    for number, options in enumerate([*parts, {"engine": "inline"}]):
        result = norm_recipe(6 * (number + 1)).train(run_dir=tmp_path, **options)
    assert_same(result, wanted)


@pytest.mark.parametrize(("before", "after"), sample("resumed batches", [(1, 2), (2, 1), (3, 2)], 1))
def test_batches_that_the_caller_brings(tmp_path, before, after):
    """Without data, the caller goes on with the batch of ``run.steps``."""
    recipe = phalanx.Recipe(mlp, None, F.cross_entropy, replicas=3, optimizer=ADAMW)
    generator = torch.Generator().manual_seed(5)
    batches = [(torch.randn(9, 5, generator=generator), FEATURES[1][:9]) for _ in range(8)]

    def train(most, **options):
        with recipe.start(**options) as run:
            while run.steps < most:
                run.step(batches[run.steps])
            return run.result()

    train(3, run_dir=tmp_path, **engine_of(before))
    assert_same(train(8, run_dir=tmp_path, snapshot_every=2, **engine_of(after)), train(8, engine="inline"))


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


EVALUATION = phalanx.Evaluation(accuracy, IMAGES)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_evaluations_are_kept(tmp_path, workers):
    """What was measured before the interruption is in metric_history, once, as in a run in one go."""
    alone = norm_recipe(9).train(engine="inline", evaluation=EVALUATION)
    with norm_recipe(9).start(run_dir=tmp_path, evaluation=EVALUATION, **engine_of(workers)) as run:
        for _ in range(5):
            next(run)
    result = norm_recipe(9).train(run_dir=tmp_path, evaluation=EVALUATION, **engine_of(workers))
    assert result.metric_history == alone.metric_history
    assert_same(result, alone)


def odd_metric(output, target):
    return {2: torch.tensor(torch.nan), 4: torch.tensor(torch.inf)}.get(len(target), torch.tensor(0.1))


def test_odd_metrics_are_kept(tmp_path):
    """NaN, infinity and 0.1 come back to the bit."""
    with norm_recipe(1).start(run_dir=tmp_path, engine="inline") as run:
        for count in (2, 4, 3):
            run.evaluate(odd_metric, (IMAGES[0][:count], IMAGES[1][:count]))
        next(run)
        alone = run.result()
    result = norm_recipe(1).train(run_dir=tmp_path, engine="inline")
    assert repr(result.metric_history) == repr(alone.metric_history)
    assert len(alone.metric_history) == 3


@pytest.mark.campaign
@pytest.mark.parametrize("workers", [1, 2])
def test_no_evaluation_is_lost_to_a_snapshot(tmp_path, monkeypatch, workers):
    """Workers may run ahead to the end of an epoch while a snapshot is taken: it is evaluated all the same."""
    monkeypatch.setattr("phalanx.checkpoint.saver.SECONDS", 0.01)
    monkeypatch.setattr("phalanx.checkpoint.saver.SHARE", 1e9)
    give = functools.partial(FAMILIES["mlp"].recipe, 2, batch_size=2, epochs=60)  # epochs of ten steps
    evaluation = phalanx.Evaluation(accuracy, FEATURES)
    result = give().train(run_dir=tmp_path, evaluation=evaluation, **engine_of(workers))
    assert [kept.steps for kept in result.metric_history] == list(range(10, 601, 10))
    assert_same(result, give().train(engine="inline"))


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_no_step_is_missing_in_the_log(tmp_path, monkeypatch, workers):
    """Whenever snapshots are taken, the log has every step once, in order."""
    monkeypatch.setattr("phalanx.checkpoint.saver.SECONDS", 0.01)
    monkeypatch.setattr("phalanx.checkpoint.saver.SHARE", 1e9)
    FAMILIES["mlp"].recipe(2, steps=600).train(run_dir=tmp_path, **engine_of(workers))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(600))
    assert sum(event["event"] == "snapshot" for event in events) > 3


def test_a_finished_run_is_extended(tmp_path, wanted):
    """More steps, or epochs, go on where the run had ended."""
    norm_recipe(7).train(run_dir=tmp_path, engine="inline")
    norm_recipe(None, epochs=8).train(run_dir=tmp_path, engine="inline")
    assert_same(norm_recipe(STEPS).train(run_dir=tmp_path, engine="inline"), wanted)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_finished_run_again(tmp_path, workers):
    """It returns the same, and computes nothing."""
    seen = []
    first = norm_recipe(4).train(run_dir=tmp_path, engine="inline")
    options = {"run_dir": tmp_path, "callbacks": [seen.append], **engine_of(workers)}
    assert_same(norm_recipe(4).train(**options), first)
    assert seen == []


def test_a_run_that_is_further_than_the_recipe(tmp_path):
    """A recipe of fewer steps than were done has another answer: that, or a refusal, but never the longer run's."""
    norm_recipe(6).train(run_dir=tmp_path, engine="inline")
    with contextlib.suppress(phalanx.PhalanxError):
        result = norm_recipe(4).train(run_dir=tmp_path, engine="inline")
        assert_same(result, norm_recipe(4).train(engine="inline"))


# What cannot go on, and what is told.


def other_loss(output, target):
    return F.cross_entropy(output, target) * 2


def other_model():
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


OTHERS = {
    "replicas": {"replicas": 4},
    "seed": {"seed": 1},
    "batch_size": {"batch_size": 9},
    "max_norm": {"max_norm": 1.0},
    "shuffle": {"shuffle": False},
    "drop_last": {"drop_last": True},
    "precision": {"precision": "bfloat16"},
    "threads": {"threads": 2},
    "on_nonfinite": {"on_nonfinite": "skip"},
    "data": {"data": (FEATURES[0] * 2, FEATURES[1])},
    "loss_fn": {"loss_fn": other_loss},
    "forward_fn": {"forward_fn": lambda model, batch: model(2 * batch[0])},
    "loss_takes": {"loss_takes": "model", "loss_fn": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])},
    "target_fn": {"target_fn": lambda batch: 1 - batch[1] % 2},
    "make_model": {"make_model": other_model},
    "scheduler": {"scheduler": halving},
    "optimizer": {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.8, weight_decay=0.01)},
    "collate_fn": {"collate_fn": lambda samples: torch.utils.data.default_collate([(-x, y) for x, y in samples])},
}


@pytest.mark.long
@pytest.mark.parametrize("field", OTHERS)
def test_another_recipe_is_refused(tmp_path, field):
    """The error names the field; what is there stays as it is, and its own recipe goes on."""
    base = {"replicas": 3, "steps": 4}
    FAMILIES["mlp"].recipe(**base).train(run_dir=tmp_path, engine="inline")
    with pytest.raises(phalanx.UsageError, match=rf"another recipe: (.*; )?{field}\b[^;]* (is|reads) "):
        FAMILIES["mlp"].recipe(**(base | OTHERS[field])).train(run_dir=tmp_path, engine="inline")
    FAMILIES["mlp"].recipe(**base).train(run_dir=tmp_path, engine="inline")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lr": 0.1}, {"lr": 0.2}),
        ({"optimizer": OPTIMIZERS["adam_tensor_lr"]},
         {"optimizer": functools.partial(torch.optim.Adam, lr=torch.tensor(0.02))}),
        ({"optimizer": functools.partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.99))},
         {"optimizer": functools.partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.98))}),
        ({"loss_fn": nn.CrossEntropyLoss()}, {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)}),
        ({"loss_fn": phalanx.weighted(F.cross_entropy, token_count)},
         {"loss_fn": phalanx.weighted(other_loss, token_count)}),
    ],
    ids=["lr", "rate in a tensor", "betas", "loss object", "loss that is weighted"],
)  # fmt: skip
def test_other_numbers_are_refused(tmp_path, one, other):
    """Arguments deep in the recipe count, wherever numbers can be read."""
    given = {"optimizer": None, "steps": 3}
    FAMILIES["mlp"].recipe(3, **(given | one)).train(run_dir=tmp_path, engine="inline")
    with pytest.raises(phalanx.UsageError, match="another recipe"):
        FAMILIES["mlp"].recipe(3, **(given | other)).train(run_dir=tmp_path, engine="inline")


WIDTH = {"hidden": 16}


def wide_model():
    return nn.Sequential(nn.Linear(5, WIDTH["hidden"]), nn.ReLU(), nn.Linear(WIDTH["hidden"], 3))


def test_a_changed_model_is_refused(tmp_path, monkeypatch):
    """A global makes another shape: an error names it; if told to go on, one names the parameter and both shapes."""
    FAMILIES["mlp"].recipe(3, make_model=wide_model).train(run_dir=tmp_path, engine="inline")
    monkeypatch.setitem(WIDTH, "hidden", 17)
    recipe = FAMILIES["mlp"].recipe(3, make_model=wide_model)
    with pytest.raises(phalanx.UsageError, match=r"\(its global WIDTH\)\['hidden'\] is 17 here, and 16 there"):
        recipe.train(run_dir=tmp_path, engine="inline")
    shapes = r"0\.weight is float32\[16, 5\] .*float32\[17, 5\] here"
    with pytest.warns(UserWarning, match="WIDTH"), pytest.raises(phalanx.PhalanxError, match=shapes):
        recipe.train(run_dir=tmp_path, engine="inline", resume="anyway")


def written_module(path, text):
    """A module from a file, made anew."""
    path.write_text(text)
    linecache.clearcache()
    spec = importlib.util.spec_from_file_location("written_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_changed_source_is_refused(tmp_path):
    """A function with code that computes something else is refused by name; with another comment it goes on."""
    text = (
        "from torch.nn import functional as F\ndef loss(output, target):\n    return F.cross_entropy(output, target)\n"
    )
    give = functools.partial(FAMILIES["mlp"].recipe, 3)
    before = written_module(tmp_path / "one.py", text).loss
    give(loss_fn=before, steps=2).train(run_dir=tmp_path / "run", engine="inline")
    after = written_module(tmp_path / "two.py", text.replace("return", "return 1.1 *")).loss
    with pytest.raises(phalanx.UsageError, match=r"replica 0 of step 2 .*; loss_fn reads differently"):
        give(loss_fn=after, steps=5).train(run_dir=tmp_path / "run", engine="inline")
    told = written_module(tmp_path / "three.py", "\n" + text.replace("return", "# the mean\n    return")).loss
    result = give(loss_fn=told, steps=5).train(run_dir=tmp_path / "run", engine="inline")
    assert_same(result, give(steps=5).train(engine="inline"))


def test_another_recipe_goes_on_anyway(tmp_path):
    """resume="anyway" goes on with another recipe: a warning and the log say what differs, and then it is its own."""
    give = functools.partial(FAMILIES["mlp"].recipe, 3, steps=4)
    options = {"run_dir": tmp_path, "engine": "inline"}
    give(steps=2, loss_fn=scaled(1.0)).train(**options)
    with pytest.warns(UserWarning, match=r"going on with another recipe .*loss_fn \(its variable factor\) is 2.0 here"):
        result = give(loss_fn=scaled(2.0)).train(resume="anyway", **options)
    assert result.resumed_from == 2
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    [resumed] = [event for event in events if event["event"] == "resume"]
    assert resumed["differs"] == [
        "replica 0 of step 2 comes to another loss, another gradient than before",
        "loss_fn (its variable factor) is 2.0 here, and 1.0 there",
    ]
    assert result.digest not in {give(loss_fn=scaled(factor)).train(engine="inline").digest for factor in (1.0, 2.0)}
    give(steps=5, loss_fn=scaled(2.0)).train(**options)
    with pytest.raises(phalanx.UsageError, match=r"another recipe: .*loss_fn"):
        give(steps=5, loss_fn=scaled(1.0)).train(**options)


def scaled(factor):
    def loss(output, target):
        return F.cross_entropy(output, target) * factor

    return loss


def test_anyway_where_nothing_differs(tmp_path):
    """resume="anyway" is resume=True where the recipe is the same: no warning, nothing in the log, the same digest."""
    norm_recipe(2).train(run_dir=tmp_path, engine="inline", resume="anyway")
    result = norm_recipe(4).train(run_dir=tmp_path, engine="inline", resume="anyway")
    assert_same(result, norm_recipe(4).train(engine="inline"))
    assert "differs" not in (tmp_path / "events.jsonl").read_text()
    for wrong in ("always", 1, None):
        with pytest.raises(phalanx.UsageError, match=r"resume is .*'anyway'"):
            norm_recipe(4).train(run_dir=tmp_path, engine="inline", resume=wrong)


def test_what_changes_in_use_is_told_when_it_goes_on(tmp_path):
    """A dataset that counted goes on with a warning that names the counter; a run that begins tells nothing."""
    data = Counting()
    give = functools.partial(FAMILIES["mlp"].recipe, 3, data=data)
    give(steps=2).train(run_dir=tmp_path, engine="inline")
    assert data.reads
    with pytest.warns(UserWarning, match="data.reads is 30 here, and 0 there; what it computes next is the same"):
        result = give(steps=4).train(run_dir=tmp_path, engine="inline")
    assert_same(result, give(steps=4).train(engine="inline"))


class Counting(torch.utils.data.Dataset):
    """Counts what is read of it."""

    def __init__(self):
        self.reads = 0
        self.lock = threading.Lock()

    def __len__(self):
        return len(FEATURES[0])

    def __getitem__(self, i):
        self.reads += 1
        return FEATURES[0][i], FEATURES[1][i]


@pytest.mark.parametrize(
    "recipe", [{}, {"seed": 0}, {"format": 5}, {"format": 4}, {"format": 4, "values": 1, "hints": [], "versions": {}}]
)
def test_a_description_that_is_none(tmp_path, recipe):
    """What tells of a recipe in a later format, or tells of none, is refused and changes nothing."""
    norm_recipe(2).train(run_dir=tmp_path, engine="inline", keep_snapshots=1)
    sealed(folder_of(tmp_path, 2), lambda state: state | {"recipe": recipe})
    with pytest.raises(phalanx.SnapshotError, match="its recipe"):
        norm_recipe(4).train(run_dir=tmp_path, engine="inline")
    assert steps_in(tmp_path) == [2]


@pytest.mark.long
def test_another_environment_is_told(tmp_path, monkeypatch):
    """With another version of torch, a warning says at the caller's line that bits may differ, and in what."""
    from phalanx.frameworks import registry

    norm_recipe(2).train(run_dir=tmp_path, engine="inline")
    found = registry.recorded_environment()
    assert found == json.loads(json.dumps(found))
    name = next(iter(found))
    monkeypatch.setattr("phalanx.checkpoint.resume.recorded_environment", lambda: found | {name: "another"})
    with pytest.warns(UserWarning, match=f"bits may differ .*{name} is another, was ") as told:
        result = norm_recipe(4).train(run_dir=tmp_path, engine="inline")
    assert [item.filename for item in told] == [__file__]
    assert_same(result, norm_recipe(4).train(engine="inline"))


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_batches_beyond_the_plan(tmp_path, workers):
    """A run that had gone beyond its planned steps on brought batches goes on; planned steps beyond it are refused."""
    images, labels = IMAGES

    def bring(run_dir, *numbers, steps=3):
        with norm_recipe(steps).start(run_dir=run_dir, **engine_of(workers)) as run:
            run.finish()
            for number in numbers:
                run.step((images[:8] + number, labels[:8]))
        return run.result()

    whole = bring(tmp_path / "whole", 0, 1, 2)
    bring(tmp_path / "parts", 0)
    bring(tmp_path / "parts", 1)
    again = bring(tmp_path / "parts", 2)
    assert_same(again, whole)
    assert (again.steps, again.resumed_from, again.chain) == (6, 5, whole.chain)
    assert bring(tmp_path / "other", 0, 2, 1).digest != whole.digest
    with pytest.raises(phalanx.UsageError, match="run of 6 steps, and the recipe has 2; raise steps"):
        bring(tmp_path / "parts", steps=2)
    assert norm_recipe(3).train(run_dir=tmp_path / "parts", **engine_of(workers)).digest == whole.digest


def test_resume_false(tmp_path):
    """A directory that was used is refused; one that was not is fine."""
    norm_recipe(2).train(run_dir=tmp_path, engine="inline", resume=False)
    with pytest.raises(phalanx.UsageError, match=r"run of 2 steps.*resume is False"):
        norm_recipe(2).train(run_dir=tmp_path, engine="inline", resume=False)
    norm_recipe(3).train(run_dir=tmp_path, engine="inline")


@pytest.mark.long
def test_two_runs_at_once(tmp_path):
    """The second is refused as long as the first is open, from another process too."""
    with norm_recipe(4).start(run_dir=tmp_path, engine="inline") as run:
        next(run)
        with pytest.raises(phalanx.UsageError, match="another run is at work"):
            norm_recipe(4).train(run_dir=tmp_path, engine="inline")
        code = (
            "import sys, phalanx.checkpoint.directory as d\n"
            "try: d.RunDirectory(sys.argv[1], 3)\n"
            "except d.UsageError as error: sys.exit(7 if 'at work' in str(error) else 8)\n"
        )
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 7
        run.finish()
    norm_recipe(5).train(run_dir=tmp_path, engine="inline")


def test_a_refused_start_leaves_the_directory_free(tmp_path):
    """A run that could not begin holds no lock."""

    def no_model():
        raise ValueError("no")

    with pytest.raises(phalanx.UsageError, match="make_model raised"):
        norm_recipe(4, make_model=no_model).train(run_dir=tmp_path, engine="inline")
    norm_recipe(4).train(run_dir=tmp_path, engine="inline")


def test_an_optimizer_with_hidden_state(tmp_path):
    """An optimizer that keeps state where no snapshot looks is refused, or told of, but never silently wrong."""
    give = functools.partial(FAMILIES["mlp"].recipe, 3, optimizer=Elsewhere)
    try:
        give(steps=3).train(run_dir=tmp_path, engine="inline")
        result = give(steps=6).train(run_dir=tmp_path, engine="inline")
    except (phalanx.PhalanxError, UserWarning):
        return
    assert_same(result, give(steps=6).train(engine="inline"))


class Expanded(nn.Module):
    """A constant buffer in memory that cannot be written element by element."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor([2.0]).expand(3))

    def forward(self, x):
        return self.body(x) * self.scale


def test_a_buffer_that_cannot_be_written(tmp_path):
    """A constant that was expanded is left alone, as it is equal."""
    halved(tmp_path, functools.partial(FAMILIES["mlp"].recipe, 3, make_model=Expanded))


class Wide(nn.Module):
    """A complex parameter of double precision."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.weight).abs()


def test_a_dtype_that_snapshots_have_not(tmp_path):
    """It is refused, or it works; but no run goes on without the snapshots that were asked for."""
    give = functools.partial(FAMILIES["mlp"].recipe, 3, make_model=Wide)
    with contextlib.suppress(phalanx.UsageError):
        halved(tmp_path, give)


@pytest.mark.parametrize("data", ["requires_grad", "conjugated"])
def test_columns_that_numpy_cannot_read(tmp_path, data):
    """Columns with a gradient, or conjugated lazily, are fine with run_dir if they are without."""
    x, y = FEATURES[0].clone(), FEATURES[1]
    forward_fn = None
    if data == "requires_grad":
        x.requires_grad_()
    else:
        x = torch.complex(x, x).conj()
        forward_fn = real_part
    give = functools.partial(FAMILIES["mlp"].recipe, 3, data=(x, y), forward_fn=forward_fn)
    try:
        give(steps=2).train(engine="inline")
    except phalanx.PhalanxError:
        pytest.skip("not accepted without run_dir either")
    halved(tmp_path, give)


def real_part(model, batch):
    return model(batch[0].real)


@pytest.mark.long
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_the_callers_modes_do_not_matter(tmp_path, mode):
    """A run goes on within the caller's inference mode, or with another default device, as it does without."""
    norm_recipe(3).train(run_dir=tmp_path, engine="inline")
    alone = norm_recipe(6).train(engine="inline")
    with mode():
        recipe = norm_recipe(6, make_model=on_cpu)
        try:
            recipe.train(engine="inline")
        except phalanx.PhalanxError:
            pytest.skip("not accepted without run_dir either")
    norm_recipe(3, make_model=on_cpu).train(run_dir=tmp_path / "other", engine="inline")
    with mode():
        assert_same(recipe.train(run_dir=tmp_path / "other", engine="inline"), alone)


def on_cpu():
    with torch.device("cpu"):
        return conv_norm()


# Weights to begin from.


def test_save_and_load(tmp_path):
    """What run.save writes has the result's digest, its weights and its losses; so does the newest of a run_dir."""
    with norm_recipe(6).start(engine="inline", run_dir=tmp_path / "run", snapshot_every=5) as run:
        for _ in range(4):
            next(run)
        run.save(tmp_path / "deep" / "saved")
        result = run.result()
        run.finish()
    loaded = phalanx.load(tmp_path / "deep" / "saved")
    assert (loaded.digest, loaded.step, loaded.loss_history) == (result.digest, 4, result.loss_history)
    assert loaded.samples == result.samples
    weights = dict(result.model.named_parameters()) | dict(result.model.named_buffers())
    assert list(loaded.weights) == list(weights)
    assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in weights.items())
    model = conv_norm()
    model.load_state_dict(loaded.weights)
    assert phalanx.digest(model) == phalanx.digest(result.model)
    assert phalanx.load(tmp_path / "run").step == 6


def test_saved_twice(tmp_path):
    """What exists is not written over; a closed run is not saved."""
    with norm_recipe(2).start(engine="inline") as run:
        run.save(tmp_path / "saved")
        before = (tmp_path / "saved" / "manifest.json").read_bytes()
        next(run)
        with pytest.raises(phalanx.UsageError, match="exists already"):
            run.save(tmp_path / "saved")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        with pytest.raises(phalanx.UsageError, match="exists already"):
            run.save(tmp_path / "dangling")
    assert (tmp_path / "saved" / "manifest.json").read_bytes() == before
    with pytest.raises(phalanx.UsageError, match="closed"):
        run.save(tmp_path / "late")


@pytest.mark.parametrize(
    ("name", "workers"), sample("warm starts", itertools.product(["conv_norm", "odd_tensors", "counting"], [1, 2]), 1)
)
def test_warm_start(tmp_path, name, workers):
    """Training from saved weights is training the model that has them, with new optimizers and from step 0."""
    give = functools.partial(FAMILIES[name].recipe, 4, optimizer=ADAMW if name == "conv_norm" else SGD)
    with give(steps=3).start(**engine_of(workers)) as run:
        run.finish()
        run.save(tmp_path / "saved")
        trained = run.result().model
    warm = give(steps=4, seed=9).train(warm_start=tmp_path / "saved", **engine_of(workers))
    assert_same(warm, give(steps=4, seed=9, make_model=trained).train(engine="inline"))
    assert warm.digest != give(steps=4, seed=9).train(engine="inline").digest


def test_warm_start_from_a_run_and_resumed(tmp_path):
    """A run_dir may be begun from too; a run that goes on takes its own state, whatever there is to begin from."""
    norm_recipe(3).train(run_dir=tmp_path / "first", engine="inline")
    options = {"warm_start": tmp_path / "first", "engine": "inline"}
    alone = norm_recipe(6, seed=9).train(**options)
    norm_recipe(2, seed=9).train(run_dir=tmp_path / "second", **options)
    assert_same(norm_recipe(6, seed=9).train(run_dir=tmp_path / "second", **options), alone)


@pytest.mark.parametrize("place", ["nowhere", "file", "empty"])
def test_nothing_to_begin_from(tmp_path, place):
    """A path without a snapshot is refused, by warm_start and by load, and names it."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty" / "snapshots").mkdir(parents=True)
    with pytest.raises(phalanx.SnapshotError, match=place):
        phalanx.load(tmp_path / place)
    with pytest.raises(phalanx.SnapshotError, match=place):
        norm_recipe(2).train(warm_start=tmp_path / place, engine="inline")


@pytest.mark.parametrize("name", ["conv_norm", "odd_tensors", "counting", "bfloat16_model", "float64", "mixed_dtypes"])
def test_others_can_read_the_files(tmp_path, name):
    """The files are safetensors as its own library reads them, weights and optimizer state alike."""
    safetensors = pytest.importorskip("safetensors.torch")
    with FAMILIES[name].recipe(3, steps=2).start(engine="inline") as run:
        run.finish()
        run.save(tmp_path / "saved")
        model = run.result().model
    read = safetensors.load_file(tmp_path / "saved" / "weights.safetensors")
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    assert set(read) == set(weights)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in weights.items())
    training = safetensors.load_file(tmp_path / "saved" / "training.safetensors")
    assert training["loss_history"].tolist() == run.result().loss_history


# SIGTERM.

JOB = """
import itertools, time, torch, phalanx
random = torch.Generator().manual_seed(0)
x, y = torch.randn(64, 4, generator=random), torch.randn(64, 1, generator=random)
calls = itertools.count()
def loss(output, target):
    if next(calls) == 20:
        print("ready", flush=True)
    time.sleep(0.004)
    return torch.nn.functional.mse_loss(output, target)
recipe = phalanx.Recipe(lambda: torch.nn.Linear(4, 1), (x, y), loss, replicas=2, steps=150)
"""


@pytest.mark.campaign
def test_sigterm_on_the_command_line(tmp_path):
    """It exits with 75 and says how to go on; the same command again ends in the digest of one that was left alone."""
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "phalanx", "train", "job.py", "--quiet", "--workers", "1", "--run-dir", "kept"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=500)
    assert process.returncode == 75, errors
    assert "the same call again" in errors
    steps = phalanx.load(tmp_path / "kept").step
    assert 0 < steps < 150
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=True)
    namespace = {}
    exec(JOB.replace("time.sleep(0.004)", ""), namespace)
    assert done.stdout.splitlines()[-1].split() == ["digest", namespace["recipe"].train(engine="inline").digest]


@pytest.fixture
def earlier():
    """A handler of SIGTERM that was there before, which notes its calls; what was there before it comes back."""
    calls = []

    def handler(number, frame):
        calls.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    yield handler, calls
    signal.signal(signal.SIGTERM, before)


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_here(tmp_path, earlier, workers):
    """The step is done and saved, Preempted raised; an earlier handler is called once, and there again afterwards."""
    handler, calls = earlier

    def strike(report):
        if report.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(phalanx.Preempted, match="SIGTERM came, and the state after 4 steps") as caught:
        norm_recipe(9).train(run_dir=tmp_path, callbacks=[strike], **engine_of(workers))
    assert (calls, signal.getsignal(signal.SIGTERM)) == ([signal.SIGTERM], handler)
    assert_same(caught.value.result, norm_recipe(4).train(engine="inline"))
    assert phalanx.load(tmp_path).step == 4
    alone = norm_recipe(9).train(engine="inline")
    assert_same(norm_recipe(9).train(run_dir=tmp_path, **engine_of(workers)), alone)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_at_any_time(tmp_path, earlier, workers):
    """It comes a dozen times, some milliseconds apart, while the run goes freely: in the end, nothing is missing."""
    give = functools.partial(FAMILIES["mlp"].recipe, 2, batch_size=2, epochs=15)  # epochs of ten steps
    evaluation = phalanx.Evaluation(accuracy, FEATURES)
    (handler, _), rng, preempted, result = earlier, random.Random(0), 0, None

    def strike():
        while signal.getsignal(signal.SIGTERM) is handler and not ended.is_set():
            time.sleep(0.001)
        if not ended.wait(rng.uniform(0.0, 0.02)) and preempted < 12:
            os.kill(os.getpid(), signal.SIGTERM)

    while result is None:
        ended = threading.Event()
        thread = threading.Thread(target=strike)
        thread.start()
        try:
            result = give().train(run_dir=tmp_path, evaluation=evaluation, **engine_of(workers))
        except phalanx.Preempted:
            preempted += 1
        finally:
            ended.set()
            thread.join()
    assert preempted
    alone = give().train(engine="inline", evaluation=evaluation)
    assert_same(result, alone)
    assert result.metric_history == alone.metric_history


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_no_earlier_handler(tmp_path, before):
    """Where SIGTERM was ignored, or nobody cared, it is so again afterwards."""
    found = signal.signal(signal.SIGTERM, before)
    try:
        with pytest.raises(phalanx.Preempted):
            norm_recipe(4).train(
                run_dir=tmp_path, engine="inline", callbacks=[lambda report: os.kill(os.getpid(), signal.SIGTERM)]
            )
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, found)


def test_sigterm_is_left_alone(tmp_path, earlier):
    """Without run_dir, outside the main thread and in a run that somebody holds, the handler is the caller's."""
    handler, _ = earlier
    seen = []

    def look(report):
        seen.append(signal.getsignal(signal.SIGTERM))

    norm_recipe(2).train(engine="inline", callbacks=[look])
    thread = threading.Thread(
        target=norm_recipe(2).train, kwargs={"run_dir": tmp_path / "one", "engine": "inline", "callbacks": [look]}
    )
    thread.start()
    thread.join()
    with norm_recipe(2).start(run_dir=tmp_path / "two", engine="inline", callbacks=[look]) as run:
        run.finish()
    assert seen == [handler] * 6
    norm_recipe(2).train(run_dir=tmp_path / "three", engine="inline", callbacks=[look])
    assert handler not in seen[6:]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_the_log_tells_what_happened(tmp_path):
    """Every line of the log is JSON, with a step each time, and says what began, went on and ended."""
    norm_recipe(2).train(run_dir=tmp_path, engine="inline")
    norm_recipe(4).train(run_dir=tmp_path, engine="inline")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    kinds = [(event["event"], event["step"]) for event in events if event["event"] in ("start", "resume", "end")]
    assert kinds == [("start", 0), ("end", 2), ("resume", 2), ("end", 4)]
    assert [event["step"] for event in events if event["event"] == "step"] == [0, 1, 2, 3]
    assert all(event["time"] <= time.time() for event in events)


def test_terminate_without_a_directory():
    """The run ends after the step, and says that nothing was saved; the state is in the error."""
    with FAMILIES["mlp"].recipe(2).start(engine="inline") as run:
        run.terminate()
        with pytest.raises(
            phalanx.Preempted, match=r"run\.terminate\(\) was called, and nothing is saved here"
        ) as caught:
            run.step()
        assert caught.value.result.steps == 1


def test_a_step_that_fails_is_not_taken_for_a_saved_one(tmp_path):
    """SIGTERM, and then a step that goes wrong: the error is that of the step, or a scheduler would begin it again."""
    x, y = torch.ones(8, 4), torch.ones(8, 1)

    def loss(output, target):
        return (output - target).pow(2).mean(), 0.0

    recipe = phalanx.Recipe(lambda: torch.nn.Linear(4, 1), (x, y), loss, replicas=2, batch_size=8, steps=2)
    with recipe.start(engine="inline", run_dir=tmp_path) as run:
        run.terminate()
        with pytest.raises(phalanx.RunError, match="every replica of step 0 has weight 0") as caught:
            run.step()
        assert not isinstance(caught.value, phalanx.Preempted)


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_is_no_run_is_named(tmp_path, name):
    """A path that is no snapshot and no run's directory is told so, and not as a damaged snapshot."""
    with pytest.raises(phalanx.SnapshotError, match="is no snapshot and no directory of a run"):
        phalanx.load(tmp_path / name)
